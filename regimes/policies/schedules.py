"""Policies of the epoch and the learning rate alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from regimes.base.config import Bounded, LevelName, check_windows, in_windows, level_name
from regimes.base.config.bounds import Count, Positive
from regimes.base.errors import ConfigError, require, suggest_nearest
from regimes.policies.base import Decision, FollowsDecays, follow_level, start_level
from regimes.policies.history import PastEpoch

LONGEST = 10**9  # steps of a period; at a rate of zero the formula is infinite
ROUNDING = 1e-9  # share of a period: rounding of one that is whole neither adds nor takes a step


@dataclass(frozen=True)
class Static:
    """Uses one level throughout.

    >>> Static("high").decide([], ["conv"])
    [Decision(level='high', why={'rule': 'static'})]

    Attributes:
        level: The name of the level.
    """

    level: str = "low"
    needs: tuple[str, ...] = field(default=(), init=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may choose: ``level`` alone."""
        return (self.level,)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return ``level`` for each layer, with a reason in the first epoch."""
        why = None if history else {"rule": "static"}
        return [Decision(self.level, why)] * len(layers)


@dataclass(frozen=True)
class Windows:
    """Uses one level in given epochs and another outside (the paper's section 4.1).

    >>> from regimes.policies.history import PastEpoch
    >>> rule, past = Windows(windows=((0, 1), (3, 4))), []
    >>> for epoch in range(5):
    ...     (decision,) = rule.decide(past, ["conv"])
    ...     past.append(PastEpoch(lr=0.1, next_lr=0.1, statistics={}, levels=[decision.level]))
    >>> [epoch.levels[0] for epoch in past]
    ['low', 'high', 'high', 'low', 'high']

    Attributes:
        windows: Pairs ``[first, stop)`` of epochs, such as ``[[0, 6], [12, 14]]``.
        layers: Windows of single layers by name, in place of ``windows``.
        inside: The level in the windows. In a script it may also be a compressor at this level.
        outside: The level elsewhere. The paper's reverse schedule has ``inside="high"`` and
            ``outside="dense"``.
    """

    windows: tuple[tuple[int, int], ...] = ()
    layers: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    inside: LevelName = "low"
    outside: LevelName = "high"
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        check_windows("policy.windows", self.windows)
        for name, windows in self.layers.items():
            check_windows(f"policy.layers.{name}", windows)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may choose: inside windows, and outside."""
        return (level_name(self.inside, "low"), level_name(self.outside, "high"))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the level of each layer for epoch ``len(history)``.

        Raises:
            ConfigError: a name in ``policy.layers`` is not among ``layers``.
        """
        for name in self.layers:
            if name not in layers:
                raise ConfigError(
                    f"policy.layers: no layer {name!r}: {suggest_nearest(name, layers)}"
                )
        levels = history[-1].levels if history else [None] * len(layers)
        inside, outside = self.names
        decisions = []
        for name, before in zip(layers, levels, strict=True):
            within = in_windows(self.layers.get(name, self.windows), len(history))
            level = inside if within else outside
            why = {"rule": "window" if within else "outside windows"}
            decisions.append(Decision(level, why if level != before else None))
        return decisions


@dataclass(frozen=True)
class Smith(FollowsDecays):
    """Grows the batch where the learning rate would decay (Smith et al. 2017).

    After n decays of the learning rate the batch is ``levels[n]``. If the rate is scaled by the
    batch, and each level is ``decay_factor`` times the one before, the rate stays constant; after
    the last level it decays. The authors' "increased initial learning rate" starts at a larger rate
    and batch.

    Attributes:
        levels: Names of batch sizes, the smallest first.
    """

    levels: tuple[str, ...] = ("x1", "x5", "x25")
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.levels) >= 2, "policy.levels", list(self.levels), "two levels or more")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may choose: ``levels``."""
        return self.levels

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the batch of the next epoch, ``levels[n]`` after n decays, for each layer."""
        level = self.levels[min(len(self.decays(history)), len(self.levels) - 1)]
        if not history:
            return start_level(level, layers)
        return follow_level(level, self.just_decayed(history), history)


# -- periods of local steps, for ``sync_policy`` ----------------------------------------------
# The whole model is the only layer, and a level is a period: the number of steps that a worker
# takes alone, named in ``sync_levels`` or the number itself. The published rules disagree:
# post-local SGD and QSR synchronise more seldom late in training, AdaComm (the study's) more often.


def period_of(level: str, words: Mapping[str, int]) -> int:
    """Return the steps of a level: a name in ``words``, which is ``sync_levels``, or a number.
    Raise ConfigError for anything else.

    >>> period_of("high", {"low": 1, "high": 32}), period_of("8", {})
    (32, 8)
    """
    if level not in words:
        expected = f"one of {', '.join(words) or 'no words'} (sync_levels), or a number of steps"
        good = level.isdecimal() and int(level) >= 1
        require(good, "the sync_policy's level", level, expected)
        return int(level)
    return words[level]


def in_words(table: Mapping[str, Any], words: Mapping[str, int]) -> str:
    """Say when workers synchronise, from a configuration's ``sync_policy`` and ``sync_levels``.

    >>> in_words({"name": "static", "level": "8"}, {}), in_words({"name": "qsr"}, {})
    ('every 8 steps', 'by qsr')
    >>> in_words({"name": "windows"}, {"low": 1, "high": 32})
    'by windows (low = 1, high = 32)'
    """
    level = table.get("level", "low")
    if table["name"] == "static":
        return f"every {words.get(level, level)} steps"
    known = ", ".join(f"{name} = {steps}" for name, steps in words.items())
    return f"by {table['name']}" + (f" ({known})" if known else "")


@dataclass(frozen=True)
class PostLocal(FollowsDecays):
    """Uses one period until the first decay of the learning rate and another from then on:
    post-local SGD (Lin et al., "Don't use large mini-batches, use local SGD", 2020).

    Attributes:
        before: The period until the first decay: a name in ``sync_levels``, or a number of steps.
        after: The period from the first decay on, likewise.
    """

    bounds_prefix = "sync_policy."

    before: str = "low"
    after: str = "high"
    needs: tuple[str, ...] = field(default=(), init=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may choose: ``before`` and ``after``."""
        return (self.before, self.after)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the period of the next unit, for each layer."""
        level = self.after if self.decays(history) else self.before
        if not history:
            return start_level(level, layers)
        return follow_level(level, self.just_decayed(history), history)


class Periods(Bounded):
    """Is the base of rules that compute a period instead of choosing among names.

    Attributes:
        reads_loss: decides by the mean training loss of a unit, ``PastEpoch.model["train_loss"]``,
            which a user's own loop has to report. Any policy of the period may have it.
    """

    bounds_prefix = "sync_policy."
    reads_loss: ClassVar[bool] = False
    base: int

    @property
    def names(self) -> tuple[str, ...]:
        """Return the one level that is known before training, the shortest period. Others are
        computed."""
        return (str(self.base),)


@dataclass(frozen=True)
class QSR(Periods):
    """Computes the period by the quadratic synchronisation rule (Gu et al., ICLR 2024). The period
    is ``max(base, floor((alpha / lr)^2))`` steps, with the learning rate of the next unit.

    While the rate rises the period is ``base``. The authors use the period of the first step after
    the warm-up, which a rule that knows only the past cannot do.

    Attributes:
        alpha: A number in units of the rate. The period grows at rates below ``alpha /
            sqrt(base)``.
        base: The shortest period, in steps.
    """

    alpha: Positive
    base: Count = 4
    needs: tuple[str, ...] = field(default=(), init=False)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return the period of the next unit, in steps, as the level of each layer."""
        if not history:
            return start_level(str(self.base), layers)
        rate, period = history[-1].next_lr, self.base
        if rate <= history[-1].lr:
            longest = self.alpha >= rate * math.sqrt(LONGEST)  # also at a rate of zero
            square = LONGEST if longest else (self.alpha / rate) ** 2 * (1 + ROUNDING)
            period = max(period, math.floor(square))
        return follow_level(str(period), {"rule": "rate", "new": rate}, history)
