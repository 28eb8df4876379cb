"""Chunked DCT with TopK (DeMo: Peng, Quesnelle & Kingma, 2024, arXiv 2411.19870): a few cosines of
each block of a matrix.

The level is K, the percentage of each block's coefficients that each worker sends, in (0, 100]; 32
of 64 x 64, DeMo's default, are 0.78 %. Differences with the authors' code: a gradient is not scaled
by the learning rate; the mean is over all workers, theirs over those that sent a coefficient; the
sign is taken by the optimiser; indices have 16 bits, theirs 64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Batched, Gather, Layer, Traffic
from regimes.compression.base import Sending, State
from regimes.compression.chunked import Chunk, largest_divisor
from regimes.compression.kernels import batch_by_shape, cache_tensors
from regimes.compression.sparse import Sparsifier, in_each, num_kept, scatter_sum
from regimes.config import Level


@dataclass(frozen=True, kw_only=True)
class DCTTopK(Sparsifier):
    """Each worker sends the K % largest DCT coefficients of each block, with their places in it.

    Attributes:
        error_feedback: as DeMo's ``compression_decay``.
        chunk: the largest number of rows and columns of a block, which divide the matrix's.
    """

    error_feedback: bool | float = 0.999
    chunk: Chunk = 64
    replayable: ClassVar[bool] = True

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        bases = [
            dct_basis(largest_divisor(size, self.chunk), delta.dtype, delta.device)
            for size in delta.shape[1:]
        ]
        blocks = yield Batched(encode, delta, *bases)
        hosted, size = len(delta), len(bases[0]) * len(bases[1])
        rows = blocks.reshape(-1, size)
        index = in_each(rows, num_kept(level, size))
        value = rows.gather(1, index)
        values = yield Gather(value.view(hosted, -1))  # [W, blocks * k]
        indices = yield Gather(index.short().view(hosted, -1))
        first = torch.arange(0, blocks[0].numel(), size, device=delta.device)  # of each block
        places = indices.long() + first.repeat_interleave(index.shape[1])
        weight, shape = 1 / len(values), blocks.shape[1:]
        mean = yield Batched(scatter_sum, places, values, weight, shape, state)
        update = yield Batched(decode, mean[None], *bases)
        sent = None
        if self.error_feedback and len(values) == 1:
            sent = update
        elif self.error_feedback:
            own = torch.zeros_like(rows).scatter_(1, index, value).view(blocks.shape)
            sent = yield Batched(decode, own, *bases)
        return update[0], sent

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        size = math.prod(largest_divisor(side, self.chunk) for side in layer.matrix)
        k = layer.size // size * num_kept(level, size)
        return Traffic(1.5 * k * workers, k * (itemsize + 2))


@cache_tensors(256)
def dct_basis(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "size size"]:
    """The orthonormal DCT-II: row k is a cosine of k half waves."""
    at = torch.arange(size, dtype=torch.float64)
    cosines = torch.cos(math.pi / size * at[:, None] * (at + 0.5)) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.to(dtype).to(device)


def _transform_blocks(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``[..., n, m]`` to the coefficients of its blocks, ``[..., y, x, h, w]``; the bases have the
    leading axes of a batch of layers, but not the axis of workers."""
    tall = rows[..., None, None, :, :] @ matrix.unflatten(-2, (-1, rows.shape[-1]))
    return _in_one(tall.unflatten(-1, (-1, columns.shape[-1])), columns.mT).transpose(-3, -2)


def _invert_blocks(blocks: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The inverse."""
    wide = _in_one(blocks.transpose(-3, -2), columns)
    return (rows.mT[..., None, None, :, :] @ wide.flatten(-2)).flatten(-3, -2)


def _in_one(pieces: Float[Tensor, "... w"], by: Float[Tensor, "*layers w w"]) -> Tensor:
    """``pieces @ by``, one product for each layer."""
    return (pieces.reshape(*by.shape[:-2], -1, by.shape[-1]) @ by).view(pieces.shape)


encode, decode = batch_by_shape(_transform_blocks), batch_by_shape(_invert_blocks)
