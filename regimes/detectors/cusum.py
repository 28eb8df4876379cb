"""Two-sided cumulative sums on the logarithm of the layer-wise Hessian trace.

CUSUM (Page 1954, Biometrika 41) notices a small lasting shift of a mean sooner than a rule on
single values: deviations beyond a slack ``k`` add up until they pass ``h``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from regimes.detectors.base import Values, Verdict
from regimes.errors import require

SMALLEST_SD = 0.01  # of the logarithm: a warm-up of equal values must not divide by zero


@dataclass(frozen=True)
class TraceCusum:
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

    def __call__(self, values: Values) -> Verdict:
        critical, old, new, score = True, None, None, None
        base: list[float] = []
        mean = sd = up = down = 0.0
        for new in values:
            if new is None:
                continue
            if not (new > 0 and math.isfinite(new)):
                base, critical, old, score = [], True, None, None
                continue
            z = math.log(new)
            if len(base) < self.warmup:
                base.append(z)
                up, down, score = 0.0, 0.0, None
                critical = len(base) < self.warmup
                mean, sd = (mean, sd) if critical else _moments(base)
                old = None if critical else math.exp(mean)
                continue
            z = (z - mean) / sd
            up, down = max(0.0, up + z - self.k), max(0.0, down - z - self.k)
            score = max(up, down)
            critical, old = score > self.h, math.exp(mean)
            if critical:
                base = [math.log(new)]
        if values and new is None:
            return Verdict(None)
        return Verdict(critical, old, new, score, self.h)


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and (n - 1) standard deviation; ``statistics`` is exact and far slower."""
    mean = math.fsum(values) / len(values)
    square = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, max(SMALLEST_SD, math.sqrt(square))
