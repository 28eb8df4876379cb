"""What a search for harm does next (oracle: harms of a known law and spread, in closed form)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from regimes.base.statistics import t_interval
from regimes.search.harms.decide import BudgetLeft, next_round, parts_within
from regimes.search.harms.evidence import HarmEvidence, Harms, Pulse, PulseRun, Rules
from regimes.search.harms.judge import MOST_SEEDS, half_width, judge_harms, seeds_needed


def test_a_verdict_is_that_of_the_interval() -> None:
    """At three seeds the 95 % t interval, at four that of the level 1 - 0.05 x 3 / 4."""
    for values, level in (([0.1, 0.9, 0.2], 0.95), ([0.1, 0.9, 0.0, 0.6], 0.9625)):
        mean, n = float(np.mean(values)), len(values)
        low, high = stats.t.interval(level, n - 1, mean, stats.sem(values))
        found = judge_harms(values, margin=high + 1e-9)
        assert (found.call, found.n, found.needed) == ("safe", n, n)
        assert (found.harm, found.low, found.high) == pytest.approx((mean, low, high), rel=1e-9)
        assert judge_harms(values, margin=high - 1e-9).call == "open"
        assert judge_harms(values, margin=mean - 0.01).call == "open"  # the lower end is below 0
        assert low < 0
    more = [0.8, 1.0, 1.2]
    assert t_interval(more)[1] > 0
    assert judge_harms(more, margin=0.9).call == "harmful"
    assert judge_harms(more, margin=1.05).call == "open"  # it harms, but maybe less than the margin


def test_few_seeds_and_broken_trainings() -> None:
    assert (
        judge_harms([], 1.0).call
        == judge_harms([0.0], 1.0).call
        == judge_harms([0.0, 0.0], 1.0).call
    )
    assert judge_harms([0.0, 0.0], 1.0).call == "open"
    assert judge_harms([0.1, math.inf], 1.0).call == "harmful"


def test_harms_alike_by_rounding_have_the_spread_of_rounding() -> None:
    """One sample of 40 is 2.5 points. A difference of two rounded numbers has the variance of two
    uniform ones."""
    assert judge_harms([0.0] * 3, margin=2.0).call == "safe"
    found = judge_harms([0.0] * 3, margin=2.0, grain=2.5)
    spread = math.sqrt(2 * 2.5**2 / 12)
    assert found.high == pytest.approx(stats.t.ppf(0.975, 2) * spread / math.sqrt(3))
    assert found.call == "open"


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.5, 4.0])
def test_so_many_seeds_would_decide(mean: float) -> None:
    """The interval of so many values of this mean and spread decides, of one fewer it does not."""
    needed = seeds_needed(mean, 1.0, margin=1.0)
    assert needed is not None
    for count, decided in ((needed, True), (needed - 1, False)):
        if count < 3:
            continue
        values = np.linspace(-1, 1, count)
        values = mean + values / values.std(ddof=1)
        assert (judge_harms([*values], 1.0).call != "open") == decided
    assert seeds_needed(1.0 - 1e-6, 1.0, margin=1.0) is None


# -- whole searches --------------------------------------------------------------------------


@dataclass
class World:
    """Units with a harm of their own that adds up, and seeds that differ by a known spread."""

    each: list[float]
    spread: float = 0.0
    rules: Rules = field(init=False)
    harms: dict[PulseRun, float] = field(default_factory=dict)
    rounds: list[list[PulseRun]] = field(default_factory=list)

    def searched(self, units: float, slots: int = 1, **changes: float) -> HarmEvidence:
        self.rules = Rules(len(self.each), ("high",), **{"margin": 1.0, **changes})  # type: ignore[arg-type]
        while True:
            known = HarmEvidence(self.rules, self.harms)
            left = BudgetLeft(units - known.cost([*self.harms]))
            if not (runs := next_round(known, left, slots)):
                return known
            assert not self.harms.keys() & {*runs}, "a run is trained once"
            self.rounds.append(runs)
            for pulse, seed in runs:
                assert pulse is None or (None, seed) in self.harms, "a trunk comes first"
                self.harms[pulse, seed] = 0.0 if pulse is None else self.of(pulse, seed)

    def of(self, pulse: Pulse, seed: int) -> float:
        random = np.random.default_rng([seed, *sum(pulse.spans, ())])
        mean = sum(sum(self.each[first:stop]) for first, stop in pulse.spans)
        return mean + self.spread * float(random.standard_normal())


def calls(known: HarmEvidence) -> dict[tuple[int, int], str]:
    return {pulse.spans[0]: known.of(pulse).call for pulse in known.windows("high")}


def test_coarse_first_then_between_the_last_safe_and_the_first_harmful() -> None:
    """Units up to 6 harm by 2 each, later ones do not: windows of 3, then halves of [6, 9)."""
    world = World([2.0] * 7 + [0.0] * 5, spread=0.01)
    known = world.searched(1e6)
    assert calls(known) == {
        (0, 3): "harmful",
        (3, 6): "harmful",
        (6, 7): "harmful",
        (7, 9): "safe",
        (9, 12): "safe",
    }
    assert world.rounds[0] == [(None, 0)]
    coarse = {run for run in world.rounds[1] if run[0] is not None}
    assert {pulse.spans[0] for pulse, _ in coarse if pulse} == {(0, 3), (3, 6), (6, 9), (9, 12)}
    assert {seed for _, seed in coarse} == {0, 1, 2}
    assert known.best("high") == Pulse("high", ((7, 12),))
    assert known.of(Pulse("high", ((7, 12),))).call == "safe"


def test_a_training_that_nothing_harms_and_one_that_all_harms() -> None:
    safe = World([0.0] * 8, spread=0.01).searched(1e6)
    assert {*calls(safe).values()} == {"safe"}
    assert safe.best("high") == Pulse("high", ((0, 8),))
    harmful = World([5.0] * 8, spread=0.01).searched(1e6)
    assert {*calls(harmful).values()} == {"harmful"}
    assert harmful.best("high") is None


def test_safe_windows_whose_harms_add_up_to_more_than_the_margin() -> None:
    """Each half of the run harms by 0.8, together by 1.6: the schedule has one of them."""
    world = World([0.4, 0.4, 0.4, 0.4], spread=0.01)
    known = world.searched(1e6, parts=2)
    assert {*calls(known).values()} == {"safe"}
    whole = Pulse("high", ((0, 4),))
    assert known.of(whole).call == "harmful"
    best = known.best("high")
    assert best is not None
    assert best.length == 2


def test_safe_windows_that_are_undecided_together_are_tried_without_the_worst() -> None:
    rules = Rules(9, ("high",), 1.0, parts=3, least=3, several=("high",))
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    means = dict(zip(rules.coarse("high"), (0.1, 0.6, 0.2), strict=True))
    harms |= {(p, seed): mean + 0.01 * seed for p, mean in means.items() for seed in range(3)}
    every, first = Pulse("high", ((0, 9),)), Pulse("high", ((0, 3), (6, 9)))
    known = HarmEvidence(rules, harms)
    assert known.unions("high") == [every, first]
    assert next_round(known, BudgetLeft()) == [(every, seed) for seed in range(3)]
    undecided = HarmEvidence(
        rules, harms | {(every, s): 0.9 + x for s, x in enumerate((-1.0, 0.0, 1.0))}
    )
    assert next_round(undecided, BudgetLeft(units=60.0)) == [(first, seed) for seed in range(3)]
    best = undecided.best("high")
    assert best == rules.coarse("high")[0]
    more = {(first, seed): 0.3 + 0.01 * seed for seed in range(3)}
    done = HarmEvidence(rules, {**undecided.harms, **more})
    assert done.best("high") == first
    assert next_round(done, BudgetLeft(units=60.0)) == []


def test_seeds_are_added_where_they_decide_and_the_rest_is_open() -> None:
    """Of windows of one harm, half of the margin, and of one spread: within 200 units the late one
    can be decided, whose runs are shorter."""
    world = World([0.5 / 3] * 6, spread=0.4)
    late = Pulse("high", ((3, 6),))
    known = world.searched(200, parts=2)
    left = BudgetLeft(200 - known.cost([*world.harms]))
    more = {pulse for runs in world.rounds[2:] for pulse, _ in runs} - {None}
    assert late in more
    for pulse in known.windows("high"):
        found = known.of(pulse)
        assert found.n >= 3
        if found.call == "open" and found.needed is not None:
            whole = known.missing(pulse, found.needed)
            assert known.cost(whole) > left.units, "else it would have been tried"
    assert calls(known)[3, 6] == "safe"


def test_an_open_window_that_no_seeds_can_decide_is_halved() -> None:
    """Of spread 1 and a mean of 0.1 below the margin: some 400 seeds would decide."""
    rules = Rules(8, ("high",), 0.5, parts=2)
    wide, safe = rules.coarse("high")
    harms: dict[PulseRun, float] = {PulseRun(None, seed): 0.0 for seed in range(3)}
    harms |= {(wide, seed): 0.4 + spread for seed, spread in enumerate((-1.0, 0.0, 1.0))}
    harms |= {(safe, seed): 0.01 * seed for seed in range(3)}
    runs = next_round(HarmEvidence(rules, harms), BudgetLeft(units=100.0), slots=100)
    halves = rules.halves(wide)
    assert runs == [(half, seed) for half in halves for seed in range(3)]
    known = HarmEvidence(rules, harms | dict.fromkeys(runs, 0.0))
    assert known.windows("high") == [*halves, safe]
    assert known.unions("high")[0] == Pulse("high", ((0, 8),))
    few = next_round(HarmEvidence(rules, harms), BudgetLeft(units=30.0))
    assert few == [(None, 3), (wide, 3)], "too few for six runs of halves"


@settings(max_examples=40)
@given(
    means=st.lists(st.floats(0.0, 0.8), min_size=4, max_size=12),
    spread=st.floats(0.1, 3.0),
    units=st.floats(50.0, 2000.0),
    slots=st.integers(1, 4),
    parts=st.integers(2, 4),
)
def test_an_open_window_gets_the_rest_of_the_budget(
    means: list[float], spread: float, units: float, slots: int, parts: int
) -> None:
    """Whatever three seeds say: a search ends where all is decided, or where one seed more of any
    open window is beyond the budget."""
    world = World(means, spread)
    known = world.searched(units, slots, parts=parts, least=2)
    left = units - known.cost([*world.harms])
    for window in known.windows("high"):
        found = known.of(window)
        if found.call == "open" and 3 <= found.n < MOST_SEEDS:
            assert known.cost(known.missing(window, found.n + 1)) > left


@pytest.mark.parametrize("units", [0.0, 4.0, 12.0, 30.0, 100.0, 400.0])
def test_a_budget_is_kept(units: float) -> None:
    world = World([0.3] * 12, spread=1.0)
    known = world.searched(units)
    first = known.cost(world.rounds[0])  # how long it takes is not known before
    assert known.cost([*world.harms]) <= max(units, first)
    if units < 30:
        assert {*calls(known).values()} == {"open"}


def test_runs_are_a_budget_too() -> None:
    known = HarmEvidence(Rules(12, ("high",), 1.0), {(None, 0): 0.0})
    runs = next_round(known, BudgetLeft(runs=7))
    assert len(runs) <= 7
    assert runs[-1][0] is not None
    assert next_round(known, BudgetLeft(runs=0)) == []


@pytest.mark.parametrize("left", [2, 3, 4])
def test_what_is_done_at_a_time_shares_one_budget(left: int) -> None:
    """One seed more of each of four open windows needs five runs: a trunk and its pulses."""
    rules = Rules(8, ("high",), 1.0, least=2)
    seeds = list(enumerate((-3.0, 1.0, 5.0)))
    harms: Harms = {(None, seed): 0.0 for seed, _ in seeds}
    harms |= {(pulse, seed): harm for pulse in rules.coarse("high") for seed, harm in seeds}
    known = HarmEvidence(rules, harms)
    assert {*calls(known).values()} == {"open"}
    assert len(next_round(known, BudgetLeft(runs=left), slots=5)) == left
    units = known.cost(next_round(known, BudgetLeft(runs=left), slots=5))
    assert known.cost(next_round(known, BudgetLeft(units=units), slots=5)) <= units


def test_a_pulse_that_broke_is_not_tried_again() -> None:
    broken = Pulse("high", ((0, 3),))
    harms: Harms = {(None, 0): 0.0, (broken, 0): math.inf}
    runs = next_round(HarmEvidence(Rules(12, ("high",), 1.0), harms), BudgetLeft())
    assert (broken, 1) not in runs
    assert (broken, 2) not in runs


def test_less_time_makes_fewer_windows() -> None:
    rules = Rules(12, ("high",), 1.0)
    costs = [12 * 3 + 3 * sum(12 - first for first in firsts) for firsts in ((0, 3, 6, 9), (0, 6))]
    assert parts_within(rules, BudgetLeft(2 * costs[0])) == 4
    assert parts_within(rules, BudgetLeft(2 * costs[0] - 1)) == 3
    assert parts_within(rules, BudgetLeft(2 * costs[1] - 1)) == 2


def test_looking_again_makes_few_wrong_calls() -> None:
    """At a true harm equal to the margin, 0 here, every call of safe is wrong. Looks after each
    seed, at normal harms, whose t statistics need no spread; and at harms that are not normal."""
    random, seeds = np.random.default_rng(0), 200
    counts = np.arange(3, seeds + 1)
    ours = np.array([half_width(1.0, n) for n in counts])
    plain = stats.t.ppf(0.975, counts - 1) / np.sqrt(counts)
    drawn = {
        "normal": random.standard_normal((6_000, seeds)),
        "heavy tails": random.standard_t(4, (6_000, seeds)),
        "rounded": np.round(1.5 * random.standard_normal((6_000, seeds))),
    }
    percent = {}
    for name, x in drawn.items():
        means = (np.cumsum(x, axis=1) / np.arange(1, seeds + 1))[:, 2:]
        squares = np.cumsum(x * x, axis=1)[:, 2:] - counts * means**2
        spread = np.sqrt(np.maximum(squares, 0.0) / (counts - 1))
        if name == "rounded":  # as `judge_harms` does with a grain
            spread = np.maximum(spread, 1 / math.sqrt(6))
        looks = [means < -width * spread for width in (ours, plain)]
        percent[name] = [
            100 * np.mean(wrong[:, counts <= last].any(axis=1))
            for wrong in looks
            for last in (40, 200)
        ]
        up_to_40, _, by_plain, _ = percent[name]
        assert up_to_40 < 7.5, name
        assert by_plain > 12, name
        assert np.mean(looks[0][:, 0]) < 0.03, name
    # as the module and docs/how-to/harm.md say; within three standard errors of 6,000 searches
    assert percent["normal"] == pytest.approx([6, 7, 15, 21], abs=1.2)


def test_a_search_looks_less_often_and_is_wrong_less_often() -> None:
    """As `next_round` adds seeds: half of those that are missing at a time, while they are few;
    else half as many again."""
    wrong, searches = 0, 1000
    for first in range(searches):
        values = np.random.default_rng(first).normal(1.0, 0.5, 40)
        found = judge_harms(values[:3].tolist(), 1.0)
        while found.call == "open" and found.n < 40:
            more = found.n + found.n // 2
            if found.needed is not None and found.needed <= 40:
                more = found.n + math.ceil((found.needed - found.n) / 2)
            found = judge_harms(values[:more].tolist(), 1.0)
        wrong += found.call == "safe"
    assert 0.03 < wrong / searches < 0.075
