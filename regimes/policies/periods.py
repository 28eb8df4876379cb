"""Policies for the period of local steps: how many a worker takes alone. No torch.

They are for ``sync_policy``, where the whole model is the only layer and a level is a period, by
its name in ``sync_levels`` or as the number itself. The three published rules contradict each
other: synchronise always and rarely late (post-local SGD, QSR), or rarely early and often late
(AdaComm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regimes.errors import require
from regimes.policies.base import Decision, FollowsDecays
from regimes.policies.history import PastEpoch, as_history

LONGEST = 10**9  # steps; a rate of zero asks for no end


def period_of(level: str, words: Mapping[str, int]) -> int:
    """The steps that a level stands for: one of the ``words`` of ``sync_levels``, or a number.

    >>> period_of("high", {"low": 1, "high": 32}), period_of("8", {})
    (32, 8)

    Raises:
        ConfigError: neither.
    """
    if level not in words:
        expected = f"one of {', '.join(words) or 'no words'} (sync_levels), or a number of steps"
        good = level.isdecimal() and int(level) >= 1
        require(good, "the sync_policy's level", level, expected)
        return int(level)
    return words[level]


def in_words(table: Mapping[str, Any], words: Mapping[str, int]) -> str:
    """When workers synchronise, from a configuration's ``sync_policy`` and ``sync_levels``.

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
    """Post-local SGD (Lin et al., "Don't use large mini-batches, use local SGD", 2020): ``before``
    until the learning rate decays for the first time, ``after`` from there on."""

    before: str = "low"
    after: str = "high"
    needs: tuple[str, ...] = field(default=(), init=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.before, self.after)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        decayed = bool(self.decays(history))
        why = {"rule": "start"} if not history else None
        if decayed and history[-1].levels[0] != self.after:
            why = self.just_decayed(history)
        return [Decision(self.after if decayed else self.before, why)] * len(layers)


class Periods:
    """Base of rules that compute a period in place of choosing among names."""

    base: int

    @property
    def names(self) -> tuple[str, ...]:
        return (str(self.base),)

    def check_base(self) -> None:
        require(self.base >= 1, "sync_policy.base", self.base, "at least 1 step")


@dataclass(frozen=True)
class QSR(Periods):
    """The quadratic synchronisation rule (Gu et al., ICLR 2024, section 2): a period of ``max(base,
    floor((alpha / lr)^2))`` at the learning rate of the unit to come.

    While the rate still rises the period is ``base``; they take that of the first step after the
    warm-up, which a rule that sees the past alone cannot know.

    Attributes:
        alpha: of the rate's own size: below a rate of ``alpha / sqrt(base)`` the period grows.
    """

    alpha: float
    base: int = 4
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.check_base()
        require(self.alpha > 0, "sync_policy.alpha", self.alpha, "a positive number")

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return [Decision(str(self.base), {"rule": "start"})] * len(layers)
        rate, before = history[-1].next_lr, history[-1].levels[0]
        rises = rate > history[-1].lr
        level = str(self.base if rises else self._period(rate))
        why = {"rule": "rate", "new": rate} if level != before else None
        return [Decision(level, why)] * len(layers)

    def _period(self, rate: float) -> int:
        if self.alpha >= rate * math.sqrt(LONGEST):  # a rate of zero, too
            return LONGEST
        return max(self.base, math.floor((self.alpha / rate) ** 2))


@dataclass(frozen=True)
class AdaComm(Periods):
    """AdaComm (Wang & Joshi, MLSys 2019): a period of ``ceil(base * sqrt(F / F_0))`` with the mean
    training loss F of the last unit and F_0 of the first, so that it shrinks as training goes on.

    Their rule for a period that would not shrink (to halve it) is left out.

    Attributes:
        base: the first period.
        rates: whether F / F_0 is multiplied by the first unit's rate over the next one's, as they
            do where the rate is not constant.
    """

    base: int = 16
    rates: bool = True
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.check_base()

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return [Decision(str(self.base), {"rule": "start"})] * len(layers)
        before, last = history[-1].levels[0], history[-1].model.get("train_loss")
        first = as_history(history).accumulate("first loss", lambda: None, _first_loss)
        if first is None or last is None:  # a record without losses
            return [Decision(before)] * len(layers)
        share = max(last / first, 0.0)
        if self.rates:
            share *= _ratio(history[0].lr, history[-1].next_lr)
        level = str(min(LONGEST, max(1, math.ceil(self.base * math.sqrt(share) - 1e-9))))
        why = {"rule": "loss", "old": first, "new": last} if level != before else None
        return [Decision(level, why)] * len(layers)


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float(LONGEST)


def _first_loss(found: float | None, epochs: Sequence[PastEpoch]) -> float | None:
    """Of the first epoch that has one."""
    return found or next((x for past in epochs if (x := past.model.get("train_loss"))), None)
