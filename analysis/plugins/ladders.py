"""Ladders of levels that the study compares with ACCORDION. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regimes.base.config.bounds import Count, InnerShare, Positive
from regimes.policies.base import Decision, start_level
from regimes.policies.detected import FollowsDetector
from regimes.policies.detectors import NormChange
from regimes.policies.history import PastEpoch
from regimes.policies.ladders import Rungs


@dataclass(frozen=True)
class ErrorLadder(Rungs):
    """Per layer, the highest compression with an error within ``error``.

    Reads ``error:<level>``, the share of the gradient's energy that the compressor would lose at a
    level (instrument ``error``). For the paper's open problem of choosing l_low and l_high
    (section 6, Figure 9).
    """

    error: InnerShare = 0.5
    interval: Count = 1

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(f"error:{level}" for level in self.levels)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return start_level(self.levels[-1], layers)
        last = history[-1]
        if (len(history) - 1) % self.interval:
            return [Decision(level) for level in last.levels]
        return [self._decision(last, i) for i in range(len(layers))]

    def _decision(self, last: PastEpoch, layer: int) -> Decision:
        errors = [last.value(need, layer) for need in self.needs]
        if all(error is None for error in errors):
            return Decision(last.levels[layer])
        within = (i for i, e in enumerate(errors) if e is not None and e <= self.error)
        rung = next(within, len(errors) - 1)
        why = {"rule": "compression error", "new": errors[rung], "threshold": self.error}
        return Decision(self.levels[rung], why)


@dataclass(frozen=True)
class AccordionLadder(Rungs, FollowsDetector):
    """ACCORDION with several levels, per layer: a critical verdict returns a layer to the lowest
    compression, each other evaluation moves it to the next higher one."""

    eta: Positive = 0.5
    interval: Count = 10
    decay_rule: bool = True
    needs: tuple[str, ...] = field(default=("norm",), init=False)

    @cached_property
    def rule(self) -> NormChange:
        return NormChange(self.eta, self.interval)

    def level_for(self, critical: bool, before: str) -> str:
        return self.levels[-1 if critical else max(self.rung(before) - 1, 0)]
