"""Detectors that read each value once: CUSUM on the Hessian trace, and AdaQS' fall of the MSDR."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from regimes.config import Bounded, Bounds
from regimes.config.bounds import InnerShare, NonNegative, Positive
from regimes.detectors.base import Online, Verdict

SMALLEST_SD = 0.01  # of the logarithm: a warm-up of equal values must not divide by zero


class Sums(NamedTuple):
    """The state of `TraceCusum`."""

    base: tuple[float, ...] = ()  # logarithms of the warm-up
    mean: float = 0.0  # of a complete warm-up
    sd: float = 0.0
    up: float = 0.0  # sums of deviations, in units of ``sd``
    down: float = 0.0


@dataclass(frozen=True)
class TraceCusum(Bounded, Online):
    """Two-sided cumulative sums on the log of the layer-wise Hessian trace (Page 1954, Biometrika
    41): critical from an alarm until the next baseline is known.

    CUSUM notices a small lasting shift of a mean sooner than a rule on single values. The first
    ``warmup`` measurements are critical; they give the mean and standard deviation of ``z =
    log(value)``. Then, in units of that deviation, ``up = max(0, up + z - k)`` and ``down = max(0,
    down - z - k)``, with an alarm when either exceeds ``h``. The alarm's value starts a new warm-up
    with both sums at zero. A trace that is not positive, which has no logarithm, is an alarm too,
    and no part of a baseline.

    A fast trend in the warm-up inflates the deviation and dulls the rule until the next alarm.

    Attributes:
        k: drift allowed, standard deviations per measurement (half the shift to be detected).
        h: threshold, standard deviations. k = 0.5, h = 5 alarms by chance once in 465
            measurements of known mean and deviation; more often after a short warm-up.
        warmup: measurements per baseline.
    """

    k: NonNegative = 0.5
    h: Positive = 5.0
    warmup: Annotated[int, Bounds("at least 2 measurements", low=2)] = 5
    statistic: str = "hessian_trace"
    per_layer: bool = True

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
            mean = math.fsum(base) / len(base)  # the module statistics is exact and far slower
            square = math.fsum((v - mean) ** 2 for v in base) / (len(base) - 1)
            sums = Sums(base, mean, max(SMALLEST_SD, math.sqrt(square)))
            return sums, Verdict(False, math.exp(mean), value, None, self.h)
        deviation = (z - state.mean) / state.sd
        up = max(0.0, state.up + deviation - self.k)
        down = max(0.0, state.down - deviation - self.k)
        score = max(up, down)
        critical = score > self.h
        verdict = Verdict(critical, math.exp(state.mean), value, score, self.h)
        return Sums((z,)) if critical else state._replace(up=up, down=down), verdict


class Fall(NamedTuple):
    """The state of `MsdrFall`: what the next value is compared with, and whether any has fallen."""

    reference: float | None = None
    fallen: bool = False


@dataclass(frozen=True)
class MsdrFall(Bounded, Online):
    """Critical when the gradient's mean-to-standard-deviation ratio (MSDR) has fallen by a set
    share since the last reference: ``1 - new / reference >= fall`` (AdaQS: Guo et al. 2020; the
    paper's Figure 7).

    The first measurement is the first reference; each fall makes the new value the reference.

    Attributes:
        fall: share of the reference.
        latch: stay critical after the first fall, as AdaQS does. False: until the next
            measurement that has not fallen.
    """

    fall: InnerShare = 0.5
    latch: bool = True
    statistic: str = "msdr"
    per_layer: bool = False

    def begin(self) -> tuple[Fall, Verdict]:
        return Fall(), Verdict(False, threshold=self.fall)

    def update(self, state: Fall, value: float | None) -> tuple[Fall, Verdict]:
        if value is None:
            return state, Verdict(None)
        old, score, finite = state.reference, None, math.isfinite(value)
        if finite and old is not None and old > 0:
            score = 1 - value / old
        now = score is not None and score >= self.fall
        fallen = state.fallen or now
        new = Fall(value if now or (score is None and finite) else old, fallen)
        return new, Verdict(now or (self.latch and fallen), old, value, score, self.fall)
