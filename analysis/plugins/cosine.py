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
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import Level
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.bucket import Bucket
from regimes.compression.chunked import Chunk, largest_divisor
from regimes.compression.kernels import batch_by_shape, cache_tensors
from regimes.compression.sparse import Sparsifier, num_kept, scatter_sum, topk_of_rows


@dataclass(frozen=True, kw_only=True)
class DCTTopK(Sparsifier):
    """Each worker sends the K % largest DCT coefficients of each block, with their places in it.

    Attributes:
        error_feedback: as DeMo's ``compression_decay``.
        chunk: the largest number of rows and columns of a block, which divide the matrix's.
    """

    error_feedback: bool | float = 0.999
    chunk: Chunk = 64
    one_level: ClassVar[bool] = False
    replayable: ClassVar[bool] = True

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        bases = [self._bases(delta) for delta in bucket.deltas]
        deltas = zip(bucket.deltas, bases, strict=True)
        blocks = encode([(delta, *basis) for delta, basis in deltas])
        hosted, sizes = len(blocks[0]), [len(tall) * len(wide) for tall, wide in bases]
        rows = [block.reshape(-1, size) for block, size in zip(blocks, sizes, strict=True)]
        indices, values = [], []
        for row, size, level in zip(rows, sizes, bucket.levels, strict=True):
            indices.append(topk_of_rows(row, num_kept(level, size)))
            values.append(row.gather(1, indices[-1]))
        received = comm.gather([x.view(hosted, -1) for x in values])  # each [W, blocks * k]
        wheres = comm.gather([index.short().view(hosted, -1) for index in indices])
        entries: list[Any] = []
        for i, (block, state) in enumerate(zip(blocks, bucket.states, strict=True)):
            # the first coefficient of each block
            first = torch.arange(0, block[0].numel(), sizes[i], device=block.device)
            places = wheres[i].long() + first.repeat_interleave(indices[i].shape[1])
            weight = 1 / len(received[i])
            entries.append((places, received[i], weight, block.shape[1:], state))
        means = scatter_sum(entries)
        updates = decode([(mean[None], *basis) for mean, basis in zip(means, bases, strict=True)])
        if bucket.feedback and comm.world.workers == 1:
            bucket.subtract(updates)
        elif bucket.feedback:
            own = [
                torch.zeros_like(row).scatter_(1, index, value).view(block.shape)
                for row, index, value, block in zip(rows, indices, values, blocks, strict=True)
            ]
            each = zip(own, bases, strict=True)
            bucket.subtract(decode([(coefficients, *basis) for coefficients, basis in each]))
        return [update[0] for update in updates]

    def _bases(self, delta: Float[Tensor, "hosted n m"]) -> list[Tensor]:
        """The bases of the rows and of the columns of a matrix's blocks."""
        return [
            dct_basis(largest_divisor(size, self.chunk), delta.dtype, delta.device)
            for size in delta.shape[1:]
        ]

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
