"""How many times as fast as dense each method trains, and which short runs are next.

Dense's first short runs find its learning rate, and how long runs take here. Then all methods are
trained for one length, about four times as long, and dense for a half of it, too, so that a clock
of a quarter can be read; each at the rate that was best and at twice that, dense and the methods
that may be the fastest until both rates beside the best are worse. Then further seeds of these are
trained, and twice the length, until the interval of one method lies above all others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from regimes.search.plans import clock
from regimes.search.plans.clock import DenseCurve, DenseRatio, Losses, Probe
from regimes.search.plans.priced import Price

FEWEST = 16  # steps of a short run
QUARTER = 4  # the first runs have this part of the others' expected length
FARTHEST = 4.0  # doublings of the configuration's learning rate
SEEDS = 5  # that a method has at most
ENOUGH = 3  # seeds that it has before it is trained longer
EXPECTED = 2.5  # runs that a method is expected to need at a length, with the first seed
MORE = 2  # further seeds for which time is kept
LIKELY = 3  # methods for which it is kept


@dataclass(frozen=True)
class PlanEvidence:
    """Says what the short runs so far tell of the methods.

    Attributes:
        seconds: of the training in question, on the link.
        prices: of a step, by method; dense first.
        first: steps of dense's first runs.
        length: steps of the others, at first; 0: it is not chosen yet.
        losses: in their ends.
    """

    seconds: float
    prices: Mapping[str, Price]
    first: int
    length: int
    losses: Losses

    @property
    def methods(self) -> tuple[str, ...]:
        return (*self.prices,)

    @property
    def dense(self) -> str:
        return self.methods[0]

    @property
    def seeds(self) -> list[int]:
        """List the seeds in the order in which they were trained."""
        return [*dict.fromkeys(probe.seed for probe in self.losses)]

    def horizon(self, method: str) -> int:
        """Count the steps for which a method has time in the training in question; at least
        `FEWEST`."""
        return max(FEWEST, round(self.seconds / self.prices[method].seconds))

    @cached_property
    def _ends(self) -> Mapping[tuple[str, int], Mapping[float, Mapping[int, float]]]:
        """The losses by method and steps, then by rate, then by seed."""
        found: dict[tuple[str, int], dict[float, dict[int, float]]] = {}
        for p, loss in self.losses.items():
            by_rate = found.setdefault((p.method, p.steps), {})
            by_rate.setdefault(p.rate, {})[p.seed] = loss
        return found

    def rates(self, method: str, steps: int) -> Mapping[float, float]:
        """Return the mean loss over seeds at each rate that was tried, by doublings of the
        configuration's."""
        ends = self._ends.get((method, steps), {})
        return {rate: statistics.fmean(losses.values()) for rate, losses in ends.items()}

    def best_rate(self, method: str, steps: int) -> float:
        """Return the rate with the lowest mean loss, in doublings of the configuration's; the
        lowest rate if all trainings broke."""
        means = self.rates(method, steps)
        return min(sorted(means), key=lambda rate: means[rate])

    def best_ends(self, method: str, steps: int) -> Mapping[int, float]:
        """Return the losses at the best rate, by seed; none if the method was not tried at this
        length."""
        if (method, steps) not in self._ends:
            return {}
        return self._ends[method, steps][self.best_rate(method, steps)]

    @cached_property
    def dense_lengths(self) -> list[int]:
        """List the lengths at which dense was trained, in steps, rising."""
        return sorted(steps for method, steps in self._ends if method == self.dense)

    def lengths(self, method: str) -> list[int]:
        """List the lengths at which a method was trained beside all others, or longer, in steps,
        rising."""
        return sorted(n for m, n in self._ends if m == method and n >= self.length)

    def dense_curve(self, seed: int | None = None, up_to: float = math.inf) -> DenseCurve | None:
        """Draw a curve through dense's losses with a seed, or through their means; None if one is
        missing or a training broke.

        Args:
            up_to: steps up to which no length may be missing.
        """
        points: dict[float, float] = {}
        for steps in self.dense_lengths:
            ends = self.best_ends(self.dense, steps)
            if seed is None:
                points[steps] = statistics.fmean(ends.values())
            elif seed in ends or steps <= up_to:
                points[steps] = ends.get(seed, math.inf)
        finite = points and all(map(math.isfinite, points.values()))
        return DenseCurve.of(points) if finite else None

    def _logs(self, method: str, length: int) -> list[float]:
        """The logarithm of the clock of each seed; -inf where dense was never so bad."""
        found = []
        for seed, loss in self.best_ends(method, length).items():
            curve = self.dense_curve(seed, length)
            if curve is not None:
                steps = curve.steps_to(loss)
                found.append(math.log(steps / length) if steps > 0 else -math.inf)
        return found

    @cached_property
    def clocks(self) -> Mapping[str, DenseRatio]:
        """Estimate the clock of each method that has a short run beside dense's; of several lengths
        the surest one counts."""
        logs = {(m, n): self._logs(m, n) for m in self.methods[1:] for n in self.lengths(m)}
        logs = {key: each for key, each in logs.items() if each}
        spread = clock.pool_spread(each for each in logs.values() if min(each) > -math.inf)
        found = {self.dense: clock.DENSE}
        for (method, length), each in logs.items():
            if min(each) > -math.inf:
                doublings = math.log2(self.horizon(method) / length)
                new = clock.estimate_clock(each, spread, doublings)
            else:
                bound = self.dense_lengths[0] / length
                new = DenseRatio(bound, 0.0, bound, len(each), known=False)
            old, width = found.get(method), (new.high - new.low) / new.mean
            if old is None or (new.known >= old.known and width < (old.high - old.low) / old.mean):
                found[method] = new
        return found

    @cached_property
    def speeds(self) -> Mapping[str, DenseRatio]:
        """Compute how many times as fast as dense each method with a clock comes to a loss, the
        fastest first; of those that are as fast the one that sends less."""
        dense = self.prices[self.dense].seconds
        found = {m: k * (dense / self.prices[m].seconds) for m, k in self.clocks.items()}
        order = sorted(found, key=lambda m: (-found[m].mean, self.prices[m].bytes))
        return {method: found[method] for method in order}

    @property
    def best(self) -> str:
        """Name the fastest method; dense where nothing is known."""
        return next(iter(self.speeds))

    @cached_property
    def rivals(self) -> list[str]:
        """List the methods whose interval overlaps the best method's, the best first."""
        least = self.speeds[self.best].low
        return [m for m, speed in self.speeds.items() if m == self.best or speed.high >= least]

    @property
    def untried(self) -> list[str]:
        """List the methods without a clock, before which the budget ended."""
        return [method for method in self.methods if method not in self.clocks]

    @property
    def decided(self) -> bool:
        """Answer whether the interval of one method is above all others, with two seeds or more."""
        several = len(self.seeds) > 1 or len(self.methods) == 1
        return several and not self.untried and len(self.rivals) == 1


