"""Predicted seconds of a step: compute, compression and collectives. No torch.

`regimes.cost.cases` makes a `Work` from a record or a short measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regimes.cost.network import Network, Values, collective_seconds
from regimes.errors import require

BACKWARD = 2 / 3  # of the compute seconds; the backward pass is two of three equal products


@dataclass(frozen=True)
class Work:
    """What one worker does in one step (or the mean over many).

    Attributes:
        compute, compress: seconds.
        calls, bytes: collectives, and one worker's bytes in them, per kind; calls of one kind
            count as equal in size.
        overlaps: may collectives run while gradients are computed? Not with local steps, which
            exchange parameters after a step.
    """

    compute: float
    compress: float
    calls: Mapping[str, float]
    bytes: Mapping[str, float]
    overlaps: bool = True

    def every(self, period: int) -> Work:
        """The mean step of a round of ``period`` local steps, with one exchange."""
        if period == 1:
            return self
        once = self * (1 / period)
        return replace(once, compute=self.compute, overlaps=False)

    def __mul__(self, steps: float) -> Work:
        calls = {kind: steps * n for kind, n in self.calls.items()}
        size = {kind: steps * n for kind, n in self.bytes.items()}
        return Work(steps * self.compute, steps * self.compress, calls, size, self.overlaps)

    def communicate(
        self, network: Network, workers: Values, algorithm: str = "ring", buckets: int = 1
    ) -> Values:
        """Seconds in collectives; those of the gradient are cut into ``buckets``."""
        total: Values = 0.0
        for kind, calls in self.calls.items():
            parts = calls * (1 if kind == "broadcast" else buckets)
            if parts > 0:
                size = self.bytes[kind] / parts
                one = collective_seconds(kind, size, network, workers, algorithm)
                total = total + parts * one
        return total

    def seconds(
        self, network: Network, workers: Values, algorithm: str = "ring", buckets: int = 1
    ) -> Values:
        """Predicted seconds of one step.

        Args:
            buckets: parts in which the gradient is reduced while the backward pass goes on, as
                DistributedDataParallel does; 1 = the collectives wait for the whole gradient. A
                pipeline of two stages and B equal parts takes max + min / B of the stages.
        """
        require(buckets >= 1, "buckets", buckets, "at least 1")
        if not self.overlaps:
            return self.compute + self.compress + self.communicate(network, workers, algorithm)
        first = BACKWARD * self.compute + self.compress
        second = self.communicate(network, workers, algorithm, buckets)
        piped = np.maximum(first, second) + np.minimum(first, second) / buckets
        return (1 - BACKWARD) * self.compute + piped


def mean(works: Iterable[tuple[float, Work]]) -> Work:
    """The mean of (count, step) pairs."""
    pairs = list(works)
    total = sum(weight for weight, _ in pairs)
    parts = [work * (weight / total) for weight, work in pairs]
    kinds = dict.fromkeys(kind for work in parts for kind in work.calls)
    return Work(
        sum(work.compute for work in parts),
        sum(work.compress for work in parts),
        {kind: sum(work.calls.get(kind, 0.0) for work in parts) for kind in kinds},
        {kind: sum(work.bytes.get(kind, 0.0) for work in parts) for kind in kinds},
        all(work.overlaps for work in parts),
    )


def break_even(
    work: Work, dense: Work, latency: float, workers: int, algorithm: str = "ring", buckets: int = 1
) -> float:
    """The bandwidth, bits/s, below which ``work`` is always faster than ``dense``.

    Infinity where it is faster at any bandwidth, zero where at none (searched up to 1e18).
    "Faster" means by more than rounding.
    """

    def gain(bandwidth: Any) -> Any:
        network = Network(bandwidth, latency)
        slow, fast = (w.seconds(network, workers, algorithm, buckets) for w in (dense, work))
        return (1 - 1e-12) * slow - fast

    grid = np.logspace(0, 18, 721)
    loses = np.flatnonzero(gain(grid) <= 0)
    if not loses.size:
        return math.inf
    if loses[0] == 0:
        return 0.0
    from scipy.optimize import brentq

    return float(brentq(gain, *grid[loses[0] - 1 : loses[0] + 1], rtol=1e-14))
