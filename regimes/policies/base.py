"""The contract of a policy: the history of a run in, the next epoch's levels out. No torch.

A policy is a frozen dataclass with one pure function, ``decide``. All it may look at is the list
of past epochs, which is also what the record holds; so the same object steers a live run, resumes
it, and replays over a record. A batch policy is a policy whose only layer is the whole model and
whose levels are batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from regimes.history import PastEpoch


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


def decays(history: Sequence[PastEpoch]) -> int:
    """How often the learning rate has been divided so far."""
    return sum(past.next_lr < past.lr for past in history)
