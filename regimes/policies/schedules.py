"""Schedules: levels as a function of the epoch and the learning rate alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from regimes.config import check_windows, in_windows
from regimes.errors import ConfigError, nearest, require
from regimes.policies.base import Decision, FollowsDecays, followed, start
from regimes.policies.history import PastEpoch


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
        layers: windows of single layers by name, in place of those of all.
        inside, outside: levels; the reverse schedule is ``inside="high", outside="dense"``.

    >>> from regimes.policies.history import PastEpoch
    >>> rule, past = Windows(windows=((0, 1), (3, 4))), []
    >>> for epoch in range(5):
    ...     (decision,) = rule.decide(past, ["conv"])
    ...     past.append(PastEpoch(lr=0.1, next_lr=0.1, statistics={}, levels=[decision.level]))
    >>> [epoch.levels[0] for epoch in past]
    ['low', 'high', 'high', 'low', 'high']
    """

    windows: tuple[tuple[int, int], ...] = ()
    layers: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    inside: str = "low"
    outside: str = "high"
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        check_windows("policy.windows", self.windows)
        for name, windows in self.layers.items():
            check_windows(f"policy.layers.{name}", windows)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.inside, self.outside)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        for name in self.layers:
            if name not in layers:
                raise ConfigError(f"policy.layers: no layer {name!r}: {nearest(name, layers)}")
        levels = history[-1].levels if history else [None] * len(layers)
        decisions = []
        for name, before in zip(layers, levels, strict=True):
            within = in_windows(self.layers.get(name, self.windows), len(history))
            level = self.inside if within else self.outside
            why = {"rule": "window" if within else "outside windows"}
            decisions.append(Decision(level, why if level != before else None))
        return decisions


@dataclass(frozen=True)
class Smith(FollowsDecays):
    """Grow the batch where the learning rate would decay (Smith et al. 2017).

    After n decays of the learning rate the batch is that of ``levels[n]``. With the rate scaled by
    the batch and each level ``decay_factor`` times the one before, the rate stays constant; after
    the last level it decays. The authors' "increased initial learning rate" starts at a larger
    rate and batch.
    """

    levels: tuple[str, ...] = ("x1", "x5", "x25")
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.levels) >= 2, "policy.levels", list(self.levels), "two levels or more")

    @property
    def names(self) -> tuple[str, ...]:
        return self.levels

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        level = self.levels[min(len(self.decays(history)), len(self.levels) - 1)]
        if not history:
            return start(level, layers)
        return followed(level, self.just_decayed(history), history)
