"""AdaQS (Guo et al. 2020; the paper's Figure 7): more accuracy once the signal drowns in noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from regimes.detectors.base import Values, Verdict
from regimes.errors import require


@dataclass(frozen=True)
class MsdrFall:
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

    def verdicts(self, values: Values) -> Iterator[Verdict]:
        """The verdict after each epoch so far."""
        reference: float | None = None
        fallen = False
        for value in values:
            if value is None:
                yield Verdict(None)
                continue
            score, finite = None, math.isfinite(value)
            if finite and reference is not None and reference > 0:
                score = 1 - value / reference
            now = score is not None and score >= self.fall
            fallen = fallen or now
            yield Verdict(now or (self.latch and fallen), reference, value, score, self.fall)
            if now or (score is None and finite):
                reference = value

    def __call__(self, values: Values) -> Verdict:
        return [Verdict(False, threshold=self.fall), *self.verdicts(values)][-1]
