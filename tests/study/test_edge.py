"""Eigenvalue times rate (oracles: the computed quadratic, the records' own columns)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from analysis.rates import edge
from analysis.rates.quadratic_model import computed
from regimes.base.errors import RecordError
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return load_all(REFERENCE / "rates-edge.tar.xz")


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_edge_is_that_of_the_computed_quadratic(momentum: float) -> None:
    assert edge.edge(momentum) == pytest.approx(computed("low-pass", 1, momentum), rel=1e-6)


def test_a_product_is_of_the_same_epoch(runs: list[Record]) -> None:
    each = edge.products(runs)
    one = next(run for run in runs if run.name == "rank 1 at 0.2")
    rows = each[(each["arm"] == "rank 1") & (each["rate"] == 0.2) & (each["seed"] == one.seed)]
    assert rows["epoch"].to_list() == [0, 2, 4, 6, 8, 10]
    for epoch, product in zip(rows["epoch"], rows["product"], strict=True):
        row = one.rows[epoch]
        assert product == pytest.approx(row["model"]["eigenvalue:batch"] * row["lr"])


@pytest.mark.parametrize(
    ("table", "words"), [({}, ""), ({"every": 1}, ""), ({"every": 3}, ", every 3 epochs")]
)
def test_the_caption_says_how_often_it_was_measured(
    runs: list[Record], table: dict[str, int], words: str
) -> None:
    config = runs[0].config | {"instruments": {"curvature": table}}
    run = replace(runs[0], header=runs[0].header | {"config": config})
    assert edge._how_often(run) == words


def test_the_mean_is_over_seeds_behind_the_warm_up(runs: list[Record]) -> None:
    each = edge.products(runs)
    rows = edge.table(each, 2).set_index(["rate", "arm"])
    kept = each[(each["epoch"] >= 2) & (each["arm"] == "dense") & (each["rate"] == 0.4)]
    means = np.array([seeds["product"].mean() for _, seeds in kept.groupby("seed")])
    row = rows.loc[(0.4, "dense")]
    ends = stats.t.interval(0.95, len(means) - 1, means.mean(), stats.sem(means))
    assert (row["product"], row["product_ci_low"], row["product_ci_high"]) == pytest.approx(
        (means.mean(), *ends)
    )
    assert row["n"] == len(means) == 8
    assert row["largest"] == kept["product"].max()


def test_runs_without_either_are_one_sentence(runs: list[Record]) -> None:
    unread = replace(runs[0], rows=[{**row, "model": {}} for row in runs[0].rows])
    unnamed = replace(runs[0], header=runs[0].header | {"config": runs[0].config | {"name": "low"}})
    for run, part in (
        (unread, "no eigenvalue:batch was recorded"),
        (unnamed, "does not have the form 'ARM at RATE'"),
    ):
        with pytest.raises(RecordError, match=part):
            edge.products([run])


def test_an_unfinished_run_is_one_sentence(runs: list[Record]) -> None:
    with pytest.raises(RecordError, match="finish"):
        edge.products([*runs[1:], replace(runs[0], rows=runs[0].rows[:4])])


@pytest.mark.parametrize(
    "other",
    [{"momentum": 0.5}, {"nesterov": False}, {"name": "adamw"}],
    ids=lambda o: next(iter(o)),
)
def test_runs_of_other_optimisers_have_no_edge_here(
    runs: list[Record], other: dict[str, Any]
) -> None:
    config = runs[0].config | {"optimizer": runs[0].config["optimizer"] | other}
    stranger = replace(runs[0], header=runs[0].header | {"config": config})
    with pytest.raises(RecordError, match="one Nesterov momentum alone"):
        edge.figure([*runs[1:4], stranger])
