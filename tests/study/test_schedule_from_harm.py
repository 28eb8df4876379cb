"""The schedule that harm proposes (oracles: every choice of pulses tried, sums over the records'
files)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from analysis.criticality import schedule
from analysis.findings.numbers import differences, schedules
from analysis.findings.sources import records
from regimes.errors import RecordError
from regimes.presets import get_grid


def table(seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    harms, saved = draw.normal(size=8), np.full(8, 5.0)
    return pd.DataFrame({"onset": range(0, 24, 3), "length": 3, "harm": harms, "saved": saved})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("units", [0, 3, 12, 24])
def test_no_other_choice_of_as_many_units_has_less_predicted_harm(seed: int, units: int) -> None:
    pulses = table(seed)
    windows = schedule.best(pulses, units)
    assert sum(b - a for a, b in windows) == units
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(windows))  # joined where they meet
    left = min(
        pulses["harm"].sum() - pulses["harm"][[*kept]].sum()
        for kept in itertools.combinations(range(8), units // 3)
    )
    assert schedule.predicted(pulses, windows) == pytest.approx(left)


def test_floats_that_a_pulse_saves_count() -> None:
    pulses = pd.DataFrame(
        {"onset": [0, 2, 6], "length": [2, 4, 2], "harm": [1.0, 1.5, 0.9], "saved": [1, 2, 1]}
    )
    assert schedule.best(pulses, 4) == [(0, 2), (6, 8)]


@pytest.mark.parametrize(
    ("change", "units", "sentence"),
    [({}, 4, "expected 0 or one of 3, 6"), ({"length": 4}, 4, "overlap")],
)
def test_units_that_no_pulses_have(change: dict[str, int], units: int, sentence: str) -> None:
    with pytest.raises(RecordError, match=sentence):
        schedule.best(table(0).assign(**change), units)


def test_a_part_of_a_pulse_has_no_prediction() -> None:
    with pytest.raises(RecordError, match="part of the pulse from 3"):
        schedule.predicted(table(0), [(0, 4)])


def test_the_grid_has_the_windows_of_the_committed_harm() -> None:
    runs = records("harm-lm")
    pulses = schedule.pulses(runs, "rank 1")
    end = {(run.name, run.seed): run.rows[-1]["metric"] for run in runs}
    for row in pulses.to_dict("records"):
        names = [(f"rank 1 from {row['onset']}", seed) for seed in (11000, 11001, 11002)]
        mean = np.mean([end[name] - end["trunk", name[1]] for name in names])
        assert row["harm"] == pytest.approx(mean, rel=1e-9)
        assert row["saved"] == 3 * 25 * (5875200 - 1612800) / 600
    for units, words in ((9, "0.167"), (12, "0.095"), (15, "0.048")):
        windows = schedule.best(pulses, units)
        given = get_grid("from-harm-lm")[f"harm {units}"].policy["windows"]
        assert [tuple(window) for window in given] == windows
        assert f"{schedule.predicted(pulses, windows):.3f}" == words
    with pytest.raises(RecordError, match="no branch is called 'rank 2'"):
        schedule.pulses(runs, "rank 2")


def test_gains_over_one_rank_are_those_of_the_files() -> None:
    ends: dict[tuple[str, int], tuple[float, float]] = {}
    for run in records("from-harm-lm"):
        tail = [row["metric"] for row in run.rows[-3:]]
        floats = sum(row["floats"] for row in run.rows)
        ends[run.name, run.seed] = (float(np.mean(tail)), math.log(floats))

    def over(arm: str, seed: int) -> float:
        (a, low), (b, high), (mine, here) = (ends[name, seed] for name in ("rank 2", "rank 3", arm))
        return mine - a - (b - a) * (here - low) / (high - low)

    seeds = sorted({seed for _, seed in ends})
    assert seeds == [*range(13000, 13006)]
    arms = ("harm 12", "mixed 1", "mixed 2", "rate 3-2-1")
    harm, one, other, rate = (np.array([over(arm, seed) for seed in seeds]) for arm in arms)
    found = schedules.beside_one_rank("from-harm-lm", "harm 12", "mixed 1", "mixed 2")
    assert found.mean == pytest.approx(np.mean(harm - (one + other) / 2), rel=1e-9)
    found = schedules.gain_beyond_half("from-harm-lm", "rate 3-2-1", "harm 12")
    assert found.mean == pytest.approx(np.mean(-rate - (-harm / 2)), rel=1e-9)


def test_a_difference_of_differences_is_that_of_the_files() -> None:
    ends = {
        (run.name, run.seed): np.mean([row["metric"] for row in run.rows[-3:]])
        for run in records("momentum-lm")
    }
    arms = [f"{level}, beta1 {beta}" for beta in ("0", "0.9") for level in ("rank 1", "dense")]
    values = np.array([[ends[arm, seed] for arm in arms] for seed in range(9000, 9006)])
    found = differences.difference_of_differences("momentum-lm", *arms)
    assert found.mean == pytest.approx((values @ [1, -1, -1, 1]).mean(), rel=1e-9)
    assert found.n == 6
