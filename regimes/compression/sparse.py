"""Sparsifiers: TopK (Aji & Heafield, 2017) and Random-K (Stich, Cordonnier & Jaggi, 2018).

The level is K, the percentage of a layer's coordinates that each worker sends, in (0, 100].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Batched, Gather, Layer, Mean, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.batched import on_gpu, random_rows
from regimes.compression.selection import largest, top_indices
from regimes.compression.state import Workspace
from regimes.config import DENSE, Level
from regimes.errors import require
from regimes.seeding import derive


def num_kept(level: Level, size: int, count: str = "round") -> int:
    """The number of coordinates that K percent of ``size`` are: the nearest, and at least one; or
    truncated ("truncate"), which may be none.

    >>> num_kept(10, 250), num_kept(0.1, 250), num_kept(0.3, 500), num_kept(0.3, 500, "truncate")
    (25, 1, 2, 1)
    >>> num_kept(0.3, 250, "truncate")
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
        count: see `num_kept`; "truncate" is the authors' quirk: a layer of which K percent are less
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
        k = num_kept(level, flat.shape[1], self.count)
        if not k:
            return state.buffer(delta.shape[1:], delta).zero_(), None
        # With error feedback the chosen coordinates are cleared: what remains is the residual.
        index, value = largest(flat, k, clear=bool(self.error_feedback))  # [L, k]
        values = yield Gather(value)  # [W, k]
        indices = yield Gather(index)
        weight = 1 / len(values) if self.reduction == "mean" else 1
        return (yield Batched(scatter_sum, indices, values, weight, delta[0].shape, state)), None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = num_kept(level, layer.size, self.count)
        return Traffic(2 * k * workers, k * (itemsize + 4))


def scatter_sum(
    entries: Sequence[tuple[Tensor, Tensor, float, Sequence[int], Workspace]],
) -> list[Tensor]:
    """For each layer the sum of ``values [W, k]`` at ``indices``, times a weight, in a tensor of a
    shape; on a CPU in the workspace's buffer.

    A GPU adds the numbers of one call in any order. Where workers share a coordinate, processes
    would round differently and replicas drift apart. So there one call adds one worker, whose
    indices are distinct, for all layers.
    """
    if not on_gpu(entries[0][1]):
        sums = []
        for indices, values, weight, shape, workspace in entries:
            total = workspace.buffer(shape, values).zero_()
            total.view(-1).index_add_(0, indices.flatten(), values.flatten(), alpha=weight)
            sums.append(total)
        return sums
    shapes = [entry[3] for entry in entries]
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(accumulate(sizes, initial=0))
    flat = entries[0][1].new_zeros(ends[-1])
    too_wide = ends[-1] > torch.iinfo(torch.int32).max  # for indices that come as int32
    indices_by_layer = [entry[0].long() if too_wide else entry[0] for entry in entries]
    places = torch.cat(torch._foreach_add(indices_by_layer, ends[:-1]), dim=1)
    rows = torch.cat([entry[1] for entry in entries], dim=1)
    for index, row in zip(places, rows, strict=True):
        flat.index_add_(0, index, row, alpha=entries[0][2])
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """All workers send the same K % random coordinates, drawn in each step from a shared stream, so
    that no index travels. Without error feedback the update is scaled by size / k, which makes it
    unbiased."""

    linear: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 10, "high": 1}

    def check(self, level: Level) -> None:
        check_percentage("Random-K", level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        size = flat.shape[1]
        seeds = [derive(*state.key, "random-k", state.step)]
        draws = yield Batched(random_rows, seeds, flat[0])
        index = top_indices(draws[0], num_kept(level, size)).long()
        mean = yield Mean(flat[:, index])
        update = state.buffer(delta.shape[1:], delta).zero_().view(-1)
        update[index] = mean if self.error_feedback else mean * (size / len(index))
        if self.error_feedback:
            flat.index_fill_(1, index, 0)
        return update.view(delta.shape[1:]), None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = num_kept(level, layer.size)
        return Traffic(k, k * itemsize)
