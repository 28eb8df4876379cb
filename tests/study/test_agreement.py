"""Agreement of detectors that no rule forces (oracles: scikit-learn, scipy, changes by hand)."""

from __future__ import annotations

import copy
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from analysis.common.names import STATISTICS
from analysis.detection import agreement, unforced
from analysis.detection.unforced import (
    FIRST,
    Change,
    calls,
    over_seeds,
    pairs,
    scored,
    scores,
    with_reference,
)
from regimes.base.errors import RecordError
from regimes.policies import check_levels, make_policy
from regimes.presets import get_grid
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return [run for run in load_all(REFERENCE / "small-signals.tar.xz") if run.name == "low"]


def test_a_score_is_the_change_since_the_epoch_before(runs: list[Record]) -> None:
    run, table = runs[0], scores(runs[0])
    top = run.epochs["eigenvalue"].to_numpy()
    weights = [i for i, layer in enumerate(run.header["layers"]) if layer["compressed"]]
    norm = np.array(
        [
            np.hypot.reduce([row["statistics"]["norm:update"][i] for i in weights])
            for row in run.rows
        ]
    )
    for name, values in (("eigenvalue", top), ("norm", norm)):
        by_hand = np.abs(np.diff(values)) / values[:-1]  # of epochs 0 and 1, 1 and 2, ...
        assert table[name].to_numpy() == pytest.approx(by_hand[table.index - 1])
        apart = np.abs(values[3:] - values[:-3]) / values[:-3]
        longer = scores(run, Change(back=3))[name]
        assert longer.to_numpy() == pytest.approx(apart[longer.index - 3])
    rate = run.epochs["lr"].to_numpy()
    assert rate[table.index[0] - 1] == rate.max() > rate[table.index[0] - 2]
    assert table.index[-1] == len(run.rows) - 1


def test_each_detector_calls_as_many_and_the_largest() -> None:
    table = pd.DataFrame(np.random.default_rng(3).random((20, 3)), columns=["a", "b", "c"])
    table.loc[[2, 5, 7], "c"] = np.nan
    called = calls(table)
    assert (called.sum() == 5).all()
    for name in table:
        assert table[name][called[name]].min() > table[name][~called[name]].max()
    assert [*called.index[called[FIRST]]] == [0, 1, 2, 3, 4]


def test_kappa_and_spearman(runs: list[Record]) -> None:
    each = pairs(scored(runs)).set_index(["a", "b", "seed"])
    for run in runs:
        table = scores(run)
        called = calls(table)
        row = each.loc[("norm", "eigenvalue", run.seed)]
        assert row["kappa"] == pytest.approx(
            cohen_kappa_score(called["norm"], called["eigenvalue"])
        )
        both = stats.spearmanr(table["norm"], table["eigenvalue"]).statistic
        assert row["spearman"] == pytest.approx(both)
        first = each.loc[("eigenvalue", FIRST, run.seed)]
        assert first["kappa"] == pytest.approx(
            cohen_kappa_score(called["eigenvalue"], called[FIRST])
        )
        assert np.isnan(first["spearman"])
    together = np.concatenate([scores(run)["eigenvalue"] for run in runs])
    assert unforced.thresholds(scored(runs))["eigenvalue"] == pytest.approx(
        np.quantile(together, 0.75)
    )


def test_agreement_with_other_runs_is_over_all_pairs_of_them(runs: list[Record]) -> None:
    called = [calls(scores(run)) for run in runs]
    others = unforced.other_runs(scored(runs), "eigenvalue")
    for column, name in (("with", "eigenvalue"), ("itself", "norm")):
        apart = [cohen_kappa_score(a["norm"], b[name]) for a, b in permutations(called, 2)]
        assert len(apart) == 20
        assert others.loc["norm", column] == pytest.approx(np.mean(apart))
    assert [*others.index] == [*called[0]]


def test_absolute_changes_are_of_the_values_themselves(runs: list[Record]) -> None:
    values = runs[0].epochs["eigenvalue"].to_numpy()
    table = scores(runs[0], Change(absolute=True))
    assert table["eigenvalue"].to_numpy() == pytest.approx(np.abs(np.diff(values))[table.index - 1])


def test_chance_is_zero() -> None:
    """Of scores that have nothing to do with each other, over many draws."""
    draws = np.random.default_rng(5)
    found = []
    for _ in range(400):
        called = calls(pd.DataFrame(draws.random((20, 2)), columns=["a", "b"]))
        found.append(cohen_kappa_score(called["a"], called["b"]))
    assert abs(np.mean(found)) < 4 * np.std(found) / 20


def test_over_seeds_with_the_t_interval(runs: list[Record]) -> None:
    each = pairs(scored(runs))
    row = with_reference(over_seeds(each)).set_index("detector").loc["norm"]
    known = each[(each["a"] == "norm") & (each["b"] == "eigenvalue")]["kappa"].to_numpy()
    ends = stats.t.interval(0.95, len(known) - 1, known.mean(), stats.sem(known))
    assert (row["kappa"], row["kappa_ci_low"], row["kappa_ci_high"]) == pytest.approx(
        (known.mean(), *ends)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(1, False), "most since the epoch before, relatively. Right"),
        (Change(1, True), "most since the epoch before. Right"),
        (Change(3, False), "most since 3 epochs before, relatively. Right"),
    ],
)
def test_the_caption_says_how_far_a_score_looks_back(
    runs: list[Record], change: Change, words: str
) -> None:
    fig, _ = agreement.figure(runs, change=change)
    assert words in " ".join(fig.get_supxlabel().split())


def test_runs_without_statistics_or_a_reference_are_one_sentence(runs: list[Record]) -> None:
    with pytest.raises(RecordError, match="recorded no 'sharpness', with which"):
        with_reference(over_seeds(pairs(scored(runs))), "sharpness")
    short = copy.deepcopy(load_all(REFERENCE / "lm-rivals.tar.xz")[0])
    short.rows[:] = short.rows[:5]
    with pytest.raises(RecordError, match="after its warm-up that can be scored, too few"):
        scores(short)


def test_a_statistic_of_some_epochs_is_compared_where_it_was_measured(runs: list[Record]) -> None:
    whole = scores(runs[0], Change(back=3))
    run = copy.deepcopy(runs[0])
    for row in run.rows:
        if row["epoch"] % 3:
            for name in [name for name in row["model"] if name.startswith("eigenvalue")]:
                del row["model"][name]
    with pytest.raises(RecordError, match="changes over 1; 8 of 24 epochs have eigenvalue and"):
        scores(run)
    sparse = scores(run, Change(back=3))
    assert not sparse.index.empty
    pd.testing.assert_frame_equal(sparse, whole.loc[whole.index % 3 == 0])


@pytest.mark.parametrize("name", ["detection-smoke", "detection-lm"])
def test_live_arms_differ_in_what_they_read_alone(name: str) -> None:
    grid = get_grid(name)
    arms = [arm for arm in STATISTICS if arm in grid]
    assert len(arms) == (7 if name == "detection-smoke" else 6)  # no Fisher trace of a text
    for arm in arms:
        rule = dict(grid[arm].policy["detector"])
        assert rule.pop("statistic") == STATISTICS[arm]
        assert 0 < rule.pop("eta") < 3
        assert rule == {"name": "change", "interval": 1, "per_layer": False}
        check_levels(make_policy(grid[arm].policy), grid[arm].levels)
    everything = {key for arm in arms for key in grid[arm].instruments}
    assert {*grid["signals"].instruments} == everything
