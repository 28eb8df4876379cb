"""Policies with more than two levels. No torch.

``levels`` go from the highest compression to the lowest: rungs, climbed to send more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regimes.detectors import MsdrFall, NormChange
from regimes.errors import require
from regimes.policies.base import Decision, at_most
from regimes.policies.detected import FollowsDetector
from regimes.policies.history import PastEpoch, as_history
from regimes.policies.signals import said


@dataclass(frozen=True)
class Rungs:
    """What the ladders share: an order of levels, checked."""

    levels: tuple[str, ...] = ("high", "mid", "low")

    def __post_init__(self) -> None:
        order = "two or more different levels, from the highest compression to the lowest"
        several = 2 <= len(self.levels) == len(set(self.levels))
        require(several, "policy.levels", list(self.levels), order)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reversed(self.levels))

    def rung(self, level: str) -> int:
        """Position of a level; the lowest rung for one that is not on the ladder."""
        return self.levels.index(level) if level in self.levels else 0


@dataclass(frozen=True)
class AdaQS(Rungs):
    """AdaQS (Guo et al. 2020; the paper's section 5.6 and Figure 7), for the whole model.

    Starts at the highest compression; whenever the mean-to-standard-deviation ratio of the
    gradient has fallen by ``fall`` since the last reference, one rung up ("the compression is
    halved"), never back.
    """

    fall: float = 0.5
    needs: tuple[str, ...] = field(default=("msdr",), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule  # noqa: B018  (checks fall)

    @cached_property
    def rule(self) -> MsdrFall:
        return MsdrFall(self.fall, latch=False)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return [Decision(self.levels[0], {"rule": "start"})] * len(layers)
        _, last, falls = said(history, self.rule, 0)
        why = None if last.critical is None else last.why("msdr fall")
        return [Decision(self.levels[min(falls, len(self.levels) - 1)], why)] * len(layers)


@dataclass(frozen=True)
class ErrorLadder(Rungs):
    """Per layer, the highest compression whose error stays within ``error``.

    Reads ``error:<level>``, the share of the gradient's energy that the compressor would lose at a
    level (instrument ``error``). For the paper's open problem of choosing l_low and l_high
    (section 6, Figure 9).
    """

    error: float = 0.5
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.error < 1, "policy.error", self.error, "a number between 0 and 1")
        require(self.interval >= 1, "policy.interval", self.interval, "at least 1 epoch")

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(f"error:{level}" for level in self.levels)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return [Decision(self.levels[-1], {"rule": "start"})] * len(layers)
        last = history[-1]
        if (len(history) - 1) % self.interval:
            return [Decision(level) for level in last.levels]
        return [self._decision(last, i) for i in range(len(layers))]

    def _decision(self, last: PastEpoch, layer: int) -> Decision:
        found = [last.statistics.get(need, [None] * (layer + 1))[layer] for need in self.needs]
        if all(error is None for error in found):
            return Decision(last.levels[layer])
        errors = [math.inf if error is None else error for error in found]
        rung = next((i for i, e in enumerate(errors) if e <= self.error), len(errors) - 1)
        why = {"rule": "compression error", "new": found[rung], "threshold": self.error}
        return Decision(self.levels[rung], why)


@dataclass(frozen=True)
class AccordionLadder(Rungs, FollowsDetector):
    """ACCORDION over a ladder, per layer: a critical verdict goes back to the lowest compression,
    every other evaluation one rung down to higher compression. Only the ends are chosen by hand;
    a layer that becomes critical at a high compression does not stay there.
    """

    eta: float = 0.5
    interval: int = 10
    decay_rule: bool = True
    needs: tuple[str, ...] = field(default=("norm",), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        FollowsDetector.__post_init__(self)
        self.rule  # noqa: B018  (checks eta and interval)

    @cached_property
    def rule(self) -> NormChange:
        return NormChange(self.eta, self.interval)

    def level_for(self, critical: bool, before: str) -> str:
        return self.levels[-1 if critical else max(self.rung(before) - 1, 0)]


@dataclass(frozen=True)
class RateLadder(Rungs):
    """Sends more while the learning rate is high, and less when it has fallen; nothing is measured.

    What a step at a smaller rate loses by compression moves the weights less. So a level follows
    the rate that the next epoch begins with, at the present batch size, as a share of the highest
    that an epoch has begun with so far; a warm-up counts as high. The last of ``levels`` from the
    start on, the one before it below the last of ``shares``, and so on; a rate that rises again
    gets its level back. Proposed here (docs/findings.md); ACCORDION's rule for decays does the
    reverse.

    Attributes:
        shares: one fewer than levels, rising; below ``shares[0]`` of the highest rate it is the
            first level.

    Raises:
        ConfigError: they are not that many, do not rise, or do not lie between 0 and 1.
    """

    shares: tuple[float, ...] = (0.15, 0.5)
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = list(self.shares)
        rising = all(a < b for a, b in itertools.pairwise([0.0, *given, 1.0]))
        expected = f"{len(self.levels) - 1} rising shares between 0 and 1, one fewer than levels"
        require(rising and len(given) == len(self.levels) - 1, "policy.shares", given, expected)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return [Decision(self.levels[-1], {"rule": "start"})] * len(layers)
        last = history[-1]
        peak = as_history(history).accumulate("highest rate", lambda: -math.inf, _highest)
        level = self.levels[sum(at_most(share * peak, last.next_lr) for share in self.shares)]
        why = {"rule": "rate", "old": peak, "new": last.next_lr}
        return [Decision(level, why if before != level else None) for before in last.levels]


def _highest(peak: float, epochs: Sequence[PastEpoch]) -> float:
    return max(peak, *(rate for past in epochs for rate in (past.lr, past.next_lr)))
