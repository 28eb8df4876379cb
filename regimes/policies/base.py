"""Policies: the history of a run in, the next epoch's levels out. No torch.

A policy is a frozen dataclass with one pure function, ``decide``. All it may look at is the list
of past epochs, which is also what the record holds; so the same object steers a live run, resumes
it, and replays over a record.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from regimes.config import DENSE, plug_in
from regimes.detectors import Detector, NormChange, Verdict, detector
from regimes.errors import ConfigError
from regimes.history import PastEpoch, history, signal_values

__all__ = [
    "Accordion", "Decision", "Detected", "PastEpoch", "Policy", "Static", "Windows",
    "check_levels", "history", "policy",
]  # fmt: skip

REGISTRY = {
    "static": "regimes.policies:Static",
    "windows": "regimes.policies:Windows",
    "accordion": "regimes.policies:Accordion",
    "detected": "regimes.policies:Detected",
}


@dataclass(frozen=True)
class Decision:
    """A layer's level for the next epoch and why: the rule and its numbers, or None when the
    level was merely kept."""

    level: str
    why: dict[str, Any] | None = None


@runtime_checkable
class Policy(Protocol):
    """See the module's docstring."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The statistics it reads; the loop measures no others."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The levels it may ask for, that of critical regimes first."""
        ...

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """One decision per layer for epoch ``len(history)``."""
        ...


@dataclass(frozen=True)
class Static:
    """One level throughout."""

    level: str = "low"
    needs: tuple[str, ...] = field(default=(), init=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.level,)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        why = None if history else {"rule": "static"}
        return [Decision(self.level, why)] * len(layers)


@dataclass(frozen=True)
class Windows:
    """One level in given epochs, another outside (paper, section 4.1).

    Attributes:
        windows: pairs ``[first, stop)`` of epochs, e.g. ``[[0, 6], [12, 14]]``.
        inside, outside: levels; the reverse schedule is ``inside="high", outside="dense"``.
    """

    windows: tuple[tuple[int, int], ...] = ()
    inside: str = "low"
    outside: str = "high"
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        for first, stop in self.windows:
            if not 0 <= first < stop:
                raise ConfigError(
                    f"policy.windows: [{first}, {stop}] is no window; "
                    "expected [first, stop) with 0 <= first < stop"
                )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.inside, self.outside)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        epoch = len(history)
        within = any(first <= epoch < stop for first, stop in self.windows)
        level = self.inside if within else self.outside
        changed = not history or (history[-1].levels and history[-1].levels[0] != level)
        why = {"rule": "window" if within else "outside windows"} if changed else None
        return [Decision(level, why)] * len(layers)


@dataclass(frozen=True)
class Detected:
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
        if history and self.decay_rule and history[-1].next_lr < history[-1].lr:
            why = {"rule": "lr decay", "old": history[-1].lr, "new": history[-1].next_lr}
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
        why = {
            "rule": words,
            "old": verdict.old,
            "new": verdict.new,
            "ratio": verdict.score,
            "threshold": verdict.threshold,
        }
        return Decision(self.low if verdict.critical else self.high, why)


@dataclass(frozen=True)
class Accordion:
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
        self.detector  # noqa: B018  (checks eta and interval)

    @property
    def detector(self) -> NormChange:
        return NormChange(self.eta, self.interval)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.low, self.high)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        rule = Detected(self.detector, self.decay_rule, self.low, self.high)
        return rule.decide(history, layers)


def policy(table: dict[str, Any]) -> Policy:
    """The policy that a configuration table names; ConfigError if it is none."""
    return plug_in("policy", table, REGISTRY)


def check_levels(chosen: Policy, levels: dict[str, Any]) -> None:
    """Raise ConfigError when a policy asks for a level that the run does not define."""
    for name in chosen.names:
        if name != DENSE and name not in levels:
            known = ", ".join([*levels, DENSE])
            raise ConfigError(
                f"the policy asks for level {name!r}, but [levels] defines only {known}: "
                f"add levels.{name}"
            )
