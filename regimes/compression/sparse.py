"""Sparsifiers: TopK (Aji & Heafield, 2017) and Random-K (Stich, Cordonnier & Jaggi, 2018).

The level is K, the percentage of a layer's coordinates that each worker sends, in (0, 100].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Gather, Layer, Mean, Together, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.batched import drawn, launches
from regimes.compression.selection import largest, top_indices
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
        into = delta[0] if launches(delta) else state.update_like(delta[0])
        update = yield Together(summed, indices, values, into, share)
        return update, None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = kept(level, layer.size, self.count)
        return Traffic(2 * k * workers, k * (itemsize + 4))


def summed(entries: Sequence[tuple[Tensor, Tensor, Tensor, float]]) -> list[Tensor]:
    """For many layers, the sum of ``values [W, k]`` at ``indices``, times a share: on a CPU in the
    third tensor, on a GPU in another of its shape.

    Worker after worker. A GPU adds all numbers of a call at once, so that where workers share a
    coordinate each process would round in another order, and replicas drift apart. There a call is
    one worker's, who has each index once, for all layers.
    """
    like = [entry[2] for entry in entries]
    if not launches(like[0]):
        for indices, values, into, share in entries:
            into.zero_().view(-1).index_add_(0, indices.flatten(), values.flatten(), alpha=share)
        return like
    ends = list(accumulate((t.numel() for t in like), initial=0))
    flat = like[0].new_zeros(ends[-1])
    wide = ends[-1] > torch.iinfo(torch.int32).max  # indices may come as int32
    found = [indices.long() if wide else indices for indices, *_ in entries]
    places = torch.cat(torch._foreach_add(found, ends[:-1]), dim=1)
    rows = torch.cat([entry[1] for entry in entries], dim=1)
    for index, row in zip(places, rows, strict=True):
        flat.index_add_(0, index, row, alpha=entries[0][3])
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


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
