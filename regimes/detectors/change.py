"""The paper's rule and its variants: a statistic that changes fast marks a critical regime.

The statistic is the accumulated gradient's norm (ACCORDION, section 4.2), the top Hessian
eigenvalue (Jastrzebski et al. 2019; the paper's Figure 3), or the critical sharpness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from regimes.config import Bounded
from regimes.config.bounds import Count, Positive
from regimes.detectors.base import Values, Verdict, latest_measured


@dataclass(frozen=True)
class RelativeChange(Bounded):
    """``|old - new| / |old| >= eta``, of any statistic.

    Evaluated after epochs 0, interval, 2 x interval, ... against the previous evaluation. An epoch
    without a measurement takes the newest one before it; without a new one since the previous
    evaluation there is no opinion. Critical until the first evaluation, and at it, and where the
    old value is zero or not finite (the authors' code).

    Attributes:
        eta: relative change.
        interval: epochs between evaluations.
        statistic: what is compared; "norm*lr" and the like are multiplied by the epoch's rate.
        direction: "decay" counts only falls, ``(old - new) / |old|``.
    """

    eta: Positive = 0.5
    interval: Count = 10
    statistic: str = "norm"
    per_layer: bool = True
    direction: Literal["either", "decay"] = "either"

    def __call__(self, values: Values) -> Verdict:
        epoch = len(values) - 1
        if epoch < 0:
            return Verdict(True, threshold=self.eta)
        if epoch % self.interval:
            return Verdict(None)
        now, before = latest_measured(values, epoch), latest_measured(values, epoch - self.interval)
        if now is None or now == before:
            return Verdict(None)
        new, old = values[now], None if before is None else values[before]
        if new is None or old is None or old == 0 or not math.isfinite(old):
            return Verdict(True, old, new, None, self.eta)
        fall = (old - new) / abs(old)
        score = fall if self.direction == "decay" else abs(fall)
        return Verdict(score >= self.eta or math.isnan(score), old, new, score, self.eta)


@dataclass(frozen=True)
class NormChange(RelativeChange):
    """The paper's rule (section 4.2): ``| |old| - |new| | / |old| >= eta``, per layer.

    A fall from 4 to 1 in two epochs is a change of 75 %, one from 4 to 3 of 25 %. Between two
    evaluations there is no opinion:

    >>> rule = NormChange(eta=0.5, interval=2)
    >>> rule([4.0, 2.0, 1.0])
    Verdict(critical=True, old=4.0, new=1.0, score=0.75, threshold=0.5)
    >>> rule([4.0, 3.5, 3.0]).critical, rule([4.0, 2.0]).critical
    (False, None)

    The accumulated gradient's norm scales like displacement / lr, so it jumps at each decay
    whatever the loss; ``statistic = "norm*lr"`` removes the learning rate.
    """


@dataclass(frozen=True)
class EigenvalueChange(RelativeChange):
    """Rapid decay of the top Hessian eigenvalue (Jastrzebski et al. 2019; Figure 3)."""

    statistic: str = field(default="eigenvalue", init=False)
    per_layer: bool = False
    direction: Literal["either", "decay"] = "decay"


@dataclass(frozen=True)
class SharpnessChange(RelativeChange):
    """Change of the critical sharpness (Kalra et al. 2026), a cheap proxy of the eigenvalue."""

    statistic: str = field(default="critical_sharpness", init=False)
    per_layer: bool = False
