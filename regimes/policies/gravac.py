"""GraVAC: one level for the whole model, by gain and throughput. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from regimes.config import DENSE, Bounds
from regimes.config.bounds import Count
from regimes.errors import require
from regimes.policies.base import Decision, start
from regimes.policies.history import PastEpoch, as_history, cost
from regimes.policies.ladders import Rungs

Gains = list[float | None]  # of a level, smoothed, after each epoch; None before a measurement
ShareAboveZero = Annotated[float, Bounds("a share above 0, up to 1", above=0, high=1)]


@dataclass(frozen=True)
class GraVAC(Rungs):
    """GraVAC (Tyagi & Swany, IEEE CLOUD 2023), for the whole model.

    The gain of a level is the share of the gradient's norm that it sends, summed over layers and
    smoothed over epochs. The search starts at the lowest compression and tries the next level every
    ``interval`` epochs, until the two best products of throughput and gain differ by less than
    ``tolerance`` (see ``stopping``), or no level is left; then the best level stays. An epoch uses
    the level of the search if its gain is at least ``gain``, else the lowest compression if its
    gain is, else dense.

    Differences with the authors: they smooth by steps (0.05, windows of 25 steps) and include error
    feedback in the gain. Here the gain is the mean gradient's, from the instrument ``error`` and
    the norm over an epoch: a level sends sqrt(1 - error) of a layer's norm, as projections and TopK
    do. Recorded tournaments used "best", so the authors' ``stopping`` is not the default.

    Attributes:
        levels: from the highest compression to the lowest.
        seconds: of a step by level, as measured or as ``regimes cost`` predicts for a network;
            without them throughput is one over the bytes of a step.
        smoothing: the weight of the latest epoch in the gain.
        stopping: "best" divides the difference of the two best products by the best, which stays;
            "authors" divides it by the second best, and the more compressed of the two stays.
    """

    gain: ShareAboveZero = 0.75
    tolerance: Annotated[float, Bounds("a share below 1", low=0, below=1)] = 0.05
    interval: Count = 1
    smoothing: ShareAboveZero = 0.5
    seconds: dict[str, float] = field(default_factory=dict)
    stopping: Literal["best", "authors"] = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
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
            return start(self.levels[-1], layers)
        history = as_history(history)
        gains = {level: self._gains(history, level) for level in self.levels}
        tried = self._search(history, gains)
        last = {level: values[-1] or 0.0 for level, values in gains.items()}
        level = next((x for x in (tried, self.levels[-1]) if last[x] >= self.gain), DENSE)
        why = {"rule": "gain", "new": last[tried], "threshold": self.gain, "level": tried}
        return [Decision(level, why)] * len(layers)

    def _gains(self, history: Sequence[PastEpoch], level: str) -> Gains:
        def extend(gains: Gains, epochs: Sequence[PastEpoch]) -> Gains:
            for past in epochs:
                now, share = _gain(past, f"error:{level}"), self.smoothing
                before = gains[-1] if gains else None
                if now is not None and before is not None:
                    now = (1 - share) * before + share * now
                gains.append(before if now is None else now)
            return gains

        return as_history(history).accumulate((self._gains, level), list, extend)

    def _search(self, history: Sequence[PastEpoch], gains: dict[str, Gains]) -> str:
        """The level that the search tries in the next epoch, or ended at."""
        order, authors = self.levels[::-1], self.stopping == "authors"
        products: list[float] = []
        for tried, level in enumerate(order, start=1):
            last = tried * self.interval - 1  # the last epoch of the level's trial
            if last >= len(history):
                return level
            gain = gains[level][last] or 0.0
            products.append(self._throughput(history[last], level) * gain)
            best, *rest = sorted(range(tried), key=lambda i: -products[i])
            if rest:
                high, second = products[best], products[rest[0]]
                if high - second < self.tolerance * (second if authors else high):
                    return order[max(best, rest[0]) if authors else best]
        return order[products.index(max(products))]

    def _throughput(self, past: PastEpoch, level: str) -> float:
        """In any unit, because only ratios count."""
        return 1 / (self.seconds[level] if self.seconds else cost(past, level).bytes)


def _gain(past: PastEpoch, name: str) -> float | None:
    """The share of the gradient's norm that a level sends; None where not measured."""
    norms, errors = past.statistics.get("norm", []), past.statistics.get(name, [])
    known = [
        (norm, error)
        for norm, error in zip(norms, errors, strict=False)
        if norm is not None and error is not None
    ]
    total = sum(norm for norm, _ in known)
    if not total:
        return None
    return sum(norm * math.sqrt(max(1 - error, 0.0)) for norm, error in known) / total
