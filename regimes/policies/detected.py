"""Policies that follow a detector of critical regimes, such as ACCORDION. No torch.

``FollowsDetector`` has the common rule; a policy adds the detector and the levels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from regimes.config.bounds import Count, Positive
from regimes.detectors import Detector, NormChange, Verdict, detector
from regimes.detectors.statistics import Statistic
from regimes.errors import unexpected
from regimes.policies.base import Decision, FollowsDecays
from regimes.policies.history import PastEpoch, as_history
from regimes.policies.signals import current_verdict


class FollowsDetector(FollowsDecays):
    """The first of ``names`` from a decay of the learning rate until the next verdict; else
    ``level_for`` of the verdict on a layer. Without an opinion a layer's level stays."""

    decay_rule: bool

    @property
    def names(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def rule(self) -> Detector:
        raise NotImplementedError

    def level_for(self, critical: bool, before: str) -> str:
        """A layer's level after a verdict."""
        return self.names[0] if critical else self.names[-1]

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        history = as_history(history)
        if self.decay_rule and (why := self.just_decayed(history)):
            return [Decision(self.names[0], why)] * len(layers)
        if self.rule.per_layer:
            verdicts = [current_verdict(history, self.rule, i) for i in range(len(layers))]
        else:
            verdicts = [current_verdict(history, self.rule, 0)] * len(layers)
        return [self._decision(history, i, verdict) for i, verdict in enumerate(verdicts)]

    def _decision(self, history: Sequence[PastEpoch], layer: int, verdict: Verdict) -> Decision:
        if not history:
            return Decision(self.names[-(verdict.critical is False)], {"rule": "start"})
        before = history[-1].levels[layer]
        if verdict.critical is None:
            return Decision(before)
        why = verdict.why(in_words(type(self.rule).__name__))
        return Decision(self.level_for(verdict.critical, before), why)


@lru_cache
def in_words(name: str) -> str:
    """``NormChange`` as "norm change"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


@dataclass(frozen=True)
class Detected(FollowsDetector):
    """Low compression where a detector says critical, high elsewhere.

    Attributes:
        detector: a table like ``{name = "eigenvalue-change", eta = 0.5}``, or the object.
        decay_rule: low, too, from each decay of the learning rate until the next verdict.
    """

    detector: Any = field(default_factory=lambda: {"name": "norm-change"})
    decay_rule: bool = False
    low: str = "low"
    high: str = "high"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule  # noqa: B018  (checks the table)

    @cached_property
    def rule(self) -> Detector:
        if isinstance(self.detector, dict):
            return detector(self.detector, "policy.detector")
        if isinstance(self.detector, Detector):
            return self.detector
        raise unexpected("policy.detector", self.detector, "a table with a name")

    @property
    def needs(self) -> tuple[str, ...]:
        text = self.rule.statistic
        return () if text is None else (Statistic.parse(text).name,)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.low, self.high)


@dataclass(frozen=True)
class Accordion(FollowsDetector):
    """ACCORDION for compression, per layer (paper, algorithm 1).

    Low compression while the gradient norm changes by ``eta`` or more over ``interval`` epochs,
    and, with ``decay_rule``, from each decay of the learning rate until the next evaluation.
    Starts low (the authors' code).
    """

    eta: Positive = 0.5
    interval: Count = 10
    decay_rule: bool = True
    low: str = "low"
    high: str = "high"
    needs: tuple[str, ...] = field(default=("norm",), init=False)

    @cached_property
    def rule(self) -> NormChange:
        return NormChange(self.eta, self.interval)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.low, self.high)


@dataclass(frozen=True)
class BatchAccordion(Accordion):
    """ACCORDION for the batch size: small (``low``) batches in critical regimes (section 4.2).

    Attributes:
        grow_only: a large batch stays to the end ("for training stability", Appendix A).
    """

    grow_only: bool = True

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        decided = super().decide(history, layers)
        if not (self.grow_only and history):
            return decided
        return [
            Decision(self.high, {**(now.why or {}), "rule": "grow only"})
            if (before, now.level) == (self.high, self.low)
            else now
            for before, now in zip(history[-1].levels, decided, strict=True)
        ]
