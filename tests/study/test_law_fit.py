"""The law of harm, and lost time (oracles: closed forms, scipy, a t test; of committed records:
`test_law_of_harm`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.criticality import fit as law
from analysis.criticality import lost_time
from analysis.criticality.lost_time import Tree
from analysis.findings.sources import records
from regimes.base.errors import RecordError
from regimes.base.statistics import t_interval

RATES = (1.0, 1.0, 0.86, 0.32, 0.19)  # of five pulses of each trunk


def pulses(
    trunks: int, exponent: float, noise: float, floor: float = 0.0, seed: int = 0
) -> tuple[list[float], list[float], list[str]]:
    """Harms by the law, with errors that are factors (``noise``) and sums (``floor``)."""
    rng = np.random.default_rng(seed)
    harms, rates, names = [], [], []
    for trunk in range(trunks):
        level = 0.2 * math.exp(0.3 * rng.normal())
        for rate in RATES:
            factor, more = math.exp(noise * rng.normal()), floor * rng.normal()
            harms.append(level * rate**exponent * factor + more)
            rates.append(rate)
            names.append(f"trunk {trunk}")
    return harms, rates, names


# -- fit -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.floats(-2, 5), st.floats(0.01, 10), st.floats(0.01, 10))
def test_harms_that_obey_the_law_give_it_back(p: float, one: float, other: float) -> None:
    harms = [level * rate**p for level in (one, other) for rate in RATES]
    for method in ("log", "harm"):
        found = law.fit_law(harms, RATES * 2, ["a"] * 5 + ["b"] * 5, method=method)
        assert found.exponent.value == pytest.approx(p, abs=1e-5)
        assert found.levels == pytest.approx({"a": one, "b": other}, rel=1e-4)
        told = found.of_pulses([0.5, 0.1], "b")
        assert told == pytest.approx([other * 0.5**p, other * 0.1**p], rel=1e-3)


def test_one_trunk_is_a_regression_with_its_t_interval() -> None:
    harms, rates, names = pulses(1, 1.7, 0.3)
    line = stats.linregress(np.log(rates), np.log(harms))
    half = stats.t.ppf(0.975, 3) * line.stderr
    found = law.fit_law(harms, rates, names)
    assert (found.exponent.over, found.exponent.n, found.spread) == ("pulses", 5, 0)
    assert found.exponent.value == pytest.approx(line.slope)
    assert [found.exponent.low, found.exponent.high] == pytest.approx(
        [line.slope - half, line.slope + half]
    )
    assert found.level == pytest.approx(math.exp(line.intercept))


def test_a_balanced_mixed_model_is_an_analysis_of_variance() -> None:
    """With the same rates in all trunks restricted maximum likelihood is the method of moments, the
    exponent is the mean of the trunks' own, and the jackknife is their t interval."""
    harms, rates, names = pulses(6, 1.7, 0.2)
    y = np.log(harms).reshape(6, 5)
    x = np.log(RATES) - np.log(RATES).mean()
    slopes = y @ x / (x @ x)
    rest = y - y.mean(1, keepdims=True) - slopes.mean() * x
    within = (rest**2).sum() / (30 - 6 - 1)
    between = 5 * y.mean(1).var(ddof=1)
    found = law.fit_law(harms, rates, names)
    mean, low, high = t_interval(slopes.tolist())
    assert found.exponent.value == pytest.approx(mean)
    assert (found.exponent.low, found.exponent.high) == pytest.approx((low, high), rel=1e-5)
    assert found.noise == pytest.approx(math.sqrt(within), rel=1e-3)
    assert found.spread == pytest.approx(math.sqrt((between - within) / 5), rel=1e-3)
    level = y.mean() - mean * np.log(RATES).mean()
    assert found.level == pytest.approx(math.exp(level))
    drawn = level + (1 - within / between) * (y.mean(1) - y.mean())
    assert [*found.levels.values()] == pytest.approx(np.exp(drawn).tolist(), rel=1e-4)
    own = law.fit_exponents(harms, rates, names)
    assert [*own.values()] == pytest.approx(slopes.tolist())


def test_trunks_that_differ_by_less_than_their_pulses_share_one_level() -> None:
    harms, rates, names = pulses(4, 1.5, 0.3)
    shifted = np.log(harms).reshape(4, 5)
    shifted -= shifted.mean(1, keepdims=True)  # all trunks have one mean
    found = law.fit_law(np.exp(shifted).ravel().tolist(), rates, names)
    assert found.spread < 1e-3
    assert [*found.levels.values()] == pytest.approx([found.level] * 4, rel=1e-4)


