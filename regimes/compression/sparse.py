"""Sparsifiers: TopK (Aji & Heafield, 2017) and Random-K (Stich, Cordonnier & Jaggi, 2018).

The level is K, the percentage of a layer's coordinates that each worker sends, in (0, 100].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from regimes.compression.base import (
    Compressor,
    Gather,
    Layer,
    Mean,
    Sending,
    State,
    Traffic,
    reject,
)
from regimes.config import DENSE, Level
from regimes.seeding import stream


def kept(level: Level, size: int) -> int:
    """How many of ``size`` coordinates K percent are; at least one."""
    return max(1, round(float(level) / 100 * size))


def _check(name: str, level: Level) -> None:
    if level != DENSE and (not isinstance(level, int | float) or not 0 < level <= 100):
        raise reject(name, level, "K, a percentage in (0, 100]")


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Each worker sends its K % largest coordinates in magnitude, with their indices.

    Attributes:
        reduction: "mean" over workers, or "sum", the authors' quirk.
    """

    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise reject("TopK.reduction", self.reduction, '"mean" or "sum"')

    def check(self, level: Level) -> None:
        _check("TopK", level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        index = torch.stack([top_indices(row, kept(level, row.numel())) for row in flat])
        value = flat.gather(1, index.long())
        values = yield Gather(value)  # [W, k]
        indices = (yield Gather(index)).long()
        update = torch.zeros_like(flat[0])
        update.index_add_(0, indices.flatten(), values.flatten())
        if self.reduction == "mean":
            update /= len(values)
        sent = torch.zeros_like(flat).scatter_(1, index.long(), value)
        return update.view(delta.shape[1:]), sent.view(delta.shape)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = kept(level, layer.size)
        return Traffic(2 * k * workers, k * (itemsize + 4))


def top_indices(values: Float[Tensor, " size"], k: int) -> Int32[Tensor, " k"]:
    """Indices of the k largest magnitudes, ascending; ties go to the smaller index."""
    magnitude = values.abs()
    threshold = _kth_largest(magnitude, k)
    above = magnitude > threshold
    missing = k - int(above.sum())
    ties = (magnitude == threshold).nonzero().flatten()[:missing]
    if len(ties) < missing:  # NaN compares with nothing; any k will do, the loop stops for it
        return torch.arange(k, dtype=torch.int32, device=values.device)
    above[ties] = True
    return above.nonzero().flatten().int()


def _kth_largest(magnitude: Tensor, k: int) -> Tensor:
    """numpy's introselect is several times faster than ``torch.topk`` on a CPU."""
    if magnitude.device.type != "cpu":
        return magnitude.kthvalue(magnitude.numel() - k + 1).values
    array = magnitude.numpy()
    at = array.size - k
    return torch.as_tensor(np.partition(array, at)[at])


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """All workers send the same K % random coordinates, drawn anew each step from the shared
    stream, so that no index travels. Without error feedback the update is scaled by size / k,
    which makes it unbiased."""

    linear: ClassVar[bool] = True

    def check(self, level: Level) -> None:
        _check("Random-K", level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        flat = delta.flatten(1)
        size = flat.shape[1]
        chosen = torch.randperm(size, generator=stream(*state.key, "random-k", state.step))
        index = chosen[: kept(level, size)].to(delta.device)
        mean = yield Mean(flat[:, index])
        update = torch.zeros_like(flat[0])
        update[index] = mean if self.error_feedback else mean * (size / len(index))
        sent = torch.zeros_like(flat).index_copy_(1, index, flat[:, index])
        return update.view(delta.shape[1:]), sent.view(delta.shape)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        k = kept(level, layer.size)
        return Traffic(k, k * itemsize)
