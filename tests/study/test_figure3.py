"""Figure 3 and the signals' figure, from the committed records, against numbers recomputed by hand
(oracle: arithmetic over the rows, scikit-learn)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import cohen_kappa_score, jaccard_score

from analysis.detection import signals
from analysis.paper import figure3, figure4a
from regimes.base.errors import RecordError
from regimes.policies.history import root_of_squares
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return load_all(REFERENCE / "small-signals.tar.xz")


def test_curves_are_means_over_seeds_of_the_rows(runs: list[Record]) -> None:
    _, numbers = figure3.figure3(runs)
    for epoch in (0, 11, 23):
        values = [run.rows[epoch]["model"]["eigenvalue:batch"] for run in runs]
        row = numbers[(numbers["signal"] == figure3.BATCH) & (numbers["epoch"] == epoch)].iloc[0]
        ends = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (row["mean"], row["ci_low"], row["ci_high"]) == pytest.approx(
            (np.mean(values), *ends)
        )


def test_agreement_by_the_rules_written_out(runs: list[Record]) -> None:
    """Evaluated after epochs 0, 3, 6, ...: critical until the second, then by relative change."""
    _, pairs = figure3.agreement(runs, 3, 0.5)
    run = runs[0]
    weights = [i for i, layer in enumerate(run.header["layers"]) if layer["compressed"]]
    norm = np.array([[r["statistics"]["norm:update"][i] for i in weights] for r in run.rows])
    top = np.array([[r["model"]["eigenvalue"]] for r in run.rows])
    calls = []
    for values, falls in ((norm, False), (top, True)):
        now, levels = np.ones(values.shape[1], bool), []
        for epoch in range(len(values)):
            levels.append(now)
            if epoch % 3 == 0 and epoch > 0:
                change = (values[epoch - 3] - values[epoch]) / values[epoch - 3]
                now = (change if falls else abs(change)) >= 0.5
        calls.append(np.array(levels).mean(1) >= 0.5)
    one = figure3.compare_rules(run, figure3.rules(3, 0.5)).pairs.iloc[0]
    assert one["jaccard"] == pytest.approx(jaccard_score(*calls))
    assert one["kappa"] == pytest.approx(cohen_kappa_score(*calls))
    assert pairs.iloc[0]["n"] == len(runs)


def test_the_eigenvalue_agrees_with_the_first_epochs_as_well_as_with_the_norms(
    runs: list[Record],
) -> None:
    """The control has as many epochs as the norm's rule, ten."""
    found = figure3.agreement(runs, 3, 0.5)[1].set_index(["a", "b"])["kappa"]
    assert found[figure3.NORM, figure3.EVAL] == found[figure3.EVAL, figure3.CONTROL]
    norms = [e in (*range(7), 13, 14, 15) for e in range(24)]
    by_hand = cohen_kappa_score([True] * 10 + [False] * 14, norms)
    assert found[figure3.NORM, figure3.CONTROL] == pytest.approx(by_hand)
    for rule in figure3.rules(4, 0.125).values():
        assert (rule.interval, rule.eta) == (4, 0.125)  # type: ignore[attr-defined]


def test_readings_of_every_second_epoch_are_one_line(runs: list[Record]) -> None:
    """As ``curvature.every = 2`` leaves them; the norm has all epochs."""
    few = [
        replace(
            run, rows=[row if row["epoch"] % 2 == 0 else row | {"model": {}} for row in run.rows]
        )
        for run in runs[:3]
    ]
    figure, numbers = figure3.figure3(few)
    for name, (ax, step) in {
        figure3.EVAL: (figure.axes[0], 2),
        figure3.BATCH: (figure.axes[0], 2),
        figure3.NORM: (figure.axes[1], 1),
    }.items():
        (line,) = (line for line in ax.lines if line.get_label() == name)
        assert list(line.get_xdata()) == [*range(0, 24, step)]
        assert np.isfinite(line.get_ydata()).all()
        rows = numbers[numbers["signal"] == name]
        assert rows["n"].tolist() == [0 if epoch % step else 3 for epoch in range(24)]
        assert rows["critical"].notna().all()


def test_signals_of_one_run(runs: list[Record]) -> None:
    figure, numbers = signals.signals(runs[0])
    assert len(figure.axes) == 4
    first = runs[0].rows[0]
    weights = [i for i, layer in enumerate(runs[0].header["layers"]) if layer["compressed"]]
    squares = sum(first["statistics"]["norm:update"][i] ** 2 for i in weights)
    assert numbers["norm"].iloc[0] == pytest.approx(squares**0.5)
    assert numbers["fisher_trace"].iloc[0] == first["model"]["fisher_trace"]


@pytest.mark.parametrize("table", [signals.numbers, lambda run: figure3.signals([run])])
def test_the_norm_of_layers_of_which_one_has_none_is_undefined(
    table: Callable[[Record], pd.DataFrame], runs: list[Record]
) -> None:
    """In both tables, as `root_of_squares` of the detectors has it."""
    run = runs[0]
    weights = [i for i, layer in enumerate(run.header["layers"]) if layer["compressed"]]
    rows = copy.deepcopy(run.rows[:4])
    rows[1]["statistics"]["norm:update"][weights[-1]] = None
    rows[2]["statistics"]["norm:update"] = [None] * len(run.header["layers"])
    norms = [row["statistics"]["norm:update"] for row in rows]
    expected = [root_of_squares([of_layer[i] for i in weights]) for of_layer in norms]
    found = table(replace(run, rows=rows))["norm"].to_list()
    known = [math.nan if norm is None else norm for norm in expected]
    assert found == pytest.approx(known, rel=1e-12, nan_ok=True)
    assert np.isnan(found).tolist() == [False, True, True, False]


def test_records_without_the_signal_are_refused() -> None:
    plain = [r for r in load_all(REFERENCE / "small.tar.xz") if r.name == "low"]
    with pytest.raises(RecordError, match="recorded no 'eigenvalue'"):
        figure3.figure3(plain)
    with pytest.raises(RecordError, match="recorded no curvature"):
        signals.signals(plain[0])
    with pytest.raises(RecordError, match="recorded no support overlap"):
        figure4a.overlaps(plain)


def test_figure_4a_pools_over_seeds_and_says_where_90_percent_is() -> None:
    every = load_all(REFERENCE / "small-overlap.tar.xz")
    chosen = [run for run in every if run.name == "dense"]
    numbers = figure4a.overlaps(chosen)
    for row in numbers.itertuples():
        lines = [line for run in chosen for line in run.details if line["epoch"] == row.epoch]
        values = [line["sizes"][str(row.batch)]["mean"] for line in lines]
        ends = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (row.n, row.chance) == (len(chosen), lines[0]["chance"])
        assert (row.overlap, row.ci_low, row.ci_high) == pytest.approx((np.mean(values), *ends))
    half = numbers[numbers["epoch"] < 12], {"epochs": 12}  # of other schedules as long as it is
    for found, middle in (((numbers, {"epochs": 24}), 12), (half, 6)):
        assert figure4a.moments(*found)["middle"] == middle
    largest = numbers["batch"].max()
    low = numbers.assign(overlap=0.5)
    assert "not reached at any batch size" in figure4a.verdict(low, None)
    low.loc[numbers["batch"] == largest, "overlap"] = 0.95
    assert f"reached first at batch {largest:,} " in figure4a.verdict(low, None)
