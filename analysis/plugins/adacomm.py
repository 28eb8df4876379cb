"""AdaComm: a period of local steps that follows the training loss. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from regimes.base.config.bounds import Count
from regimes.policies.base import Decision, follow_level, start_level
from regimes.policies.history import PastEpoch, as_history, highest_rate
from regimes.policies.schedules import LONGEST, ROUNDING, Periods


@dataclass(frozen=True)
class AdaComm(Periods):
    """AdaComm (Wang & Joshi, MLSys 2019): a period of ``ceil(base * sqrt(F / F_0))`` with the mean
    training loss F of the last unit and F_0 of the first, so that it shrinks during training.

    The authors' rule for a period that would not shrink (halve it) is left out.

    Attributes:
        base: the first period.
        rates: whether F / F_0 is multiplied by the highest rate so far over the next unit's. The
            authors' is the first rate, which is the highest without a warm-up.
    """

    reads_loss: ClassVar[bool] = True
    base: Count = 16
    rates: bool = True
    needs: tuple[str, ...] = field(default=(), init=False)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return start_level(str(self.base), layers)
        last = history[-1].model.get("train_loss")
        first = as_history(history).accumulate("first loss", lambda: None, _first_loss)
        if first is None or last is None:  # a record without losses
            return follow_level(history[-1].levels[0], None, history)
        ratio, rate, peak = max(last / first, 0.0), history[-1].next_lr, highest_rate(history)
        if self.rates and rate < peak:
            ratio *= peak / rate if rate > 0 else float(LONGEST)
        steps = math.ceil(self.base * math.sqrt(ratio) * (1 - ROUNDING))
        level = str(min(LONGEST, max(1, steps)))
        return follow_level(level, {"rule": "loss", "old": first, "new": last}, history)


def _first_loss(loss: float | None, epochs: Sequence[PastEpoch]) -> float | None:
    return loss or next((x for past in epochs if (x := past.model.get("train_loss"))), None)
