"""The contract of a policy, and what policies share. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Protocol, runtime_checkable

from regimes.base.config import AtLevel, Bounded, Bounds
from regimes.policies.history import PastEpoch, as_history

FLOOR = 100.0  # a slow fall below peak / FLOOR is no decay
Ratio = Annotated[float, Bounds("a number larger than 1", above=1)]


@dataclass(frozen=True)
class Decision:
    """Names a layer's level for the next epoch, and the rule and numbers that chose it.

    Attributes:
        level: The name of the level.
        why: The rule and its numbers. None: the level stays as it was.

    >>> Decision("low", {"rule": "start"})
    Decision(level='low', why={'rule': 'start'})
    """

    level: str
    why: dict[str, Any] | None = None


@runtime_checkable
class Policy(Protocol):
    """Chooses the level of each layer for the next epoch.

    A policy is a frozen dataclass with one pure function, ``decide``, of the past epochs. A record
    holds these epochs, so one object steers a run, resumes it and replays its record. A batch
    policy has one layer, the whole model, and its levels are batch sizes.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the statistics that the policy reads; the loop measures no others."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may ask for, the level of critical regimes first."""
        ...

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return one decision per layer for epoch ``len(history)``."""
        ...


def split_policy(policy: Any) -> tuple[Any, dict[str, AtLevel]]:
    """Split a policy into one whose levels are names, and the compressors that it has had in place
    of these names."""
    if not is_dataclass(policy) or isinstance(policy, type):
        return policy, {}
    words = {
        f.name: f.default
        for f in fields(policy)
        if isinstance(f.default, str) and hasattr(getattr(policy, f.name), "error_feedback")
    }
    compressors = {word: getattr(policy, name) for name, word in words.items()}
    return replace(policy, **words) if words else policy, compressors


def start_level(level: str, layers: Sequence[str]) -> list[Decision]:
    """Return the decisions of the first epoch: one level for all layers."""
    return [Decision(level, {"rule": "start"})] * len(layers)


def follow_level(
    level: str, why: dict[str, Any] | None, history: Sequence[PastEpoch]
) -> list[Decision]:
    """Return one level for all layers after at least one epoch, with the reason where the level
    changes."""
    return [Decision(level, why if before != level else None) for before in history[-1].levels]


@dataclass
class RatesSoFar:
    """Holds what is known of the learning rates so far: the highest of the run, the highest since
    the last decay, and the decays."""

    epochs: int = 0
    peak: float = 0.0
    top: float = 0.0
    decays: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FollowsDecays(Bounded):
    """Is the base of policies that act on a decay of the learning rate.

    A decay is a fall of the rate by a factor of ``step_decay`` or more from one epoch to the next,
    or, however slow, to ``1 / slow_decay`` of the highest rate since the last decay. A slow fall
    below 1/100 of the run's peak is none, because a rate that goes to zero would decay without end.
    A rise never counts. So a step schedule decays at its steps, and a smooth one at a tenth of its
    peak; a schedule that ends at zero also decays in its last one or two epochs, where it halves.

    Attributes:
        step_decay: The factor by which the rate falls from one epoch to the next in a decay.
        slow_decay: The factor by which the rate falls in a slow decay.

    Raises:
        ConfigError: a factor is not larger than 1.
    """

    bounds_prefix = "policy."

    step_decay: Ratio = field(default=2.0, kw_only=True)
    slow_decay: Ratio = field(default=10.0, kw_only=True)

    def decays(self, history: Sequence[PastEpoch]) -> list[tuple[int, float, float]]:
        """Return the decays of the learning rate so far. For each: the number of the first epoch at
        the lower rate, the rate before it, and the lower rate."""
        return list(as_history(history).accumulate(self._add, RatesSoFar, self._add).decays)

    def _add(self, rates: RatesSoFar, epochs: Sequence[PastEpoch]) -> RatesSoFar:
        for past in epochs:
            old, new = past.lr, past.next_lr
            rates.epochs += 1
            rates.peak, rates.top = max(rates.peak, old), max(rates.top, old)
            step = new < old and at_most(new * self.step_decay, old)
            slow = at_most(new * self.slow_decay, rates.top) and at_most(rates.peak, new * FLOOR)
            if step or (slow and new < old):
                rates.decays.append((rates.epochs, old if step else rates.top, new))
                rates.top = new
        return rates

    def just_decayed(self, history: Sequence[PastEpoch]) -> dict[str, Any] | None:
        """Return the reason of a decision, its rule and both rates, if the next epoch is the first
        after a decay. Otherwise return None."""
        last = self.decays(history)[-1:]
        if not last or last[0][0] < len(history):
            return None
        return {"rule": "lr decay", "old": last[0][1], "new": last[0][2]}


def at_most(small: float, large: float) -> bool:
    """Return whether ``small <= large``, up to the rounding of a schedule."""
    return small <= large * (1 + 1e-9)