def test_trunks_of_one_low_rate_neither_move_the_law_nor_narrow_its_interval() -> None:
    """Their levels would be extrapolated; with a level of its own each fits any exponent. The
    level is that of a regression on all pulses at the exponent that was found."""
    rates = [1.0, 0.8, 0.4, 0.1] * 3 + [0.1] * 3
    names = [f"trunk {i // 4}" for i in range(12)] + ["more 0", "more 1", "more 2"]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        harms = [rate**1.7 + 0.1 * rng.normal() for rate in rates]
        some = law.fit_law(harms[:12], rates[:12], names[:12], method="harm")
        found = law.fit_law(harms, rates, names, method="harm")
        assert (found.exponent.n, found.exponent.over) == (3, "trunks")
        for name in ("value", "low", "high"):
            own, before = getattr(found.exponent, name), getattr(some.exponent, name)
            assert own == pytest.approx(before, abs=1e-5)
        assert found.level == pytest.approx(some.level, abs=0.02)
        powers = np.array(rates)[:, None] ** found.exponent.value
        level, *_ = np.linalg.lstsq(powers, np.array(harms), rcond=None)
        assert found.level == pytest.approx(level[0])


def test_a_profile_interval_holds_the_exponent_as_often_as_it_says() -> None:
    """Of 200 made trunks, each alone, with errors of one size: 95 % within three deviations."""
    hits = 0
    for seed in range(200):
        found = law.fit_law(*pulses(1, 1.7, 0.0, floor=0.004, seed=seed), method="harm").exponent
        hits += found.low <= 1.7 <= found.high
    assert 190 - 3 * math.sqrt(200 * 0.95 * 0.05) <= hits <= 200


@pytest.mark.slow
def test_harms_below_zero_are_left_out_or_counted() -> None:
    """Where the smallest harms are lost in noise, leaving those below zero out flattens the law;
    least squares on harm does not."""
    logs, own, left = [], [], 0
    for seed in range(30):
        made = pulses(4, 2.5, 0.05, floor=0.02, seed=seed)
        by_log, by_harm = (law.fit_law(*made, method=m) for m in ("log", "harm"))
        logs.append(by_log.exponent.value)
        own.append(by_harm.exponent.value)
        left += by_log.left_out
        assert (by_log.pulses + by_log.left_out, by_harm.pulses, by_harm.left_out) == (20, 20, 0)
        assert law.fit_law(*made).method == ("harm" if by_log.left_out else "log")
    assert left > 30
    assert t_interval(logs)[2] < 2.3
    mean, low, high = t_interval(own)
    assert low < 2.5 < high or mean == pytest.approx(2.5, abs=0.1)


def test_a_difference_is_paired_by_trunk() -> None:
    one, other = {"a": 1.5, "b": 1.9, "c": 1.4, "d": 9.0}, {"c": 0.6, "a": 0.5, "b": 0.7}
    found = law.compare_exponents(one, other)
    assert (found.value, found.low, found.high) == pytest.approx(t_interval([1.0, 1.2, 0.8]))
    assert (found.n, found.over) == (3, "trunks")


def test_what_cannot_be_fitted_is_said() -> None:
    for harms, rates, trunks, words in (
        ([1, 2], [1], "aa", "2 harms, 1 rates, 2 trunks"),
        ([], [], "", "no pulses"),
        ([1, math.nan], [1, 0.5], "aa", "not a finite number"),
        ([1, 2], [1, 0], "aa", "rate of zero or less"),
        ([1, 2], [0.5, 0.5], "aa", "no trunk has pulses at two rates"),
        ([1, 2], [1, 0.5], "ab", "no trunk has pulses at two rates"),
    ):
        with pytest.raises(RecordError, match=words):
            law.fit_law(harms, rates, [*trunks])  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="zero or less and have no logarithm"):
        law.fit_law([1, -1, -1], [1, 0.5, 0.3], ["a"] * 3, method="log")
    with pytest.raises(RecordError, match="no trunk in common"):
        law.compare_exponents({"a": 1.0}, {"b": 1.0})
    with pytest.raises(RecordError, match="not fitted to pulses of the trunk 'b'"):
        law.fit_law([1, 2], [1, 0.5], ["a", "a"]).of_pulses([1], "b")


