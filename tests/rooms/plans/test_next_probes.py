"""The order of a plan's probes (oracle: a world whose losses are known)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regimes.cost.methods import parse_method
from regimes.errors import ConfigError
from regimes.plans.curve import Probe
from regimes.plans.decide import (
    FEWEST,
    FIRST,
    NEXT,
    SEEDS,
    Aim,
    PlanEvidence,
    next_probes,
    rungs_within,
)
from regimes.plans.priced import Price, keep_faster

PRICES = {
    "dense": Price(0.4, 1e6, 0.01),
    "bits": Price(0.1, 1.3e5, 0.02),
    "seldom": Price(0.05, 1.2e5, 0.01),
    "rank": Price(0.08, 5e4, 0.02),
}


def loss(probe: Probe) -> float:
    gap = {"dense": 0.0, "bits": 0.01, "seldom": 0.6, "rank": 0.3}[probe.method]
    rng = np.random.default_rng([probe.steps, int(10 * probe.rate) + 100, probe.seed])
    noise = 0.01 * rng.standard_normal()
    return float(3 + 4 * probe.steps**-0.4 + gap + 0.05 * (probe.rate - 2.0) ** 2 + noise)


def planned(span: float, afford: float, aim: Aim) -> tuple[PlanEvidence, list[list[Probe]]]:
    """All rounds of a plan with so many steps of probes to spend."""
    spent = 0.0

    def within(share: float) -> object:
        return lambda probes: sum(p.steps for p in probes) <= share * (afford - spent)

    rungs = rungs_within(span, PRICES, within(FIRST), 1 if aim.seconds else 3)
    known, rounds = PlanEvidence(aim, PRICES, rungs, {}), []
    while True:
        probes = next_probes(known, range(10, 18), within(NEXT))
        probes = [p for p in probes if (spent := spent + p.steps) <= afford]
        if not probes:
            return known, rounds
        rounds.append(probes)
        known = PlanEvidence(aim, PRICES, rungs, {**known.losses, **{p: loss(p) for p in probes}})


def true(method: str, span: float) -> float:
    gap = {"dense": 0.0, "bits": 0.01, "seldom": 0.6, "rank": 0.3}[method]
    return 3 + 4 * (span / PRICES[method].seconds) ** -0.4 + gap


@pytest.mark.parametrize("afford", [8_000, 100_000], ids=["extrapolated", "measured"])
def test_finds_the_best_method_in_known_losses(afford: float) -> None:
    span = 200.0
    known, rounds = planned(span, afford, Aim(seconds=span))
    found = max(known.best, key=lambda method: known.best[method])
    assert found == min(PRICES, key=lambda method: true(method, span)) == "bits"
    assert known.decided or afford == 8_000
    assert known.regret["bits"] < 0.05
    assert known.curve.best_rate("bits", 1000) == 2.0  # beyond those first tried
    longest = max(p.steps for each in rounds for p in each if p.method == "bits")
    assert (longest == known.horizon("bits")) == (afford == 100_000)
    assert len(known.losses) == sum(len(each) for each in rounds)  # none is trained twice


def test_methods_that_are_surely_worse_are_left_out_of_longer_rungs() -> None:
    known, rounds = planned(200.0, 30_000, Aim(seconds=200.0))
    steps = {m: {p.steps for each in rounds for p in each if p.method == m} for m in PRICES}
    assert known.horizon("seldom") not in steps["seldom"]
    assert known.horizon("dense") in steps["dense"]
    seeds = {p.seed for each in rounds for p in each}
    assert 2 <= len(seeds) <= SEEDS


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=8))
def test_no_method_that_is_slower_than_dense_is_compared(seconds: list[float]) -> None:
    """What takes 2 % less than dense or more is left out, and nothing else."""
    texts = [f"dense/{n}" for n in range(2, 2 + len(seconds))]
    methods = [parse_method(text) for text in ("dense", *texts)]
    prices = {m.label: Price(s, 1.0, 1.0) for m, s in zip(methods, [1.0, *seconds], strict=True)}
    kept = keep_faster(methods, prices)
    assert kept[0].label == "dense"
    assert {m.label for m in kept[1:]} == {
        m.label for m in methods[1:] if prices[m.label].seconds < 0.98
    }


def test_seconds_to_a_loss() -> None:
    span = 200.0
    target = true("bits", 100.0)
    known, _ = planned(span, 100_000, Aim(loss=target))
    found = max(known.best, key=lambda method: known.best[method])
    assert found == "bits"
    row = known.draws[list(PRICES).index("bits")]
    assert np.median(row) == pytest.approx(100.0, rel=0.15)
    assert math.isinf(np.median(known.draws[list(PRICES).index("seldom")]))


def test_rungs_are_halves_of_the_training_and_none_is_too_short() -> None:
    def afford(probes: Sequence[Probe]) -> bool:
        return sum(p.steps for p in probes) < 3000

    rungs = rungs_within(100.0, PRICES, afford)
    assert rungs[-1] == 100.0
    assert all(b == 2 * a for a, b in itertools.pairwise(rungs))
    known = PlanEvidence(Aim(seconds=100.0), PRICES, rungs, {})
    assert min(known.steps(m, 0) for m in PRICES) >= FEWEST
    assert rungs_within(100.0, PRICES, lambda probes: False) == ()
    shortest = FEWEST * PRICES["dense"].seconds  # 6.25 s, half of a half, is below it

    def barely(probes: Sequence[Probe]) -> bool:
        return {p.steps for p in probes if p.method == "dense"} == {FEWEST}

    assert rungs_within(100.0, PRICES, barely) == (shortest, 12.5, 25.0, 50.0, 100.0)


@pytest.mark.parametrize(
    "wrong", [{}, {"seconds": 1.0, "loss": 1.0}, {"seconds": math.inf}, {"loss": 0.0}]
)
def test_aims_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Aim(**wrong)


def test_rates_fall_where_trainings_break_and_the_search_ends_where_all_do() -> None:
    """Dense climbs down to the lowest rate that is tried, and no other method begins."""
    rungs = (100.0, 200.0)
    known = PlanEvidence(Aim(seconds=200.0), PRICES, rungs, {})
    rates = []
    while todo := next_probes(known, [10, 11], lambda probes: True):
        rates += [probe.rate for probe in todo]
        assert {probe.method for probe in todo} == {"dense"}
        known = PlanEvidence(
            Aim(seconds=200.0), PRICES, rungs, {**known.losses, **dict.fromkeys(todo, math.inf)}
        )
    assert rates == [-1.0, 0.0, 1.0, -2.0, -3.0, -4.0]
