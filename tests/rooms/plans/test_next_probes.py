"""The order of a plan's short runs, and what they say (oracle: a world whose clocks are known)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regimes.cost.methods import parse_method
from regimes.search.plans.clock import Probe
from regimes.search.plans.decide import FEWEST, SEEDS, PlanEvidence, choose_length, next_probes
from regimes.search.plans.priced import Price, keep_faster

PRICES = {
    "dense": Price(0.4, 1e6, 0.01),
    "bits": Price(0.2, 1.3e5, 0.02),
    "seldom": Price(0.1, 1.2e5, 0.01),
    "rank": Price(0.08, 5e4, 0.02),
}
CLOCKS = {"dense": 1.0, "bits": 1.0, "seldom": 0.8, "rank": 0.4}
SEEDED = range(10, 18)


def loss(probe: Probe, clocks: Mapping[str, float], noise: float) -> float:
    """Dense's after the clock's share of the steps; the best rate rises with the length."""
    steps = clocks[probe.method] * probe.steps
    rate = math.log2(steps) / 2 - 3
    rng = np.random.default_rng([probe.steps, int(10 * probe.rate) + 100, probe.seed])
    error = noise * rng.standard_normal()
    return float(2 + 6 * steps**-0.3 + 0.05 * (probe.rate - rate) ** 2 + error)


def cost(runs: Sequence[Probe], prices: Mapping[str, Price]) -> float:
    return sum(p.steps * prices[p.method].here for p in runs)


def planned(
    left: float,
    clocks: Mapping[str, float] = CLOCKS,
    prices: Mapping[str, Price] = PRICES,
    noise: float = 0.005,
    seconds: float = 40.0,
) -> tuple[PlanEvidence, list[list[Probe]]]:
    """All rounds of a plan with so many seconds for runs, which take their price."""
    rounds: list[list[Probe]] = []
    most = max(round(seconds / price.seconds) for price in prices.values())
    first = max(FEWEST, min(choose_length(prices, 0.0, left), most) // 4)
    known = PlanEvidence(seconds, prices, first, 0, {})
    while True:
        todo = next_probes(known, SEEDED)
        if not any(todo) and not known.length:
            most = max(known.horizon(m) for m in prices)
            length = min(max(choose_length(prices, 0.0, left), known.first), most)
            known = replace(known, length=length)
            todo = next_probes(known, SEEDED)
        runs = next((x for x in todo if x and cost(x, prices) <= left), [])
        if not runs:
            return known, rounds
        left -= cost(runs, prices)
        rounds.append(runs)
        ends = {probe: loss(probe, clocks, noise) for probe in runs}
        known = replace(known, losses={**known.losses, **ends})


def test_the_fastest_is_found_and_each_clock_is_that_of_the_world() -> None:
    known, rounds = planned(400.0)
    assert known.decided
    assert known.best == "seldom"  # 4 x 0.8; rank 5 x 0.4, bits 2 x 1
    assert known.speeds["seldom"].low < 3.2 < known.speeds["seldom"].high
    for method, clock in CLOCKS.items():
        found = known.clocks[method]
        assert found.low <= clock <= found.high, method
    assert {p.method for p in rounds[0]} == {"dense"}
    assert all(p.steps == known.first for p in rounds[0])
    assert len({p for each in rounds for p in each}) == sum(map(len, rounds))


def test_what_dense_was_never_so_bad_as_has_a_bound_and_then_a_clock() -> None:
    fast = {**PRICES, "rank": Price(0.02, 5e4, 0.02)}
    known, _ = planned(2000.0, {**CLOCKS, "rank": 0.1}, fast, noise=0.001)
    assert known.dense_lengths[0] < known.first  # shorter than a quarter
    assert known.clocks["rank"].known
    assert known.clocks["rank"].mean == pytest.approx(0.1, rel=0.2)
    few, _ = planned(60.0, {**CLOCKS, "rank": 0.1})
    assert not few.clocks["rank"].known
    assert few.clocks["rank"].low == 0.0
    assert few.clocks["rank"].mean >= 0.1


@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_intervals_hold_and_decisions_are_right_in_many_worlds(noise: float) -> None:
    """At least 85 % of intervals; of decisions, those for a method that is surely not the best."""
    rng, inside, wrong, decided = np.random.default_rng(0), [], 0, 0
    for _ in range(40):
        clocks = {m: float(rng.uniform(0.4, 1.0)) for m in PRICES} | {"dense": 1.0}
        shift = int(rng.integers(1 << 20))
        seeded = {
            m: Price(p.seconds * rng.uniform(0.7, 1.3), p.bytes, p.here) for m, p in PRICES.items()
        }
        known, _ = planned(300.0 + shift % 7, clocks, seeded, noise)
        for method, clock in known.clocks.items():
            if method != "dense" and clock.known:
                inside.append(clock.low <= clocks[method] <= clock.high)
        speeds = {m: clocks[m] * seeded["dense"].seconds / seeded[m].seconds for m in PRICES}
        decided += known.decided
        wrong += known.decided and speeds[known.best] < 0.98 * max(speeds.values())
    assert sum(inside) >= 0.85 * len(inside)
    assert decided >= 5
    assert wrong <= 0.1 * decided


@given(seconds=st.floats(0.0, 3000.0), noise=st.floats(0.0, 0.3), count=st.integers(1, 4))
def test_a_plan_keeps_to_its_time_and_ends(seconds: float, noise: float, count: int) -> None:
    prices = dict(itertools.islice(PRICES.items(), count))
    known, rounds = planned(seconds, CLOCKS, prices, noise)
    spent = sum(p.steps * prices[p.method].here for each in rounds for p in each)
    assert spent <= seconds
    assert len({p.seed for p in known.losses}) <= SEEDS
    assert {*known.speeds} <= {*prices}
    assert known.best in prices
    if count == 1 and seconds > 1:
        assert len(known.losses) == 1
        assert known.decided


def test_where_nothing_ends_nothing_more_is_tried() -> None:
    known = PlanEvidence(400.0, PRICES, 32, 0, {})
    rounds: list[Sequence[Probe]] = []
    while todo := [*itertools.chain(*next_probes(known, SEEDED))]:
        rounds.append(todo)
        known = replace(known, losses={**known.losses, **dict.fromkeys(todo, math.inf)})
    assert min(p.rate for each in rounds for p in each) == -4
    assert known.best == "dense"


def test_methods_that_are_no_faster_than_dense_are_left_out() -> None:
    methods = [parse_method(text) for text in ("dense", "powersgd:4", "dense/8")]
    prices = {m.label: Price(s, 1.0, 1.0) for m, s in zip(methods, (1.0, 0.99, 0.5), strict=True)}
    assert [m.label for m in keep_faster(methods, prices)] == ["dense", "dense, every 8 steps"]