# -- what is predicted -----------------------------------------------------------------------


def test_units_and_schedules_are_parts_and_sums_of_pulses() -> None:
    harms, rates, names = pulses(3, 1.7, 0.1)
    found = law.fit_law(harms, rates, names, length=3)
    units = [0.2, 0.6, 1.0, 1.0, 1.0, 0.1]
    each = found.of_units(units)
    assert each == pytest.approx(found.level * np.array(units) ** found.exponent.value / 3)
    assert each[2:5].sum() == pytest.approx(found.of_pulses([1.0])[0])
    some = [False, True, False, False, True, True]
    assert found.of_schedule(units, some) == pytest.approx(each[1] + each[4] + each[5])
    assert found.of_schedule(units, [False] * 6) == 0
    own = found.of_schedule(units, some, "trunk 1") / found.of_schedule(units, some)
    assert own == pytest.approx(found.levels["trunk 1"] / found.level)
    with pytest.raises(RecordError, match="5 units, but rates of the shape"):
        found.of_schedule(units, [True] * 5)


def test_pilots_reach_from_the_lowest_rate_to_the_highest() -> None:
    assert law.choose_pilots([0.1, 1.0, 0.3, 0.99]) == [0, 1, 2]
    assert law.choose_pilots([1.0, 0.1, 1.0, 0.5, 1.0], 2) == [1, 2]
    for words, rates, count in (("2 pulses", [1.0, 0.5], 3), ("two rates", [1.0] * 4, 3)):
        with pytest.raises(RecordError, match=words):
            law.choose_pilots(rates, count)


def test_a_score_by_hand() -> None:
    found = law.score_predictions([1.0, 2.0, 4.0], [1.0, 3.0, 2.0], constant=2.0)
    assert found == law.Score(r2=1 - 5 / 5, rank=pytest.approx(0.5), error=math.sqrt(5 / 3), n=3)
    assert math.isnan(law.score_predictions([1.0, 1.0], [1.0, 2.0], 0.0).rank)
    assert law.score_predictions([1.0, 2.0], [5.0, 5.0], 0.0).r2 == 1 - 25 / 5


# -- lost time -----------------------------------------------------------------------------


def made(phases: dict[tuple[str, int], list[float]], kind: str = "pulse") -> Tree:
    """A tree of pulses of three units, whose harms are given by arm and onset, in the order of the
    seeds."""
    rows: list[dict[str, Any]] = [
        {"tree": "drawn", "arm": arm, "onset": onset, "seed": seed, "harm": harm, "length": 3}
        | {"left": 3, "rate": 1.0 / onset, "trunk": "trunk", "kind": kind}
        for (arm, onset), harms in phases.items()
        for seed, harm in enumerate(harms)
    ]
    return Tree("drawn", pd.DataFrame(rows), {"trunk": "bits"})


def test_a_law_that_holds_predicts_with_r2_one() -> None:
    """Harm = 0.3 x rate^1.5, with the rates 1 / onset."""
    tree = made({("a", at): [0.3 * at**-1.5] * 3 for at in (6, 8, 10, 14, 18)})
    (row,) = lost_time.predictions(tree).to_dict("records")
    assert (row["exponent"], row["r2"]) == pytest.approx((1.5, 1.0))
    assert row["n"] == 2
    (own,) = lost_time.predictions(tree, (6, 8, 10)).to_dict("records")
    assert own["fitted"] == "6, 8, 10"
    assert lost_time.scored_together([tree])["bits"].r2 == pytest.approx(1.0)


@pytest.mark.parametrize("three", [(6, 10, 99), (6, 6, 10)])
def test_three_units_in_which_no_three_pulses_start_are_said(three: tuple[int, int, int]) -> None:
    """Two of them would give an exponent, too."""
    tree = made({("a", at): [0.3 * at**-1.5] * 3 for at in (6, 8, 10, 14, 18)})
    (row,) = lost_time.predictions(tree, three).to_dict("records")
    named = ", ".join(map(str, three))
    assert row["why"] == f"three = {named}: expected three of 6, 8, 10, 14, 18"
    assert (row["n"], row["fitted"]) == (0, "")
    assert lost_time.scored_together([tree], three) == {}


