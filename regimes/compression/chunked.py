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

from regimes.collectives.requests import Batched, Gather, Layer, Traffic
from regimes.compression.base import Sending, State
from regimes.compression.codes import pack_codes, unpack_codes
from regimes.compression.kernels import cache_tensors
from regimes.compression.sparse import Sparsifier, in_each, num_kept, scatter_sum
from regimes.config import Bounds, Level
from regimes.errors import require

# the largest is that whose square, the size of a block, an int16 can index
Chunk = Annotated[int, Bounds("a whole number from 1 to 181", low=1, high=181)]


@dataclass(frozen=True, kw_only=True)
class ChunkedTopK(Sparsifier):
    """Each worker sends the K % largest coordinates of each block, with their places in it.

    Attributes:
        error_feedback: SparseLoCo's decay.
        chunk: the largest number of rows and columns of a block, which divide the matrix's.
        bits: of a value: its sign and the bin of its magnitude, with a table of the bins' means for
            each worker and layer; 32 sends the values as they are.
    """

    error_feedback: bool | float = 0.95
    chunk: Chunk = 64
    bits: Literal[2, 4, 8, 32] = 2
    replayable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in (2, 4, 8, 32), "compressor.bits", self.bits, "2, 4, 8 or 32")

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        h, w = (largest_divisor(side, self.chunk) for side in delta.shape[1:])
        blocks = delta.unflatten(2, (-1, w)).unflatten(1, (-1, h)).transpose(2, 3)
        rows, hosted = blocks.reshape(-1, h * w), len(delta)
        index = in_each(rows, num_kept(level, h * w))
        value = rows.gather(1, index).view(hosted, -1)
        if self.bits == 32:
            values, own = (yield Gather(value)), value
        else:
            codes, table = in_bins(value, self.bits)
            own = table.gather(1, codes)
            tables = yield Gather(table)
            wires = yield Gather(pack_codes(codes.to(torch.uint8), self.bits))
            values = tables.gather(1, unpack_codes(wires, self.bits, value.shape[1]).long())
        indices = yield Gather(index.short().view(hosted, -1))
        first, offset = _locate_blocks(*delta.shape[1:], h, w, delta.device)

        def in_matrix(index: Int64[Tensor, "rows k"]) -> Int64[Tensor, "rows k"]:
            return (offset[index].view(len(index), len(first), -1) + first).flatten(1)

        places, shape = in_matrix(indices.long()), delta.shape[1:]
        update = yield Batched(scatter_sum, places, values, 1 / len(values), shape, state)
        if self.error_feedback:  # which takes out what was sent; all else stays as it is
            every, flat = hosted == len(values), delta.flatten(1)
            mine = places if every else in_matrix(index.view(hosted, -1))
            flat.scatter_(1, mine, flat.gather(1, mine).sub_(own))
        return update, None

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
    """The largest divisor of ``size`` up to ``most``.

    >>> [largest_divisor(size, 64) for size in (576, 27, 100, 67)]
    [64, 27, 50, 1]
    """
    return next(side for side in range(min(size, most), 0, -1) if size % side == 0)


def in_bins(values: Float[Tensor, "hosted k"], bits: int) -> tuple[Tensor, Tensor]:
    """(codes ``[L, k]``, tables ``[L, 2^bits]``): a code is the sign and one of ``2^(bits - 1)``
    bins of equal width between the smallest and the largest magnitude of a row; a table has the
    mean of each bin's values, zero if it is empty. Means lose the variance within the bins, so that
    never more is lost than was there."""
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
