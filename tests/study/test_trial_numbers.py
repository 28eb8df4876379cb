"""The numbers of jobs that ask themselves (oracle: the archives' lines, read without Regimes)."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import scipy.stats
from archives import Rows, rows_of

from analysis.findings.numbers import trials

STEP = "trial-trees-step"
CELLS = [(level, at) for level in ("r1", "r2") for at in range(0, 24, 3)]


def end(rows: Rows) -> float:
    return fmean(row["test_loss"] for row in rows[-3:])


def cells(source: str) -> tuple[list[float], list[float]]:
    """Of `CELLS`: harm of the pulses, and mean difference of the trunks' trials."""
    runs = rows_of(source)
    seeds = sorted({seed for _, seed in runs})
    harms = [
        fmean(end(runs[f"{level} from {at}", s]) - end(runs["trunk", s]) for s in seeds)
        for level, at in CELLS
    ]
    tried = [
        fmean(
            trial["difference"]
            for seed in seeds
            for row in runs["trunk", seed][at : at + 3]
            for trial in row["trials"]
            if trial["level"] == level
        )
        for level, at in CELLS
    ]
    return harms, tried


def test_agreement_is_the_rank_correlation_of_the_cells() -> None:
    expected = scipy.stats.spearmanr(*cells(STEP)).statistic
    assert trials.trial_agreement(STEP) == pytest.approx(expected, rel=1e-9)


def test_a_cell_is_a_mean_over_seeds() -> None:
    harms, tried = cells(STEP)
    for (level, at), pulse, trial in zip(CELLS, harms, tried, strict=True):
        expected = {"pulse": pulse, "trial": trial}
        assert trials.trial_cell(STEP, level, at) == pytest.approx(expected, rel=1e-9)


def test_the_order_of_two_ranks_is_counted_by_phase() -> None:
    harms, tried = cells(STEP)
    assert trials.trial_order(STEP, "r1", "r2") == {
        "phases": 8,
        "pulses": sum(a > b for a, b in zip(harms[:8], harms[8:], strict=True)),
        "trials": sum(a > b for a, b in zip(tried[:8], tried[8:], strict=True)),
    }


def test_the_fall_is_that_of_each_trunk() -> None:
    falls = []
    for (arm, _), rows in rows_of(STEP).items():
        if arm == "trunk":
            early, late = (
                fmean(t["difference"] for row in part for t in row["trials"] if t["level"] == "r1")
                for part in (rows[3:12], rows[18:24])
            )
            falls.append(early - late)
    interval = scipy.stats.ttest_1samp(falls, 0.0).confidence_interval(0.95)
    found = trials.trial_fall(STEP, "r1")
    assert found.n == len(falls) == 6
    expected = (fmean(falls), interval.low, interval.high)
    assert (found.mean, found.low, found.high) == pytest.approx(expected, rel=1e-9)


def test_what_trials_cost_is_the_bytes_of_the_units_at_the_level() -> None:
    runs = rows_of("trial-lm")

    def at_rank_1(row: dict[str, Any]) -> bool:
        return {*row["layers"]["level"]} - {"dense"} == {"r1"}

    shares = []
    for (arm, seed), rows in runs.items():
        units = [row["bytes"] for row in rows if arm == "trial" and at_rank_1(row)]
        if units:
            alone = fmean(row["bytes"] for row in runs["rank 1", seed])
            shares.append(fmean(units) / alone)
    found = trials.trial_price("trial-lm", "trial", "r1", "rank 1")
    assert found == pytest.approx(fmean(shares), rel=1e-9)


def test_runs_that_left_a_level_are_counted() -> None:
    left = 0
    for (arm, _), rows in rows_of("trial-lm").items():
        levels = [{*row["layers"]["level"]} - {"dense"} for row in rows[:14]]
        left += arm == "trial" and any(unit != {"r1"} for unit in levels)
    assert trials.trial_levels("trial-lm", "trial", "r1", 14)["left"] == left
