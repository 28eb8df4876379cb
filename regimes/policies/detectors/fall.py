"""AdaQS' rule: the mean-to-deviation ratio of the gradient falls by a set share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regimes.base.config import Bounded
from regimes.base.config.bounds import InnerShare
from regimes.policies.detectors.base import Online, Verdict


@dataclass(frozen=True)
class RelativeFall(Bounded, Online):
    """Marks an epoch as critical when the gradient's mean-to-standard-deviation ratio (MSDR) has
    fallen by a set share since the last reference: ``1 - new / reference >= fall`` (AdaQS: Guo et
    al. 2020; the paper's Figure 7).

    The first measurement is the first reference; each fall makes the new value the reference. The
    state is that reference.

    Attributes:
        fall: share of the reference.
    """

    fall: InnerShare = 0.5
    statistic = "msdr"
    per_layer = False

    def begin(self) -> tuple[float | None, Verdict]:
        return None, Verdict(False, threshold=self.fall)

    def update(self, state: float | None, value: float | None) -> tuple[float | None, Verdict]:
        if value is None:
            return state, Verdict(None)
        score, finite = None, math.isfinite(value)
        if finite and state is not None and state > 0:
            score = 1 - value / state
        critical = score is not None and score >= self.fall
        # a finite value without a score: there was no reference yet, or none above 0
        reference = value if critical or (score is None and finite) else state
        return reference, Verdict(critical, state, value, score, self.fall)
