"""Detectors that the study compares with the paper's rule. No torch.

Change of the Fisher information, CUSUM on the Hessian trace, and the fall of the MSDR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, NamedTuple

from regimes.base.config import Bounded, Bounds
from regimes.base.config.bounds import InnerShare, NonNegative, Positive
from regimes.policies.detectors.base import Online, Verdict
from regimes.policies.detectors.change import RelativeChange
from regimes.policies.detectors.fall import RelativeFall

SMALLEST_SD = 0.01  # of the logarithm: a warm-up of equal values must not divide by zero


@dataclass(frozen=True)
class FisherChange(RelativeChange):
    """Change of the Fisher information's trace, which rises and falls through a critical period
    (Achille et al. 2019)."""

    statistic: str = field(default="fisher_trace", init=False)
    per_layer: bool = False


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


class Fallen(NamedTuple):
    """The state of `MsdrFall`: what the next value is compared with, and whether any has fallen."""

    reference: float | None = None
    fallen: bool = False


@dataclass(frozen=True)
class MsdrFall(Bounded, Online):
    """The rule of AdaQS as a detector.

    Attributes:
        fall: share of the reference.
        latch: stay critical after the first fall, as AdaQS does. False: until the next
            measurement that has not fallen.
    """

    fall: InnerShare = 0.5
    latch: bool = True
    statistic: str = "msdr"
    per_layer: bool = False

    @cached_property
    def rule(self) -> RelativeFall:
        return RelativeFall(self.fall)

    def begin(self) -> tuple[Fallen, Verdict]:
        return Fallen(), self.rule.begin()[1]

    def update(self, state: Fallen, value: float | None) -> tuple[Fallen, Verdict]:
        reference, verdict = self.rule.update(state.reference, value)
        if verdict.critical is None:
            return state, verdict
        fallen = state.fallen or verdict.critical
        critical = verdict.critical or (self.latch and fallen)
        return Fallen(reference, fallen), replace(verdict, critical=critical)
