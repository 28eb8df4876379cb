"""Policies that follow a detector of critical regimes, ACCORDION first among them. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regimes.detectors import Detector, NormChange, Verdict, detector
from regimes.errors import ConfigError
from regimes.history import PastEpoch, signal_values
from regimes.policies.base import Decision, FollowsDecays


@dataclass(frozen=True)
class Detected(FollowsDecays):
    """Low compression where a detector says critical, high elsewhere.

    Attributes:
        detector: a table like ``{name = "eigenvalue-change", eta = 0.5}``, or the object.
        decay_rule: low, too, from each decay of the learning rate until the next verdict.

    Raises:
        ConfigError: the table names no detector, or has bad fields.
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
        raise ConfigError(f"policy.detector must be a table with a name, got {self.detector!r}")

    @property
    def needs(self) -> tuple[str, ...]:
        statistic = self.rule.statistic
        return () if statistic is None else (statistic.removesuffix("*lr"),)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.low, self.high)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if self.decay_rule and (why := self.just_decayed(history)):
            return [Decision(self.low, why)] * len(layers)
        one = [] if self.rule.per_layer else [self.rule(signal_values(history, self.rule, 0))]
        verdicts = one * len(layers) or [
            self.rule(signal_values(history, self.rule, i)) for i in range(len(layers))
        ]
        return [self._decision(history, i, verdict) for i, verdict in enumerate(verdicts)]

    def _decision(self, history: Sequence[PastEpoch], layer: int, verdict: Verdict) -> Decision:
        if not history:
            return Decision(self.high if verdict.critical is False else self.low, {"rule": "start"})
        if verdict.critical is None:
            return Decision(history[-1].levels[layer])
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self.rule).__name__).lower()
        return Decision(self.low if verdict.critical else self.high, verdict.why(words))


@dataclass(frozen=True)
class Accordion(FollowsDecays):
    """ACCORDION for compression, per layer (paper, algorithm 1).

    Low compression while the gradient norm changes by ``eta`` or more over ``interval`` epochs,
    and, with ``decay_rule``, from each decay of the learning rate until the next evaluation.
    Starts low (the authors' code).
    """

    eta: float = 0.5
    interval: int = 10
    decay_rule: bool = True
    low: str = "low"
    high: str = "high"
    needs: tuple[str, ...] = field(default=("norm",), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.detector  # noqa: B018  (checks eta and interval)

    @property
    def detector(self) -> NormChange:
        return NormChange(self.eta, self.interval)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.low, self.high)

    @cached_property
    def _rule(self) -> Detected:
        factors = {"step_decay": self.step_decay, "slow_decay": self.slow_decay}
        return Detected(self.detector, self.decay_rule, self.low, self.high, **factors)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        return self._rule.decide(history, layers)


@dataclass(frozen=True)
class BatchAccordion(Accordion):
    """ACCORDION for the batch size: small (``low``) batches in critical regimes (section 4.2).

    Attributes:
        grow_only: a large batch is kept to the end ("for training stability", Appendix A).
    """

    grow_only: bool = True

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        found = super().decide(history, layers)
        if not (self.grow_only and history):
            return found
        return [
            Decision(self.high, {**(now.why or {}), "rule": "grow only"})
            if (before, now.level) == (self.high, self.low)
            else now
            for before, now in zip(history[-1].levels, found, strict=True)
        ]