def expect_seconds(prices: Mapping[str, Price], start: float) -> tuple[float, float]:
    """Estimate what all short runs of one length take here, in seconds: without their steps, and
    for each step that a run has.

    Args:
        start: seconds that a run takes besides its steps.
    """
    dense, *others = (price.here for price in prices.values())
    likely = sorted(others, reverse=True)[:LIKELY]
    lengths = 1 + 1 / 2 + 1 / QUARTER  # of dense, in those of the methods
    steps = dense * (EXPECTED + MORE) * lengths + EXPECTED * sum(others) + MORE * sum(likely)
    runs = (EXPECTED + MORE) * 3 + EXPECTED * len(others) + MORE * len(likely)
    return start * runs, steps


def choose_length(prices: Mapping[str, Price], start: float, left: float) -> int:
    """Find the most steps of short runs for which there is time; 0 if there is too little.

    Args:
        start: seconds that a run takes besides its steps.
        left: seconds that there are, of all processes together.
    """
    starts, steps = expect_seconds(prices, start)
    return max(0, math.floor((left - starts) / steps)) if steps else 0


def next_probes(known: PlanEvidence, seeds: Sequence[int]) -> list[list[Probe]]:
    """List the short runs of the next round, the most useful ones first. Of several lists a later
    one is for a budget that has no time for those before. Without any run the length is to be
    chosen, the plan is decided, or nothing more can be learnt.

    Args:
        seeds: in the order in which they are used.
    """
    dense, *others = known.methods
    first, short, length = seeds[0], known.first, known.length
    if not others:  # no loss decides anything; one run says in which unit losses are
        return [] if known.losses else [[Probe(dense, short, 0.0, first)]]
    todo = _climb(known, dense, short, first, (0.0, 1.0, -1.0))
    if todo or not length or not math.isfinite(min(known.rates(dense, short).values())):
        return [todo]
    rate = known.best_rate(dense, short)
    around = (rate, rate + 1)
    for steps in (length, max(length // 2, 1), *known.dense_lengths):
        todo += _climb(known, dense, steps, first, around)
    both = [Probe(m, length, r, first) for r in around for m in others]
    todo = [*dict.fromkeys(todo), *(probe for probe in both if probe not in known.losses)]
    if todo:
        return [todo]
    likely = [method for method in known.rivals if method != dense]
    for method in likely:
        todo += _climb(known, method, known.lengths(method)[-1], first, around)
    if todo:
        return [todo]
    shorter = known.dense_lengths[0] // 2
    if shorter >= FEWEST // 4 and not all(known.clocks[m].known for m in likely):
        return [_climb(known, dense, shorter, first, (rate, rate - 1))]
    if known.decided:
        return []
    again = _seeds(known, seeds, likely)
    few = min((len(known.best_ends(m, known.lengths(m)[-1])) for m in likely), default=SEEDS)
    return [again] if few < ENOUGH else [_longer(known, first, likely), again]


def _climb(
    known: PlanEvidence, method: str, steps: int, seed: int, start: Sequence[float]
) -> list[Probe]:
    """The rates that a method still needs at a length: ``start``, then those beside the best."""
    tried = known.rates(method, steps)
    if tried:
        best = known.best_rate(method, steps)
        broke = not math.isfinite(tried[best])
        start = [best - 1] if broke else [best - 1, best + 1]
    rates = [rate for rate in start if rate not in tried and abs(rate) <= FARTHEST]
    return [Probe(method, steps, rate, seed) for rate in rates]


def _seeds(known: PlanEvidence, seeds: Sequence[int], likely: Sequence[str]) -> list[Probe]:
    """One more seed of dense and of the methods that may be the fastest, at their best rates."""
    lengths = {m: known.lengths(m)[-1:] for m in likely}
    longest = max((n for ns in lengths.values() for n in ns), default=known.length)
    lengths = {known.dense: [n for n in known.dense_lengths if n <= longest], **lengths}
    for seed in seeds[:SEEDS]:
        todo = [
            probe
            for method, steps in lengths.items()
            for n in steps
            if (probe := Probe(method, n, known.best_rate(method, n), seed)) not in known.losses
        ]
        if todo:
            return todo
    return []


def _longer(known: PlanEvidence, seed: int, likely: Sequence[str]) -> list[Probe]:
    """Twice the length of dense and of the methods that may be the fastest, at their best rates and
    beyond; none where this is the whole training."""
    before = max((known.lengths(m)[-1] for m in likely), default=0)
    steps = min(2 * before, max((known.horizon(m) for m in likely), default=0))
    if steps <= before:
        return []
    rates = {m: known.best_rate(m, known.lengths(m)[-1]) for m in (known.dense, *likely)}
    both = [Probe(m, steps, rate + more, seed) for more in (0, 1) for m, rate in rates.items()]
    return [probe for probe in both if probe not in known.losses and probe.rate <= FARTHEST]
