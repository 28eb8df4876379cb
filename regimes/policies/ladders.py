"""Policies with more than two levels, from the highest compression to the lowest. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regimes.base.config import Bounded
from regimes.base.config.bounds import InnerShare
from regimes.base.errors import require
from regimes.policies.base import Decision, at_most, follow_level, start_level
from regimes.policies.detected import online_state
from regimes.policies.detectors import RelativeFall
from regimes.policies.history import PastEpoch, highest_rate


@dataclass(frozen=True)
class Rungs(Bounded):
    """Is the base of ladders.

    Attributes:
        levels: Names of levels, from the highest compression to the lowest.
    """

    bounds_prefix = "policy."
    levels: tuple[str, ...] = ("high", "mid", "low")

    def __post_init__(self) -> None:
        super().__post_init__()
        order = "two or more different levels, from the highest compression to the lowest"
        several = 2 <= len(self.levels) == len(set(self.levels))
        require(several, "policy.levels", list(self.levels), order)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the levels that the policy may choose, the lowest compression first."""
        return tuple(reversed(self.levels))

    def rung(self, level: str) -> int:
        """Return the place of a level in ``levels``. The place of the highest compression is 0, and
        so is the place of a level that is not on the ladder."""
        return self.levels.index(level) if level in self.levels else 0


@dataclass(frozen=True)
class AdaQS(Rungs):
    """Lowers the compression of the whole model step by step: AdaQS (Guo et al. 2020; the paper's
    section 5.6 and Figure 7).

    It starts at the highest compression. It watches the mean of the gradient divided by its
    standard deviation ("msdr"). Each time this ratio has fallen by the share ``fall``, the
    compression becomes one level lower, and the ratio at this moment is what the next fall is
    measured from. The compression never rises again.

    Attributes:
        fall: The share by which the ratio must fall, between 0 and 1.
    """

    fall: InnerShare = 0.5
    needs: tuple[str, ...] = field(default=("msdr",), init=False)

    @cached_property
    def rule(self) -> RelativeFall:
        """Return the detector that counts the falls."""
        return RelativeFall(self.fall)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """Return one level for all layers, by the number of falls so far."""
        if not history:
            return start_level(self.levels[0], layers)
        _, last, falls = online_state(history, self.rule, 0)
        why = None if last.critical is None else last.why("msdr fall")
        return [Decision(self.levels[min(falls, len(self.levels) - 1)], why)] * len(layers)


@dataclass(frozen=True)
class RateLadder(Rungs):
    """Sends more while the learning rate is high, and less when it has fallen. It measures nothing.

    At a smaller rate the error of compression moves the weights less. The policy divides the rate
    at which the next epoch begins by the highest such rate so far. (During a warm-up the result is
    1.) The run starts at the last of ``levels``. For each of ``shares`` that lies above the result,
    the level is one nearer to the first; when the rate rises, the level comes back. We propose this
    schedule ourselves (docs/findings.md). ACCORDION's rule for decays does the reverse.

    Attributes:
        shares: Shares of the highest rate, rising, between 0 and 1, one fewer than levels.
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
        """Return one level for all layers, by the learning rate of the next epoch."""
        if not history:
            return start_level(self.levels[-1], layers)
        rate, peak = history[-1].next_lr, highest_rate(history)
        level = self.levels[sum(at_most(share * peak, rate) for share in self.shares)]
        return follow_level(level, {"rule": "rate", "old": peak, "new": rate}, history)