def test_the_share_of_lost_time_has_the_interval_of_a_t_test() -> None:
    """The ends are the shares r at which the harms of deletion minus r times those of the pulse
    have a mean that differs from 0 with p = 0.05."""
    random = np.random.default_rng(1)
    harm, lost = random.normal(0.2, 0.02, (2, 5)), random.normal(0.08, 0.02, (2, 5))
    pulses = made({("a", at): [*harm[i]] for i, at in enumerate((6, 9))}).pulses
    left_out = made({("gone", at): [*lost[i]] for i, at in enumerate((6, 9))}, "deletion").pulses
    tree = made({("a", 6): [0.0]})
    both = Tree("drawn", pd.concat([pulses, left_out]), tree.units)
    table = lost_time.lost_time(both).set_index("onset")
    assert table.loc[6, "share"] == pytest.approx(lost[0].mean() / harm[0].mean())
    whole = table.loc[-1]
    assert whole["share"] == pytest.approx(lost.mean() / harm.mean())
    for end in ("share_ci_low", "share_ci_high"):
        rest = (lost - whole[end] * harm).mean(0)
        assert stats.ttest_1samp(rest, 0.0).pvalue == pytest.approx(0.05)
    assert whole["share_ci_low"] < whole["share"] < whole["share_ci_high"]


def test_harm_that_is_lost_time_times_the_rate_has_the_exponent_one_over_deletion() -> None:
    """Deletion is 0.1 x rate^0.67, and harm is that times the rate times a level for each seed; the
    rate at onset 40 is the lowest, and harm of zero there has no logarithm."""
    onsets = (6, 9, 12, 15)
    lost = {at: 0.1 * at**-0.67 for at in onsets}
    harm = {("a", at): [level * lost[at] / at for level in (1.4, 1.6, 1.9)] for at in onsets}
    pulses = made(harm | {("a", 40): [0.0, 1e-3, 1e-3]}).pulses
    left_out = {("gone", at): [value] * 3 for at, value in (lost | {40: 0.1 * 40**-0.67}).items()}
    tree = made({("a", 6): [0.0]})
    both = Tree("drawn", pd.concat([pulses, made(left_out, "deletion").pulses]), tree.units)
    (row,) = lost_time.exponents(both).to_dict("records")
    assert row["deletion"] == pytest.approx(0.67)
    assert (row["n"], row["pulses"], row["without"]) == (3, 14, 1)
    exact = Tree("drawn", both.pulses[both.pulses["onset"] < 40], tree.units)
    (row,) = lost_time.exponents(exact).to_dict("records")
    assert (row["harm"], row["ratio"]) == pytest.approx((1.67, 1.0))
    (late,) = lost_time.exponents(exact, first=12).to_dict("records")
    assert (late["pulses"], late["ratio"]) == pytest.approx((6, 1.0))
    assert lost_time.exponents(exact, left=4).empty  # each leaves three units


def test_one_rate_has_no_exponent_and_no_positive_harm_neither() -> None:
    """Their cells are empty, and the pulses that were left out are counted."""
    arms = {("a", 6): [0.1, 0.2], ("b", 6): [-0.1, 0.0]}
    pulses = pd.concat([made(arms).pulses, made({("gone", 6): [0.1, 0.1]}, "deletion").pulses])
    rows = lost_time.exponents(Tree("drawn", pulses, {"trunk": "bits"}))
    assert rows["ratio"].isna().all()
    assert rows["without"].to_list() == [0, 2]
    assert [line[-1] for line in lost_time.exponents_table(rows).rows] == ["", ""]


def test_a_tree_of_the_records() -> None:
    """Its null pulses have a harm of exactly 0."""
    runs = records("harm-lm-constant")
    tree = lost_time.tree("constant", runs)
    assert {*tree.pulses["kind"]} == {"pulse", "null"}
    (null,) = lost_time.nulls(tree).to_dict("records")
    assert (null["arm"], null["n"], null["largest"]) == ("same", 9, 0.0)
    assert all("two rates" in why for why in lost_time.predictions(tree)["why"])
    few = lost_time.predictions(made({("a", at): [0.1, 0.1, 0.1] for at in (6, 9)}))
    assert few["why"].to_list() == ["2 pulses: an exponent needs 3, at two rates"]
    with pytest.raises(RecordError, match="give trees of pulses"):
        lost_time.main(())
    assert lost_time.scored_together([tree]) == {}
    assert lost_time.lost_time(tree).empty
