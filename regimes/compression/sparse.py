"""Sparsifiers: TopK (Aji & Heafield, 2017) and Random-K (Stich, Cordonnier & Jaggi, 2018).

The level is K, the percentage of a layer's coordinates that each worker sends, in (0, 100].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Gather, Layer, Mean, Together, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.batched import drawn
from regimes.compression.top_k import largest, top_indices
from regimes.config import DENSE, Level
from regimes.errors import require
from regimes.seeding import derive


def kept(level: Level, size: int, count: str = "round") -> int:
    """How many of ``size`` coordinates K percent are: to the nearest, and at least one, or cut off
    ("truncate"), which may be none.

    >>> kept(10, 250), kept(0.1, 250), kept(0.3, 500), kept(0.3, 500, "truncate")
    (25, 1, 2, 1)
    >>> kept(0.3, 250, "truncate")
    0
    """
    exact = float(level) / 100 * size
    return int(exact) if count == "truncate" else max(1, round(exact))


def check_percentage(name: str, level: Level) -> None:
    """Raise ConfigError unless the level is K, or "dense"."""
    good = level == DENSE or (isinstance(level, int | float) and 0 < level <= 100)
    require(good, f"level of {name}", level, 'K, a percentage in (0, 100], or "dense"')


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Each worker sends its K % largest coordinates in magnitude, with their indices.

    Attributes:
        reduction: "mean" over workers, or "sum", the authors' quirk.
        count: see `kept`; "truncate" is the authors' quirk: a layer of which K percent are less
            than one coordinate sends nothing, and without error feedback it never changes.
    """

    reduction: str = "mean"
    count: str = "round"
    usual: ClassVar[Mapping[str, Level]] = {"low": 10, "high": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.reduction in ("mean", "sum")
        require(good, "compressor.reduction", self.reduction, '"mean" or "sum"')
        good = self.count in ("round", "truncate")
        require(good, "compressor.count", self.count, '"round" or "truncate"')

    def check(self, level: Level) -> None:
        check_percentage("TopK", level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        k = kept(level, flat.shape[1], self.count)
        if not k:
            return state.update_like(delta[0]).zero_(), None
        index, value = largest(flat, k, clear=bool(self.error_feedback))
        values = yield Gather(value)  # [W, k]
        indices = yield Gather(index)
        share = 1 / len(values) if self.reduction == "mean" else 1
        update = state.update_like(delta[0]).zero_().view(-1)
        add_at(update, indices, values, share)
        return update.view(delta.shape[1:]), None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = kept(level, layer.size, self.count)
        return Traffic(2 * k * workers, k * (itemsize + 4))


def add_at(update: Tensor, indices: Tensor, values: Tensor, share: float) -> Tensor:
    """Add the rows of ``values`` in worker order, times ``share``, to ``update``.

    One call for all rows does that on a CPU. A GPU adds all numbers of a call at once, so that
    where workers share a coordinate each process would round in another order, and replicas drift
    apart. There every row is a call: a worker has each index once.
    """
    if update.device.type == "cpu":
        return update.index_add_(0, indices.flatten(), values.flatten(), alpha=share)
    for index, value in zip(indices, values, strict=True):
        update.index_add_(0, index, value, alpha=share)
    return update


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """All workers send the same K % random coordinates, drawn anew each step from the shared
    stream, so that no index travels. Without error feedback the update is scaled by size / k,
    which makes it unbiased."""

    linear: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 10, "high": 1}

    def check(self, level: Level) -> None:
        check_percentage("Random-K", level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        size = flat.shape[1]
        seeds = [derive(*state.key, "random-k", state.step)]
        draws = yield Together(drawn, seeds, flat[0])
        index = top_indices(draws[0], kept(level, size)).long()
        mean = yield Mean(flat[:, index])
        update = state.update_like(delta[0]).zero_().view(-1)
        update[index] = mean if self.error_feedback else mean * (size / len(index))
        if self.error_feedback:
            flat.index_fill_(1, index, 0)
        return update.view(delta.shape[1:]), None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = kept(level, layer.size)
        return Traffic(k, k * itemsize)
