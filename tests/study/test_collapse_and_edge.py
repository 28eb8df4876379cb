"""How often training collapses, and eigenvalue times rate (oracles: counts by hand, intervals in
closed form; the computed quadratic, the records' own columns)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.common import estimates
from analysis.rates import collapse, edge
from analysis.rates.quadratic_model import computed
from regimes.base.errors import RecordError
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return load_all(REFERENCE / "smoke-quirks-topk.tar.xz")


def made(run: Record, metrics: list[float | None], **config: Any) -> Record:
    """The run with these metrics, the last of them in all further units."""
    each = metrics + metrics[-1:] * len(run.rows)
    rows = [{**row, "metric": x} for row, x in zip(run.rows, each, strict=False)]
    return replace(run, header=run.header | {"config": run.config | config}, rows=rows)


def each(**schedules: list[float]) -> pd.DataFrame:
    """Accuracies by seed; below 50 is collapsed."""
    return pd.DataFrame(
        [
            {"name": name, "seed": seed, "accuracy": value, "collapsed": not value >= 50}
            for name, values in schedules.items()
            for seed, value in enumerate(values)
        ]
    )


def test_shares_have_their_exact_interval() -> None:
    for n in (1, 5, 30):
        assert estimates.exact(0, n) == pytest.approx((0, 1 - 0.025 ** (1 / n)))
        assert estimates.exact(n, n) == pytest.approx((0.025 ** (1 / n), 1))


def test_only_seeds_that_tell_two_schedules_apart_decide() -> None:
    """Alike schedules have no p, and Holm's correction is over the others."""
    low, high = [95, 96, 94, 95, 40, 95, 95, 95], [10, 20, 30, 10, 20, 90, math.nan, 10]
    rows = collapse.table(each(low=low, high=high)).set_index("schedule")
    assert list(rows["collapsed"]) == [1, 7]
    assert rows.loc["high", "p"] == pytest.approx(2 / 2**6)  # six of six; the fifth is in both
    assert math.isnan(rows.loc["low", "p"])
    assert rows.loc["high", "accuracy"] == 90
    rows = collapse.table(each(low=[95] * 6, mid=[94] * 6, high=[10] * 6, worse=[9] * 6))
    rows = rows.set_index("schedule")
    assert math.isnan(rows.loc["mid", "p"])
    assert rows.loc["high", "p_holm"] == pytest.approx(2 * 2 / 2**6)


def test_nearer_to_guessing_than_to_the_best_median_is_collapsed(runs: list[Record]) -> None:
    """Ten classes; in the records, and with a best median of 90: the middle, 50, is not."""
    found = collapse.entries(runs)
    best = found.loc[found["name"] == "low", "accuracy"].median()
    assert best == found.groupby("name")["accuracy"].median().max()
    for row in found.to_dict("records"):
        assert row["collapsed"] == (abs(row["accuracy"] - 10) < abs(row["accuracy"] - best))
    assert found["collapsed"].any()
    found = collapse.entries([made(runs[0], [x], name=str(x)) for x in (0.9, 0.5, 0.4375)])
    assert found["accuracy"].to_list() == [90.0, 50.0, 43.75]
    assert found["collapsed"].to_list() == [False, False, True]


def test_the_best_schedule_is_the_one_of_the_table(runs: list[Record]) -> None:
    """Of "lucky" one run of three is finite: its median is 0, and the limit is of "low", 35."""
    metrics = {"lucky": (None, 0.95, None), "low": (0.6, 0.6, 0.4)}
    found = collapse.entries(
        [
            made(runs[0], [metric], name=name, seed=seed)
            for name, values in metrics.items()
            for seed, metric in enumerate(values)
        ]
    )
    assert found["collapsed"].to_list() == [True, False, True, False, False, False]
    assert collapse.table(found)["schedule"].to_list() == ["low", "lucky"]


def test_other_metrics_and_images_without_classes_are_refused(runs: list[Record]) -> None:
    header = runs[0].header | {"data": {**runs[0].header["data"], "classes": []}}
    for others in ([replace(runs[0], header=header)], load_all(REFERENCE / "lm-demo.tar.xz")):
        with pytest.raises(RecordError, match="counted of accuracies"):
            collapse.entries(others)


def test_the_command_leaves_its_table(tmp_path: Path) -> None:
    paths = collapse.main(REFERENCE / "smoke-quirks-topk.tar.xz", out=tmp_path)
    assert {path.name for path in paths} == {"collapse.csv", "collapse.md"}


# -- eigenvalue times rate -----------------------------------------------------------------


@pytest.fixture(scope="module")
def edges() -> list[Record]:
    return load_all(REFERENCE / "rates-edge.tar.xz")


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_edge_is_that_of_the_computed_quadratic(momentum: float) -> None:
    assert edge.edge(momentum) == pytest.approx(computed("low-pass", 1, momentum), rel=1e-6)


def test_a_product_is_of_the_same_epoch(edges: list[Record]) -> None:
    each = edge.products(edges)
    one = next(run for run in edges if run.name == "rank 1 at 0.2")
    rows = each[(each["arm"] == "rank 1") & (each["rate"] == 0.2) & (each["seed"] == one.seed)]
    assert rows["epoch"].to_list() == [0, 2, 4, 6, 8, 10]
    for epoch, product in zip(rows["epoch"], rows["product"], strict=True):
        row = one.rows[epoch]
        assert product == pytest.approx(row["model"]["eigenvalue:batch"] * row["lr"])


def test_the_mean_is_over_seeds_behind_the_warm_up(edges: list[Record]) -> None:
    each = edge.products(edges)
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


def test_runs_that_cannot_be_read_together_are_one_sentence(edges: list[Record]) -> None:
    """Without an eigenvalue or a rate in the name, unfinished, or of an optimiser whose edge is
    another."""
    one = edges[0]

    def changed(**config: Any) -> Record:
        return replace(one, header=one.header | {"config": one.config | config})

    for run, words in (
        (replace(one, rows=[{**row, "model": {}} for row in one.rows]), "no eigenvalue:batch was"),
        (changed(name="low"), "does not have the form 'ARM at RATE'"),
        (replace(one, rows=one.rows[:4]), "finish"),
    ):
        with pytest.raises(RecordError, match=words):
            edge.products([*edges[1:], run])
    for other in ({"momentum": 0.5}, {"nesterov": False}, {"name": "adamw"}):
        stranger = changed(optimizer=one.config["optimizer"] | other)
        with pytest.raises(RecordError, match="one Nesterov momentum alone"):
            edge.figure([*edges[1:4], stranger])
