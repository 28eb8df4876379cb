"""The paper's rule and its variants: a statistic that changes fast marks a critical regime.

The statistic is the accumulated gradient's norm (ACCORDION, section 4.2), the top Hessian
eigenvalue (Jastrzebski et al. 2019; the paper's Figure 3), or the critical sharpness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from regimes.base.config import Bounded
from regimes.base.config.bounds import Count, Positive
from regimes.policies.detectors.base import Values, Verdict, latest_measured


@dataclass(frozen=True)
class RelativeChange(Bounded):
    """Marks an epoch as critical if a statistic has changed enough: ``|old - new| / |old| >= eta``.

    The rule compares after epochs 0, interval, 2 x interval, ..., each time with the value at the
    previous comparison. An epoch without a measurement has the newest value before it. If there is
    no new value since the previous comparison, there is no verdict. Epochs are critical until
    the second comparison, because the first has no earlier value. They are also critical if the old
    value is zero or not finite. Both is as in the authors' code.

    Attributes:
        eta: The relative change from which on an epoch is critical.
        interval: The number of epochs between two comparisons.
        statistic: What is compared. ``"norm*lr"`` is the norm multiplied by the epoch's learning
            rate; any other statistic may have ``*lr``, too.
        per_layer: Judge each layer by itself, in place of the whole model.
        direction: "either", or "decay", which counts only falls, ``(old - new) / |old|``.
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
    """Marks a layer as critical if its gradient norm has changed enough, the paper's rule (section
    4.2): ``| |old| - |new| | / |old| >= eta``.

    A fall from 4 to 1 in two epochs is a change of 75 %, and one from 4 to 3 is a change of 25 %.
    Between two comparisons there is no verdict:

    >>> rule = NormChange(eta=0.5, interval=2)
    >>> rule([4.0, 2.0, 1.0])
    Verdict(critical=True, old=4.0, new=1.0, score=0.75, threshold=0.5)
    >>> rule([4.0, 3.5, 3.0]).critical, rule([4.0, 2.0]).critical
    (False, None)

    The norm of the accumulated gradient scales like displacement / lr, so it jumps at each decay,
    whatever the loss does. ``statistic = "norm*lr"`` removes the learning rate.
    """


@dataclass(frozen=True)
class EigenvalueChange(RelativeChange):
    """Marks an epoch as critical if the top Hessian eigenvalue has fallen enough (Jastrzebski et
    al. 2019; the paper's Figure 3): by the share ``eta`` since ``interval`` epochs ago.

    Attributes:
        eta: The relative change from which on an epoch is critical.
        interval: The number of epochs between two comparisons.
        per_layer: Judge each layer by itself, in place of the whole model.
        direction: "either", or "decay", which counts only falls, ``(old - new) / |old|``.
    """

    statistic: str = field(default="eigenvalue", init=False)
    per_layer: bool = False
    direction: Literal["either", "decay"] = "decay"


@dataclass(frozen=True)
class SharpnessChange(RelativeChange):
    """Marks an epoch as critical if the critical sharpness has changed enough: by the share ``eta``
    since ``interval`` epochs ago. Critical sharpness (Kalra et al. 2026) is 2 divided by the
    smallest learning rate at which the next step would raise the loss, a cheap substitute for the
    top Hessian eigenvalue.

    Attributes:
        eta: The relative change from which on an epoch is critical.
        interval: The number of epochs between two comparisons.
        per_layer: Judge each layer by itself, in place of the whole model.
        direction: "either", or "decay", which counts only falls, ``(old - new) / |old|``.
    """

    statistic: str = field(default="critical_sharpness", init=False)
    per_layer: bool = False
