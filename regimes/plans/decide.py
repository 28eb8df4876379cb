"""Which probes are trained next, and what the losses say.

Methods are compared after equal seconds on the link, in rungs, each twice as long as the one
before: first at some learning rates each, then at the best. Methods that are surely not the best
take no further part, at most half of them after a rung (as in successive halving: Jamieson &
Talwalkar, 2016). Where the budget has no time for another rung, further seeds of the last one show
how sure its losses are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from regimes.errors import require
from regimes.plans.curve import Curve, Probe
from regimes.plans.priced import Price

RATES = (-1.0, 0.0, 1.0)  # doublings that are tried first
FARTHEST = 3.0
STEP = 0.5  # doublings between neighbouring rates
OUT = 0.02  # probability of being the best below which a method takes no further part
LIKELY = 0.05  # from which on its best rate is looked for in each rung
SURE = 0.95
SEEDS = 5
FEWEST = 16  # steps of a probe
LENGTHS = 3  # rungs of a plan for a loss, whose steps are not known
FIRST, NEXT = 0.35, 0.6  # shares of the budget, and of its rest, that a rung may take


@dataclass(frozen=True)
class Aim:
    """What a plan is for: the lowest loss in some seconds, or the fewest seconds to a loss.

    Raises:
        ConfigError: both, none, or not positive.
    """

    seconds: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        one = (self.seconds is None) != (self.loss is None)
        require(one, "seconds, loss", (self.seconds, self.loss), "one of the two")
        for name in ("seconds", "loss"):
            value = getattr(self, name)
            good = value is None or (math.isfinite(value) and value > 0)
            require(good, name, value, "a finite number above 0")


@dataclass(frozen=True)
class Known:
    """What is known of the methods.

    Attributes:
        aim: of the plan.
        prices: of a step, by method; dense first.
        rungs: seconds on the link that probes stand for, rising; each twice the one before, the
            last one the training itself.
        losses: of the probes, lower is better.
        lower: is less of the metric better?
    """

    aim: Aim
    prices: Mapping[str, Price]
    rungs: tuple[float, ...]
    losses: Mapping[Probe, float]
    lower: bool = True

    @property
    def methods(self) -> tuple[str, ...]:
        return (*self.prices,)

    def steps(self, method: str, rung: int) -> int:
        """Steps of a method in the seconds of a rung."""
        return max(FEWEST, round(self.rungs[rung] / self.prices[method].seconds))

    def horizon(self, method: str) -> int:
        """Steps of a method in the whole training."""
        return self.steps(method, -1)

    @cached_property
    def curve(self) -> Curve:
        longest = max(self.horizon(method) for method in self.methods)
        return Curve(self.methods, dict(self.losses), longest)

    @cached_property
    def draws(self) -> np.ndarray:
        """What decides, lower is better: the loss in the end, or the seconds to the loss.

        Returns:
            One row per method, one column per draw.
        """
        rows = []
        for method in self.methods:
            if self.aim.loss is None:
                rows.append(self.curve.losses_at(method, [self.horizon(method)])[:, 0])
            else:
                loss = self.aim.loss if self.lower else -self.aim.loss
                steps = self.curve.steps_to(method, loss, self.horizon(method))
                rows.append(steps * self.prices[method].seconds)
        return np.array(rows)

    @cached_property
    def best(self) -> dict[str, float]:
        """The probability of each method to be the best."""
        reached = np.isfinite(self.draws).any(axis=0)
        first = self.draws.argmin(axis=0)
        return {
            method: float(((first == i) & reached).mean()) for i, method in enumerate(self.methods)
        }

    @cached_property
    def regret(self) -> dict[str, float]:
        """By method, how much worse than the best one it is expected to be; infinite where it never
        reaches the loss in a draw in which another does."""
        least = self.draws.min(axis=0)
        some = np.isfinite(least)
        found = {}
        for method, draws in zip(self.methods, self.draws, strict=True):
            found[method] = float((draws[some] - least[some]).mean()) if some.any() else math.inf
        return found

    @property
    def decided(self) -> bool:
        """Is one method surely the best?"""
        return max(self.best.values()) >= SURE

    def seeds_of(self, method: str, rung: int) -> int:
        """How many seeds a method has in a rung."""
        steps = self.steps(method, rung)
        return len({p.seed for p in self.losses if (p.method, p.steps) == (method, steps)})


def rungs_within(
    span: float,
    prices: Mapping[str, Price],
    afford: Callable[[Sequence[Probe]], bool],
    least: int = 1,
) -> tuple[float, ...]:
    """The seconds of the rungs of a training: the first is the longest with time for probes of all
    methods.

    Args:
        span: seconds of the training.
        afford: is there time for some probes?
        least: how many rungs there are; a training of unknown length has several.

    Returns:
        No rungs, if there is no time for any.
    """
    rungs = [span]
    while True:
        known = Known(Aim(seconds=span), prices, (*rungs,), {})
        probes = [Probe(m, known.steps(m, 0), rate, 0) for m in known.methods for rate in RATES]
        if len(rungs) >= least and afford(probes):
            return (*rungs,)
        slowest = max(price.seconds for price in prices.values())
        if rungs[0] / slowest <= FEWEST:
            return ()
        rungs.insert(0, rungs[0] / 2)


def next_probes(
    known: Known, seeds: Sequence[int], afford: Callable[[Sequence[Probe]], bool]
) -> list[Probe]:
    """The probes of the next round, the most useful ones first; none: the plan is decided, or
    nothing more can be learnt.

    Args:
        seeds: in the order in which they are used.
        afford: has the budget time for a rung?
    """
    if len(known.methods) == 1 and known.losses:
        return []  # dense is alone: no loss decides anything
    first = seeds[0]
    for rung in range(len(known.rungs)):
        if rung and not any(known.seeds_of(method, rung) for method in known.methods):
            todo = _rung(known, rung, first)
            if afford(todo):
                return todo
            return _seeds(known, rung - 1, seeds)
        todo = _rates(known, rung, first)
        if todo:
            return todo
    return _seeds(known, len(known.rungs) - 1, seeds)


def _rates(known: Known, rung: int, seed: int) -> list[Probe]:
    """Rates that a rung still needs: some of each method in the first one; then beyond the best if
    that is the last one tried, and what the curve says is the best."""
    todo = []
    for method in known.methods:
        steps = known.steps(method, rung)
        tried = {
            p.rate: loss
            for p, loss in known.losses.items()
            if (p.method, p.steps, p.seed) == (method, steps, seed)
        }
        if rung == 0:
            wanted = [rate for rate in RATES if rate not in tried] or _beyond(tried)
        elif tried and len(tried) < 3 + len(RATES) and known.best[method] >= LIKELY:
            wanted = [_rounded(known.curve.best_rate(method, steps))]
        else:
            wanted = []
        todo += [Probe(method, steps, rate, seed) for rate in wanted if rate not in tried]
    return todo


def _beyond(tried: Mapping[float, float]) -> list[float]:
    """The next rate beyond the best one, if that is the lowest or the highest tried."""
    finite = {rate: loss for rate, loss in tried.items() if math.isfinite(loss)}
    best = min(finite, key=lambda rate: finite[rate]) if finite else min(tried)
    beyond = best - 1.0 if best == min(tried) else best + 1.0
    edge = best in (min(tried), max(tried))
    return [beyond] if edge and abs(beyond) <= FARTHEST else []


def _rung(known: Known, rung: int, seed: int) -> list[Probe]:
    """The first probes of a rung: dense at three rates, the others at the best, the likeliest
    first."""
    dense = known.methods[0]
    todo = []
    for method in _left(known, rung):
        steps = known.steps(method, rung)
        best = _rounded(known.curve.best_rate(method, steps))
        rates = [best, best - 1, best + 1] if method == dense else [best]
        todo += [Probe(method, steps, rate, seed) for rate in rates]
    return todo


def _left(known: Known, rung: int) -> list[str]:
    """The methods of a rung: dense, and from the rung before the methods that may be the best,
    at least half of them."""
    dense = known.methods[0]
    before = [m for m in known.methods if m != dense and known.seeds_of(m, rung - 1)]
    before.sort(key=lambda method: known.regret[method])
    likely = sum(known.best[method] >= OUT for method in before)
    return [dense, *before[: max(likely, math.ceil(len(before) / 2))]]


def _seeds(known: Known, rung: int, seeds: Sequence[int]) -> list[Probe]:
    """One more seed of a rung's methods that may be the best, and dense, at their best rates; none
    once one method is surely the best and has two seeds."""
    dense = known.methods[0]
    left = [m for m in known.methods if known.seeds_of(m, rung) and known.best[m] >= OUT]
    left.sort(key=lambda method: known.regret[method])
    wanted = [*dict.fromkeys((*left, dense))]
    fewest = min(known.seeds_of(method, rung) for method in wanted)
    if fewest >= SEEDS or (known.decided and fewest > 1):
        return []
    seed = seeds[fewest]
    todo = []
    for method in wanted:
        steps = known.steps(method, rung)
        probe = Probe(method, steps, _best_tried(known, method, steps), seed)
        if probe not in known.losses:
            todo.append(probe)
    return todo


def _rounded(rate: float) -> float:
    """To the nearest rate that is tried."""
    return STEP * round(rate / STEP)


def _best_tried(known: Known, method: str, steps: int) -> float:
    """The rate with the lowest mean loss of a method at a length."""
    by_rate: dict[float, list[float]] = {}
    for probe, loss in known.losses.items():
        if (probe.method, probe.steps) == (method, steps):
            by_rate.setdefault(probe.rate, []).append(loss)
    return min(by_rate, key=lambda rate: float(np.mean(by_rate[rate])))
