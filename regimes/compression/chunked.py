"""TopK in blocks with values of few bits: the exchange of SparseLoCo (Sarfi, Thérien, Lidin &
Belilovsky, 2025, arXiv 2508.15706).

The level is K, the percentage of each block's coordinates that each worker sends. Differences with
the authors' code: the mean is over all workers, theirs over those that sent a coordinate; indices
have 16 bits, theirs 64 in the exchange and 12 in the paper's count; their bins of values are of
equal width in standard deviations, ours in magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from regimes.base.config import Bounds, Level
from regimes.base.errors import require
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Traffic
from regimes.compression.bucket import Bucket
from regimes.compression.codes import pack_codes, unpack_codes
from regimes.compression.kernels import cache_tensors
from regimes.compression.sparse import Sparsifier, num_kept, scatter_sum, topk_of_rows

# the largest is that whose square, the size of a block, an int16 can index
Chunk = Annotated[int, Bounds("a whole number from 1 to 181", low=1, high=181)]


@dataclass(frozen=True, kw_only=True)
class ChunkedTopK(Sparsifier):
    """Lets each worker send the K % largest coordinates of each block of a matrix, with their
    places in the block: the exchange of SparseLoCo. The level is K.

    Attributes:
        error_feedback: The share of the residual that each step keeps.
        chunk: The largest number of rows and columns of a block. Blocks divide the matrix evenly.
        bits: The number of bits of a value: its sign and the bin of its magnitude. The means of the
            bins travel in a table for each worker and layer. 32 sends the values as they are.
    """

    error_feedback: bool | float = 0.95
    chunk: Chunk = 64
    bits: Literal[2, 4, 8, 32] = 2
    one_level: ClassVar[bool] = False
    replayable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in (2, 4, 8, 32), "compressor.bits", self.bits, "2, 4, 8 or 32")

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        hosted, workers = len(bucket.deltas[0]), comm.world.workers
        chosen = [
            self._choose(delta, level)
            for delta, level in zip(bucket.deltas, bucket.levels, strict=True)
        ]
        found = [value for _, value in chosen]
        values, own = self._gather_values(found, comm)
        indices = comm.gather([index.short().view(hosted, -1) for index, _ in chosen])
        places = [
            self._in_matrix(index.long(), delta)
            for index, delta in zip(indices, bucket.deltas, strict=True)
        ]
        shapes = [delta.shape[1:] for delta in bucket.deltas]
        each = zip(places, values, shapes, bucket.states, strict=True)
        updates = scatter_sum([(place, x, 1 / workers, *rest) for place, x, *rest in each])
        if bucket.feedback:  # which takes out what was sent; all else stays as it is
            for i, (flat, delta) in enumerate(zip(bucket.flat, bucket.deltas, strict=True)):
                mine = places[i]
                if hosted < workers:
                    mine = self._in_matrix(chosen[i][0].view(hosted, -1), delta)
                flat.scatter_(1, mine, flat.gather(1, mine).sub_(own[i]))
        return updates

    def _block(self, delta: Tensor) -> tuple[int, int]:
        """The rows and columns of a matrix's blocks."""
        h, w = (largest_divisor(side, self.chunk) for side in delta.shape[1:])
        return h, w

    def _choose(
        self, delta: Float[Tensor, "hosted n m"], level: Level
    ) -> tuple[Int64[Tensor, "blocks k"], Float[Tensor, "hosted values"]]:
        """The largest coordinates of each block: their places in it, and their values."""
        h, w = self._block(delta)
        blocks = delta.unflatten(2, (-1, w)).unflatten(1, (-1, h)).transpose(2, 3)
        rows = blocks.reshape(-1, h * w)
        index = topk_of_rows(rows, num_kept(level, h * w))
        return index, rows.gather(1, index).view(len(delta), -1)

    def _gather_values(
        self, found: list[Float[Tensor, "hosted _"]], comm: Comm
    ) -> tuple[list[Float[Tensor, "workers _"]], list[Float[Tensor, "hosted _"]]]:
        """All workers' values, and what this process's stand for, which few bits change."""
        if self.bits == 32:
            return comm.gather(found), found
        binned = [in_bins(value, self.bits) for value in found]
        tables = comm.gather([table for _, table in binned])
        packed = [pack_codes(codes.to(torch.uint8), self.bits) for codes, _ in binned]
        values = [
            table.gather(1, unpack_codes(wire, self.bits, value.shape[1]).long())
            for table, wire, value in zip(tables, comm.gather(packed), found, strict=True)
        ]
        return values, [table.gather(1, codes) for codes, table in binned]

    def _in_matrix(
        self, index: Int64[Tensor, "rows k"], delta: Float[Tensor, "hosted n m"]
    ) -> Int64[Tensor, "rows k"]:
        """Places in blocks as places in the matrix."""
        first, offset = _locate_blocks(*delta.shape[1:], *self._block(delta), delta.device)
        return (offset[index].view(len(index), len(first), -1) + first).flatten(1)

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        size = math.prod(largest_divisor(side, self.chunk) for side in layer.matrix)
        k = layer.size // size * num_kept(level, size)
        if self.bits == 32:
            return Traffic(1.5 * k * workers, k * (itemsize + 2))
        codes, means = -(-k * self.bits // 8), 2**self.bits
        return Traffic((means + codes / 4 + k / 2) * workers, means * itemsize + codes + 2 * k)


@cache_tensors(256)
def _locate_blocks(
    n: int, m: int, h: int, w: int, device: torch.device
) -> tuple[Int64[Tensor, "blocks 1"], Int64[Tensor, " size"]]:
    """In a matrix ``[n, m]``: where each block's first number is, and how far behind it are the
    others."""
    rows, columns = np.arange(0, n, h), np.arange(0, m, w)
    first = (m * rows[:, None] + columns).reshape(-1, 1)
    offset = (m * np.arange(h)[:, None] + np.arange(w)).reshape(-1)
    return torch.from_numpy(first).to(device), torch.from_numpy(offset).to(device)


@lru_cache(maxsize=1024)
def largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` that is at most ``most``.

    >>> [largest_divisor(size, 64) for size in (576, 27, 100, 67)]
    [64, 27, 50, 1]
    """
    return next(side for side in range(min(size, most), 0, -1) if size % side == 0)


def in_bins(values: Float[Tensor, "hosted k"], bits: int) -> tuple[Tensor, Tensor]:
    """Round values to codes of ``bits`` bits; return (codes ``[L, k]``, tables ``[L, 2^bits]``). A
    code is the sign and one of ``2^(bits - 1)`` bins of equal width between the smallest and the
    largest magnitude of a row. A table has the mean of each bin's values, and zero for an empty
    bin. Means lose the variance within the bins, so that never more is lost than was there."""
    half = 2 ** (bits - 1)
    magnitude = values.abs()
    least, most = magnitude.aminmax(dim=1, keepdim=True)
    width = (most - least).clamp_min(torch.finfo(values.dtype).tiny)
    bins = ((magnitude - least) / width * half).floor_().clamp_(0, half - 1)
    codes = bins.nan_to_num_().long() + half * (values < 0)
    tables = values.new_zeros(len(values), 2 * half)
    counts = torch.zeros_like(tables)
    for row, code, table, count in zip(values, codes, tables, counts, strict=True):
        table.index_add_(0, code, row)  # row by row: in the order of the coordinates
        count.index_add_(0, code, torch.ones_like(row))
    return codes, tables / counts.clamp_min(1)
