"""AdaQS (Guo et al. 2020; the paper's Figure 7): more accuracy once the signal drowns in noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from regimes.detectors.base import Online, Verdict
from regimes.errors import require


class Fall(NamedTuple):
    """What is kept of the values so far.

    Attributes:
        reference: what the next value is compared with.
        fallen: whether any has fallen.
    """

    reference: float | None = None
    fallen: bool = False


@dataclass(frozen=True)
class MsdrFall(Online):
    """Critical when the gradient's mean-to-standard-deviation ratio (MSDR) has fallen by a set
    share since the last reference: ``1 - new / reference >= fall``.

    The first measurement is the first reference; each fall makes the new value the reference.
    AdaQS sends more accurately from a fall on and never takes it back.

    Attributes:
        fall: share of the reference, between 0 and 1.
        latch: stay critical after the first fall, as AdaQS does. False: until the next
            measurement that has not fallen.
    """

    fall: float = 0.5
    latch: bool = True
    statistic: str = "msdr"
    per_layer: bool = False

    def __post_init__(self) -> None:
        require(0 < self.fall < 1, "fall", self.fall, "a share between 0 and 1")

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
