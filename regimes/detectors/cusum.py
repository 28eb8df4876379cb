"""Two-sided cumulative sums on the logarithm of the layer-wise Hessian trace.

CUSUM (Page 1954, Biometrika 41) notices a small lasting shift of a mean sooner than a rule on
single values: deviations beyond a slack ``k`` add up until they pass ``h``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regimes.detectors.base import Online, Verdict
from regimes.errors import require

SMALLEST_SD = 0.01  # of the logarithm: a warm-up of equal values must not divide by zero


class Sums(NamedTuple):
    """What is kept of the values so far.

    Attributes:
        base: logarithms of the warm-up.
        mean, sd: of a whole warm-up.
        up, down: sums of deviations, in units of ``sd``.
    """

    base: tuple[float, ...] = ()
    mean: float = 0.0
    sd: float = 0.0
    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True)
class TraceCusum(Online):
    """Critical from an alarm until the next baseline is known.

    The first ``warmup`` measurements give the in-control mean and standard deviation of
    ``z = log(value)``; no process is known yet, so they count as critical. Then, in units of that
    deviation,
    ``up = max(0, up + z - k)`` and ``down = max(0, down - z - k)``, with an alarm when either
    exceeds ``h``; the alarm's value starts a new warm-up with both sums at zero. A trace that is
    not positive has no logarithm: it is an alarm too, and no part of a baseline.

    A fast trend inside the warm-up inflates the deviation and dulls the rule until the next alarm.

    Attributes:
        k: drift allowed, standard deviations per measurement (half the shift to be found).
        h: threshold, standard deviations. k = 0.5, h = 5 alarms by chance once in 465
            measurements of known mean and deviation; more often after a short warm-up.
        warmup: measurements per baseline.
    """

    k: float = 0.5
    h: float = 5.0
    warmup: int = 5
    statistic: str = "hessian_trace"
    per_layer: bool = True

    def __post_init__(self) -> None:
        require(self.k >= 0, "k", self.k, "a number from zero up")
        require(self.h > 0, "h", self.h, "a positive number")
        require(self.warmup >= 2, "warmup", self.warmup, "at least 2 measurements")

    def begin(self) -> tuple[Sums, Verdict]:
        return Sums(), Verdict(True, threshold=self.h)

    def update(self, state: Sums, value: float | None) -> tuple[Sums, Verdict]:
        if value is None:
            return state, Verdict(None)
        if not (value > 0 and math.isfinite(value)):
            return Sums(), Verdict(True, None, value, None, self.h)
        z = math.log(value)
        if len(state.base) < self.warmup:
            base = (*state.base, z)
            if len(base) < self.warmup:
                return Sums(base), Verdict(True, None, value, None, self.h)
            sums = Sums(base, *_moments(base))
            return sums, Verdict(False, math.exp(sums.mean), value, None, self.h)
        deviation = (z - state.mean) / state.sd
        up = max(0.0, state.up + deviation - self.k)
        down = max(0.0, state.down - deviation - self.k)
        score = max(up, down)
        critical = score > self.h
        said = Verdict(critical, math.exp(state.mean), value, score, self.h)
        return Sums((z,)) if critical else state._replace(up=up, down=down), said


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and (n - 1) standard deviation; ``statistics`` is exact and far slower."""
    mean = math.fsum(values) / len(values)
    square = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, max(SMALLEST_SD, math.sqrt(square))
