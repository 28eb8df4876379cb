"""How far a step of a method comes, as a share of a step of dense: its *clock*.

A method that ends at some loss after N steps has the clock k if dense ends there after k N steps,
each at its own best learning rate, with schedules in proportion. In the records of the study it
hardly depends on the size of the model, and on the length the less, the nearer it is to 1
(``docs/findings/clock.md``). So short runs measure it, and it times the ratio of the seconds of a
step says how many times as fast as dense a method trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

SPREAD = 0.1  # standard deviation of the logarithm of a seed's clock, before any was measured
RUNS = 2.0  # for so many measured runs this spread counts
DRIFT, STILL = 0.35, 0.02  # change of that logarithm with each doubling: DRIFT (1 - k) + STILL
REACH = 2.0  # times dense's longest training, on its last line: noise may take a clock above 1


@dataclass(frozen=True)
class Probe:
    """Describes one short training.

    Attributes:
        method: by name; the first of all is dense.
        steps: that were trained, with the schedule of the rate in proportion.
        rate: doublings of the configuration's learning rate.
    """

    method: str
    steps: int
    rate: float
    seed: int


Losses = Mapping[Probe, float]  # lower is better; infinite if the training broke


@dataclass(frozen=True)
class DenseCurve:
    """Says at what loss dense ends after a number of steps, by lines over the logarithm of the
    steps.

    Attributes:
        steps: the lengths, rising.
        losses: in the end of each, lower is better; a longer training counts as at least as good.
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[float, float]) -> DenseCurve:
        """Build the curve from the loss after each number of steps."""
        steps = sorted(points)
        falling = np.minimum.accumulate([points[n] for n in steps])
        return cls(tuple(steps), tuple(map(float, falling)))

    def loss(self, steps: float) -> float:
        """Return the loss after a number of steps; nan more than a tenth beyond the lengths."""
        if not self.steps[0] / 1.1 <= steps <= 1.1 * self.steps[-1]:
            return math.nan
        return float(np.interp(math.log(steps), np.log(self.steps), self.losses))

    def steps_to(self, loss: float) -> float:
        """Return after how many steps dense reaches a loss; nan if its shortest training ended
        lower. A loss below all is sought on the last line, up to `REACH` times the longest
        training."""
        if not loss <= self.losses[0]:
            return math.nan
        logs = np.log(self.steps)
        at = float(np.interp(-loss, [-x for x in self.losses], logs))
        if loss < self.losses[-1] and len(logs) > 1:
            slope = (self.losses[-2] - self.losses[-1]) / (logs[-1] - logs[-2])
            beyond = (self.losses[-1] - loss) / slope if slope > 0 else 0.0
            at = float(logs[-1]) + min(beyond, math.log(REACH))
        return math.exp(at)


@dataclass(frozen=True)
class DenseRatio:
    """Holds how a method compares with dense, its clock or its speed, with the 95 % interval.

    Attributes:
        n: seeds.
        known: False: dense's shortest training was better; the mean is then an upper bound.
    """

    mean: float
    low: float
    high: float
    n: int
    known: bool = True

    def __mul__(self, ratio: float) -> DenseRatio:
        """The speed of a method, from the ratio of dense's seconds of a step to its own."""
        ends = {name: ratio * getattr(self, name) for name in ("mean", "low", "high")}
        return replace(self, **ends)

    def __format__(self, digits: str) -> str:
        """ "0.81 [0.74, 0.88]", each number with such digits."""
        if not self.known:
            return f"< {self.mean:{digits}}"
        return f"{self.mean:{digits}} [{self.low:{digits}}, {self.high:{digits}}]"


DENSE = DenseRatio(1.0, 1.0, 1.0, 0)


def pool_spread(groups: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Estimate the standard deviation of the logarithm of a seed's clock, from all methods
    together, and its degrees of freedom.

    Args:
        groups: the logarithms of each method's clocks, by seed.
    """
    squares, free = RUNS * SPREAD**2, RUNS
    for logs in groups:
        if len(logs) > 1:
            squares += statistics.variance(logs) * (len(logs) - 1)
            free += len(logs) - 1
    return math.sqrt(squares / free), free


def estimate_clock(
    logs: Sequence[float], spread: tuple[float, float], doublings: float = 0.0
) -> DenseRatio:
    """Estimate the clock of a method, with its 95 % interval, from those of its seeds. A mean above
    1 counts as 1 unless the whole interval is above 1.

    Args:
        logs: their logarithms.
        spread: of `pool_spread`.
        doublings: of the short runs' length, to the length in question.
    """
    sigma, free = spread
    mean = statistics.fmean(logs)
    drift = (DRIFT * max(0.0, 1 - math.exp(mean)) + STILL) * abs(doublings)
    half = float(stdtrit(free, 0.975)) * math.hypot(sigma / math.sqrt(len(logs)), drift)
    low, high = math.exp(mean - half), math.exp(mean + half)
    return DenseRatio(math.exp(mean if low > 1 else min(mean, 0.0)), low, high, len(logs))
