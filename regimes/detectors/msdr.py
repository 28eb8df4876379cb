"""AdaQS (Guo et al. 2020; the paper's Figure 7): more accuracy once the signal drowns in noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regimes.detectors.base import Values, Verdict
from regimes.errors import ConfigError


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

    Raises:
        ConfigError: fall is not between 0 and 1.
    """

    fall: float = 0.5
    latch: bool = True
    statistic: str = "msdr"
    per_layer: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.fall < 1:
            raise ConfigError(f"fall is a share between 0 and 1, got {self.fall}")

    def __call__(self, values: Values) -> Verdict:
        reference: float | None = None
        fallen = False
        verdict = Verdict(False, threshold=self.fall)
        for value in values:
            if value is None:
                continue
            if reference is None or not math.isfinite(value) or reference <= 0:
                verdict = Verdict(self.latch and fallen, reference, value, None, self.fall)
                reference = value if math.isfinite(value) else reference
                continue
            score = 1 - value / reference
            now = score >= self.fall
            fallen = fallen or now
            verdict = Verdict(now or (self.latch and fallen), reference, value, score, self.fall)
            reference = value if now else reference
        return verdict if not values or values[-1] is not None else Verdict(None)
