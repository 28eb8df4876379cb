"""The pure part of trials: intervals in closed form and by simulation, the draw, the decisions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from regimes.errors import ConfigError
from regimes.policies import Trial, make_policy
from regimes.policies.history import History, PastEpoch
from regimes.policies.trial import Moments

DRAW = np.random.default_rng(7)


def moments(values: Sequence[float]) -> Moments:
    found = Moments()
    for value in values:
        found.add(float(value))
    return found


# -- the interval ----------------------------------------------------------------------------


def likelihood_ratio(x: np.ndarray) -> float:
    """Of a mean of delta standard deviations, delta from N(0, 1), to a mean of 0, both over all
    standard deviations s with density 1 / s: sums over grids of delta and log s."""
    delta = np.linspace(-9, 9, 1201)
    log_s = np.linspace(-8, 6, 1201)[:, None]
    scaled = x / np.exp(log_s)

    def densities(shift: np.ndarray) -> np.ndarray:
        squares = (scaled**2).sum(1)[:, None] - 2 * scaled.sum(1)[:, None] * shift
        return np.exp(-0.5 * (squares + len(x) * shift**2) - len(x) * log_s)

    prior = np.exp(-0.5 * delta**2)
    return float((densities(delta) * prior / prior.sum()).sum() / densities(np.zeros(1)).sum())


@pytest.mark.parametrize(("count", "risk"), [(6, 0.05), (9, 0.3)])
def test_the_ends_of_an_interval_are_where_the_mixture_rejects(count: int, risk: float) -> None:
    """Oracle: the likelihood ratio of the test martingale as an integral (arXiv:2310.03722)."""
    x = DRAW.normal(0.3, 0.7, count)
    found = moments(x).interval(risk)
    for end in (found.low, found.high):
        assert likelihood_ratio(x - end) == pytest.approx(1 / risk, rel=1e-6)
    assert found.mean == pytest.approx(x.mean())
    assert likelihood_ratio(x - found.mean) < 1


def test_an_interval_of_few_numbers_is_infinite() -> None:
    for values in ([], [1.0], [1.0, 1.1], [1.0, 1.1, 0.9, 1.0]):
        assert moments(values).interval(0.05)[2:] == (-math.inf, math.inf)
    assert math.isfinite(moments([1.0, 1.1, 0.9, 1.0, 1.0]).interval(0.05).low)


DRAWS = {
    "normal": lambda shape: DRAW.normal(0, 2, shape),
    "heavy tails": lambda shape: DRAW.standard_t(3, shape),
    "of skewed scores": lambda shape: DRAW.exponential(1, shape) - DRAW.exponential(1, shape),
    "bounded": lambda shape: DRAW.uniform(-1, 1, shape),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_the_true_mean_is_ever_outside_at_most_as_often_as_stated(kind: str) -> None:
    """Looked at after each of 40 numbers, of 1000 sequences: 5 %. Differences of scores of the same
    distribution are symmetric, whatever that is."""
    outside = 0
    for row in DRAWS[kind]((1000, 40)):
        so_far, out = Moments(), False
        for value in row.tolist():
            so_far.add(value)
            low, high = so_far.interval(0.05)[2:]
            out |= not low <= 0 <= high
        outside += out
    assert outside <= 50
    assert outside or kind != "normal"  # an interval that is never wrong is too wide


# -- the draw --------------------------------------------------------------------------------


def test_each_worker_is_treated_once_in_a_block_and_all_groups_are_as_likely() -> None:
    for share, workers in ((0.5, 4), (0.25, 8), (1 / 3, 6)):
        rule = Trial(share=share)
        for block in range(20):
            numbers = range(block * rule.block, (block + 1) * rule.block)
            groups = [rule.assignment("low", n, workers, 3).treated for n in numbers]
            assert sorted(itertools.chain(*groups)) == list(range(workers))
    firsts = Counter(Trial().assignment("low", 2 * block, 4, 5).treated for block in range(3000))
    assert len(firsts) == 6
    assert all(abs(count - 500) < 100 for count in firsts.values())
    others = [Trial().assignment("low", n, 4, 6) for n in range(40)]
    assert others != [Trial().assignment("low", n, 4, 5) for n in range(40)]


def test_the_last_level_is_the_reference() -> None:
    rule = Trial(levels=("r1", "r2", "r4"))
    assert [rule.assignment("r1", n, 4, 0).level for n in range(4)] == ["r4"] * 4
    assert [rule.assignment("r4", n, 4, 0).level for n in range(6)] == [
        *("r1", "r1", "r2", "r2", "r1", "r1")
    ]
    null = Trial(levels=("r1", "r2", "r4"), null=True)
    assert [null.assignment(x, 0, 4, 0).level for x in null.levels] == [*null.levels]


# -- decisions -------------------------------------------------------------------------------


def trained(
    rule: Trial,
    harm: dict[str, float],
    units: int,
    *,
    rates: Sequence[float] = (),
    noise: float = 0.1,
    effects: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    draw: np.random.Generator = DRAW,
    drop: Sequence[int] = (),
) -> tuple[list[str], History]:
    """The levels of units of four trials, of workers with effects of their own."""
    past, levels, number = History(), [], 0
    rates = [*rates, *[rates[-1] if rates else 0.1] * (units + 1)]
    for unit in range(units):
        (decision,) = rule.decide(past, ["layer"])
        base = decision.level
        trials = []
        for _ in range(4):
            level, treated = rule.assignment(base, number, 4, 1)
            scores = [
                harm.get(level if w in treated else base, 0.0) + effects[w] + draw.normal(0, noise)
                for w in range(4)
            ]
            groups = [
                [s for w, s in enumerate(scores) if (w in treated) is x] for x in (True, False)
            ]
            entry: dict[str, Any] = {"number": number, "level": level, "base": base}
            entry["difference"] = float(np.mean(groups[0]) - np.mean(groups[1]))
            if number not in drop:
                trials.append(entry)
            number += 1
        levels.append(base)
        past.append(PastEpoch(rates[unit], rates[unit + 1], {}, [base], trials=trials))
    return levels, past


def test_a_level_that_harms_is_left_and_one_that_does_not_stays() -> None:
    rule = Trial(levels=("r1", "r2", "r4"))
    harm = {"r1": 1.0, "r2": 0.5, "r4": 0.0}
    levels, past = trained(rule, harm, 14)
    assert [x for x, _ in itertools.groupby(levels)] == ["r1", "r2", "r4"]
    found = rule.intervals(past)
    for level, interval in found.items():  # from r1 tried against r4, and from r4 the reverse
        assert interval.low <= harm[level] <= interval.high
        assert interval.high - interval.low < 0.5
    first = rule.decide(past[: levels.index("r2")], ["layer"])[0]
    shown = rule.shown(past[: levels.index("r2")])["r1"]
    assert first.why == {"rule": "trial", "old": 0.0, "new": shown.low, "blocks": shown.blocks}
    assert trained(rule, {}, 6)[0] == ["r1"] * 6
    watching = Trial(levels=("r1", "r2", "r4"), only_measures=True)
    levels, past = trained(watching, harm, 12)
    assert levels == ["r4"] * 12
    assert watching.shown(past).keys() == {"r1", "r2"}
    assert {found.blocks for found in watching.intervals(past).values()} == {12}
    assert set(trained(Trial(levels=("r1", "r4"), margin=2.0), harm, 8)[0]) == {"r1"}


def test_a_decay_forgets_and_a_block_of_both_rates_does_not_count() -> None:
    rule, rates = Trial(levels=("r1", "r4")), [0.4] * 6 + [0.1]
    levels, past = trained(rule, {"r1": 1.0}, 12, rates=rates)
    assert levels[5:7] == ["r4", "r1"]
    assert levels[-1] == "r4"
    assert rule.decide(past[:6], ["layer"])[0].why == {"rule": "lr decay", "old": 0.4, "new": 0.1}
    assert rule.intervals(past[:6])["r1"].blocks == 0
    assert rule.intervals(past[:7])["r1"].blocks == 1  # of two, the first may be of both rates


def test_workers_effects_cancel_and_blocks_that_lack_a_trial_do_not_count() -> None:
    rule = Trial(levels=("r1", "r4"))
    effects = (3.0, -1.0, 0.5, 8.0)
    _, past = trained(rule, {"r1": 0.25}, 4, noise=0.0, effects=effects)
    assert rule.intervals(past)["r1"].mean == pytest.approx(0.25)
    assert rule.intervals(past)["r1"].blocks == 8
    _, past = trained(rule, {"r1": 0.25}, 4, noise=0.0, effects=effects, drop=(3, 8))
    found = rule.intervals(past)["r1"]
    assert found.blocks == 6
    assert found.mean == pytest.approx(0.25)


def test_null_trials_give_a_false_alarm_in_at_most_five_of_a_hundred_runs() -> None:
    """Of 80 runs of 80 trials each, whose workers differ."""
    draw = np.random.default_rng(11)
    rule = Trial(levels=("r1", "r4"), null=True)
    effects = (1.0, 0.0, -1.0, 0.3)
    runs = [trained(rule, {"r1": 1.0}, 20, effects=effects, draw=draw)[1] for _ in range(80)]
    assert sum(bool(rule.shown(past)) for past in runs) <= 4


def test_a_history_is_read_once_or_bit_by_bit_alike() -> None:
    rule = Trial(levels=("r1", "r4"))
    _, past = trained(rule, {"r1": 0.3}, 10, rates=[0.4] * 5 + [0.1])
    for k in range(len(past)):
        assert rule.intervals(History(past[:k])) == rule.intervals(past[:k])
    assert rule.decide(past, ["a", "b"]) == rule.decide(History(list(past)), ["a", "b"])


WRONG = {
    "share": ({"share": 0.4}, "policy.share = 0.4: expected 1/2, 1/3, 1/4"),
    "all workers": ({"share": 0.99}, "policy.share = 0.99: expected 1/2, 1/3, 1/4"),
    "rounds": ({"rounds": 5}, "policy.rounds = 5: expected at most policy.every, 4"),
    "one level": ({"levels": ["low"]}, "policy.levels = .'low'.: expected two or more different"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_are_one_sentence(name: str) -> None:
    fields, said = WRONG[name]
    with pytest.raises(ConfigError, match=said):
        make_policy({"name": "trial", **fields})
    with pytest.raises(ConfigError, match=r"workers = 6: expected a multiple of 4"):
        Trial(share=0.25).check_workers(6)
