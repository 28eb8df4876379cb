"""Which probes are trained next, and what the losses say.

Methods are compared after equal seconds on the link, in rungs, each twice as long as the one
before, or less where that one would have too few steps. The first is the longest for which there is
time with all methods. Those that are surely not the best take no further part (as in successive
halving: Jamieson & Talwalkar, 2016), and the others go on with the longest rung for which there is
time. In each rung a method's learning rate climbs by doublings until both neighbours of the best
one are worse. Where the budget has no time for another rung, further seeds of the last one show how
sure its losses are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from regimes.errors import require
from regimes.plans.curve import DRAWS, Curve, Probe
from regimes.plans.priced import Price

RATES = (0.0, 1.0)  # doublings beyond the expected best rate that are tried first
TRIED = 3  # rates that a method is expected to need
FARTHEST = 4.0
OUT = 0.02  # probability of being the best below which a method takes no further part
LIKELY = 0.05  # from which on its best rate is looked for on both sides
FEW = 3  # methods that a longer rung compares at least, of those that may be the best
SURE = 0.95
SEEDS = 5
FEWEST = 16  # steps of a probe
CLOSEST = 0.85  # of the next rung's seconds, that a rung has at most: its steps are others
LENGTHS = 3  # rungs of a plan for a loss, whose steps are not known
FIRST, NEXT = 0.5, 0.8  # shares of the budget, and of its rest, that a rung may take


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
class PlanEvidence:
    """What is known of the methods.

    Attributes:
        aim: of the plan.
        prices: of a step, by method; dense first. Lengths of probes follow from them.
        rungs: seconds on the link that probes stand for, rising; each twice the one before or
            less, the last one the training itself.
        losses: of the probes, lower is better.
        lower: is less of the metric better?
        ends: the lowest and the highest loss that there is.
        renewed: prices that were found later, from which the training's length follows; empty:
            there are none.
    """

    aim: Aim
    prices: Mapping[str, Price]
    rungs: tuple[float, ...]
    losses: Mapping[Probe, float]
    lower: bool = True
    ends: tuple[float, float] = (-math.inf, math.inf)
    renewed: Mapping[str, Price] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        return (*self.prices,)

    @cached_property
    def untried(self) -> tuple[str, ...]:
        """Methods without a probe: the budget ended before."""
        seen = {probe.method for probe in self.losses}
        return tuple(method for method in self.methods if method not in seen)

    def steps(self, method: str, rung: int) -> int:
        """Steps of a method in the seconds of a rung."""
        return max(FEWEST, round(self.rungs[rung] / self.prices[method].seconds))

    def price(self, method: str) -> Price:
        """The latest one."""
        return self.renewed.get(method, self.prices[method])

    def horizon(self, method: str) -> int:
        """Steps of a method in the whole training."""
        return max(FEWEST, round(self.rungs[-1] / self.price(method).seconds))

    @cached_property
    def curve(self) -> Curve:
        longest = max(self.horizon(method) for method in self.methods)
        return Curve(self.methods, dict(self.losses), longest)

    @cached_property
    def draws(self) -> np.ndarray:
        """What decides, lower is better: the loss in the end, or the seconds to the loss; infinite
        for untried methods.

        Returns:
            One row per method, one column per draw.
        """
        rows = []
        for method in self.methods:
            mine = [loss for probe, loss in self.losses.items() if probe.method == method]
            if not np.isfinite(mine).any():
                rows.append(np.full(DRAWS, np.inf))
            elif self.aim.loss is None:
                drawn = self.curve.losses_at(method, [self.horizon(method)])[:, 0]
                rows.append(drawn.clip(*self.ends))
            else:
                loss = self.aim.loss if self.lower else -self.aim.loss
                steps = self.curve.steps_to(method, loss, self.horizon(method))
                rows.append(steps * self.price(method).seconds)
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
        """Is one method surely the best of all?"""
        return not self.untried and max(self.best.values()) >= SURE

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
        known = PlanEvidence(Aim(seconds=span), prices, (*rungs,), {})
        probes = [
            Probe(m, known.steps(m, 0), float(rate), 0)
            for m in known.methods
            for rate in range(TRIED)
        ]
        if len(rungs) >= least and afford(probes):
            return (*rungs,)
        slowest = max(price.seconds for price in prices.values())
        shorter = max(rungs[0] / 2, FEWEST * slowest)
        if shorter > CLOSEST * rungs[0]:  # nothing is shorter, or hardly
            return ()
        rungs.insert(0, shorter)


def shortest_span(prices: Mapping[str, Price], rungs: int) -> float:
    """The seconds of the shortest training that has so many rungs, two or more."""
    slowest = max(price.seconds for price in prices.values())
    return 2 ** (rungs - 2) * FEWEST * slowest / CLOSEST


def next_probes(
    known: PlanEvidence, seeds: Sequence[int], afford: Callable[[Sequence[Probe]], bool]
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
    tried = [r for r in range(len(known.rungs)) if any(known.seeds_of(m, r) for m in known.methods)]
    if not tried:
        dense = known.methods[0]
        return [Probe(dense, known.steps(dense, 0), rate, first) for rate in (-1.0, *RATES)]
    last = tried[-1]
    if todo := _climb(known, last, first):
        return todo
    if not np.isfinite([*known.losses.values()]).any():
        return []  # not even the lowest rate ended
    if todo := _untried(known, last, first):
        return todo
    longer = range(last + 1, len(known.rungs))
    # of a training of unknown length each rung counts: one of them may be long enough
    for rung in longer[:1] if known.aim.seconds is None else reversed(longer):
        methods = _left(known, last)
        for count in range(len(methods), min(FEW, len(methods)) - 1, -1):
            probes = _rung(known, methods[:count], last, rung, first)
            if afford(probes):
                return probes
    return _seeds(known, last, seeds)


def later_probes(known: PlanEvidence, seeds: Sequence[int]) -> list[list[Probe]]:
    """The rounds that a larger budget could train next, each in place of the others."""
    asked: list[list[Probe]] = []

    def refuse(probes: Sequence[Probe]) -> bool:
        asked.append([*probes])
        return False

    rest = next_probes(known, seeds, refuse)
    return [*asked, *([rest] if rest else [])]


def _climb(known: PlanEvidence, rung: int, seed: int) -> list[Probe]:
    """Rates that the methods of a rung still need: the next one beyond the best if that is the last
    one tried, downwards only for dense and for methods that may be the best."""
    todo = []
    dense = known.methods[0]
    for method in known.methods:
        steps = known.steps(method, rung)
        tried = {
            p.rate: loss
            for p, loss in known.losses.items()
            if (p.method, p.steps, p.seed) == (method, steps, seed)
        }
        if not tried:
            continue
        best = min(sorted(tried), key=lambda rate: tried[rate])  # the lowest, if all broke
        down = math.isinf(tried[best]) or method == dense or known.best[method] >= LIKELY
        beyond = [best + 1] + [best - 1] * down
        if math.isinf(tried[best]):
            beyond = beyond[1:]
        wanted = [r for r in beyond if abs(r) <= FARTHEST and r not in tried]
        todo += [Probe(method, steps, rate, seed) for rate in wanted]
    return todo


def _untried(known: PlanEvidence, rung: int, seed: int) -> list[Probe]:
    """All methods but dense in the first rung, at its best rate and beyond."""
    if rung or any(known.seeds_of(method, rung) for method in known.methods[1:]):
        return []
    dense, *others = known.methods
    best = known.curve.best_rate(dense, known.steps(dense, rung))
    return [Probe(m, known.steps(m, rung), best + r, seed) for r in RATES for m in others]


def _rung(
    known: PlanEvidence, methods: Sequence[str], last: int, rung: int, seed: int
) -> list[Probe]:
    """The first probes of a rung, each method at its best rate of the rung before and beyond.

    Args:
        last: the rung before.
    """
    todo = []
    for rate in RATES:
        for method in methods:
            best = known.curve.best_rate(method, known.steps(method, last))
            todo.append(Probe(method, known.steps(method, rung), best + rate, seed))
    return todo


def _left(known: PlanEvidence, last: int) -> list[str]:
    """The methods of the next rung, the one with the least expected regret first: those that may be
    the best, and two at least."""
    before = [m for m in known.methods if known.seeds_of(m, last)]
    before.sort(key=lambda method: known.regret[method])
    return before[: max(sum(known.best[m] >= OUT for m in before), 2)]


def _seeds(known: PlanEvidence, rung: int, seeds: Sequence[int]) -> list[Probe]:
    """One more seed of a rung's methods that may be the best, at their best rates; none once one
    method is surely the best and has two seeds."""
    left = [m for m in known.methods if known.seeds_of(m, rung) and known.best[m] >= OUT]
    left.sort(key=lambda method: known.regret[method])
    if not left:
        return []
    fewest = min(known.seeds_of(method, rung) for method in left)
    if fewest >= SEEDS or (known.decided and fewest > 1):
        return []
    seed = seeds[fewest]
    todo = []
    for method in left:
        steps = known.steps(method, rung)
        probe = Probe(method, steps, known.curve.best_rate(method, steps), seed)
        if probe not in known.losses:
            todo.append(probe)
    return todo
