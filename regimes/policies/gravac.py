"""Compression for the whole model by gain and throughput: GraVAC's search. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from regimes.config import DENSE
from regimes.errors import require
from regimes.policies.base import Decision
from regimes.policies.history import PastEpoch, as_history, cost
from regimes.policies.ladders import Rungs


@dataclass
class Gains:
    """Of one level: the latest, smoothed, and what it was after each epoch."""

    smooth: float | None = None
    after: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class GraVAC(Rungs):
    """GraVAC (Tyagi & Swany, IEEE CLOUD 2023), for the whole model.

    The gain of a level is the share of the gradient's norm that gets through, summed over layers
    and smoothed over epochs. The search begins at the lowest compression and climbs by one level
    every ``interval`` epochs, until the two best products of throughput and gain so far differ by
    less than ``tolerance`` (see ``stopping``), or no level is left; then the best one stays. An
    epoch is sent at the level thus found if its gain is ``gain`` or more, else at the lowest
    compression if that one's is, else dense.

    Differences with the authors: they smooth by steps (0.05, windows of 25 steps) and count error
    feedback into the gain; here it is the mean gradient's, from the instrument ``error`` and the
    norm over an epoch, and a level keeps sqrt(1 - error) of a layer's norm, as projections and
    TopK do. They divide the difference of the two best products by the second best, and the more
    compressed of the two stays: ``stopping = "authors"``. It is not the default, because recorded
    tournaments were decided by the other rule.

    Attributes:
        levels: from the highest compression to the lowest.
        seconds: of a step by level, as measured or as ``regimes cost`` predicts for a network;
            none: throughput goes by the bytes of a step alone.
        smoothing: the weight of the latest epoch in the gain.
        stopping: "best" divides the difference of the two best products by the best, which stays;
            "authors" divides it by the second best, and the more compressed of the two stays.
    """

    gain: float = 0.75
    tolerance: float = 0.05
    interval: int = 1
    smoothing: float = 0.5
    seconds: dict[str, float] = field(default_factory=dict)
    stopping: Literal["best", "authors"] = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.gain <= 1, "policy.gain", self.gain, "a share above 0, up to 1")
        require(0 <= self.tolerance < 1, "policy.tolerance", self.tolerance, "a share below 1")
        require(self.interval >= 1, "policy.interval", self.interval, "at least 1 epoch")
        require(0 < self.smoothing <= 1, "policy.smoothing", self.smoothing, "a share above 0")
        if self.seconds:
            good = self.seconds.keys() == set(self.levels) and all(
                0 < value < math.inf for value in self.seconds.values()
            )
            require(good, "policy.seconds", self.seconds, "a positive number for each level")

    @property
    def names(self) -> tuple[str, ...]:
        return (DENSE, *reversed(self.levels))

    @property
    def needs(self) -> tuple[str, ...]:
        return ("norm", *(f"error:{level}" for level in self.levels))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return [Decision(self.levels[-1], {"rule": "start"})] * len(layers)
        history = as_history(history)
        gains = {level: self._gains(history, level) for level in self.levels}
        sought = self._sought(history, gains)
        level = next((x for x in (sought, self.levels[-1]) if gains[x][-1] >= self.gain), DENSE)
        why = {"rule": "gain", "new": gains[sought][-1], "threshold": self.gain, "level": sought}
        return [Decision(level, why)] * len(layers)

    def _gains(self, history: Sequence[PastEpoch], level: str) -> list[float]:
        """Smoothed, after each epoch; 0 until there was a measurement."""

        def extend(gains: Gains, epochs: Sequence[PastEpoch]) -> Gains:
            for past in epochs:
                now, share, before = _gain(past, f"error:{level}"), self.smoothing, gains.smooth
                if now is not None:
                    gains.smooth = now if before is None else (1 - share) * before + share * now
                gains.after.append(gains.smooth or 0.0)
            return gains

        return as_history(history).accumulate((self._gains, level), Gains, extend).after

    def _sought(self, history: Sequence[PastEpoch], gains: dict[str, list[float]]) -> str:
        """The level that the search tries in the epoch to come, or has ended at."""
        climbed = self.levels[::-1]  # the lowest compression first
        values: list[float] = []
        for tried, level in enumerate(climbed, start=1):
            last = tried * self.interval - 1  # the epoch at whose end it is judged
            if last >= len(history):
                return level
            values.append(self._throughput(history[last], level) * gains[level][last])
            best, *rest = sorted(range(tried), key=lambda i: -values[i])
            if rest and self._alike(values[best], values[rest[0]]):
                return climbed[max(best, rest[0]) if self.stopping == "authors" else best]
        return climbed[values.index(max(values))]

    def _alike(self, best: float, second: float) -> bool:
        return best - second < self.tolerance * (second if self.stopping == "authors" else best)

    def _throughput(self, past: PastEpoch, level: str) -> float:
        """Of any unit: only ratios count."""
        if self.seconds:
            return 1 / self.seconds[level]
        return 1 / cost(past, level).bytes


def _gain(past: PastEpoch, name: str) -> float | None:
    """The share of the gradient's norm that a level lets through; None where not measured."""
    norms, errors = past.statistics.get("norm", []), past.statistics.get(name, [])
    known = [
        (norm, error)
        for norm, error in zip(norms, errors, strict=False)
        if norm is not None and error is not None
    ]
    whole = sum(norm for norm, _ in known)
    if not whole:
        return None
    return sum(norm * math.sqrt(max(1 - error, 0.0)) for norm, error in known) / whole
