"""Rows of several parameters as they travel quantised: of what FSDP2 exchanges for one module, each
parameter's numbers end to end.

Blocks begin anew at each parameter, so that none shares a scale with another. Parameters of one
dimension travel as they are, and so does what would be no smaller quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.layers import Piece
from regimes.compression.all_reduce import (
    Added,
    dequantise_rows,
    encode_chunks,
    in_order_sum,
    wire_bytes,
)
from regimes.compression.codes import Rows
from regimes.compression.kernel_layout import PlacedRows, make_layout


class Pieces:
    """Encodes rows as bytes: scales and codes of what is quantised, then the numbers that travel as
    they are.

    Args:
        pieces: of a row.
        bits: of a code.
        block: numbers that share a scale.
        kind: the type in which numbers travel as they are.

    Attributes:
        size: the numbers of a row.
        width: the numbers that are rounded, with the gaps before the next block.
    """

    def __init__(
        self, pieces: Sequence[Piece], bits: int, block: int, kind: torch.dtype = torch.float32
    ) -> None:
        self.bits, self.kind = bits, kind
        exact = torch.promote_types(kind, torch.float32)
        starts = [*accumulate((piece.size for piece in pieces), initial=0)]
        self.size = starts.pop()
        self.rounded: list[slice] = []
        self.kept: list[slice] = []
        for start, piece in zip(starts, pieces, strict=True):
            shrinks = wire_bytes(piece.size, bits, block, exact.itemsize) < (
                piece.size * kind.itemsize
            )
            columns = self.rounded if piece.compressed and shrinks else self.kept
            columns.append(slice(start, start + piece.size))
        sizes = tuple(x.stop - x.start for x in self.rounded)
        self.sent = sum(wire_bytes(size, bits, block, exact.itemsize) for size in sizes)
        self.block = min(block, max(sizes, default=1))  # no gap is wider than a piece
        self.plan = make_layout(sizes, 1, self.block) if sizes else None
        self.width = 0 if self.plan is None else self.plan.width
        self.packed = self.width // self.block * exact.itemsize + self.width * bits // 8
        self.kept_size = sum(x.stop - x.start for x in self.kept)
        self.bytes = self.sent + self.kept_size * kind.itemsize

    def encode(
        self,
        rows: Float[Tensor, "rows size"],
        noise: Added,
        left: Float[Tensor, "rows size"] | None = None,
    ) -> UInt8[Tensor, "rows bytes"]:
        """Encode rows as bytes, ``[rows, bytes]``.

        Args:
            rows: in float32 at least.
            noise: see `all_reduce.quantise_rows`, of ``[rows, width]``.
            left: overwritten with what the bytes lack of the rows; may be ``rows`` itself.
        """
        parts = []
        if left is not None and left is not rows:
            left.copy_(rows)
        if self.plan is not None:
            columns = [rows[:, x] for x in self.rounded]
            source: Rows = PlacedRows(self.plan, columns, rows.dtype)
            values = None
            if left is not None:
                source = values = rows.new_empty(len(rows), self.width)
                self.plan.spread(columns, values[:, None])
            wire = encode_chunks(source, self.bits, self.block, noise, values)
            parts.append(self.plan.without_gaps(wire, self.bits))
            if left is not None and values is not None:
                self.plan.subtract_([left[:, x] for x in self.rounded], values[:, None])
        if self.kept:
            plain = torch.cat([rows[:, x] for x in self.kept], dim=1).to(self.kind)
            parts.append(plain.view(torch.uint8))
            if left is not None:
                for x, numbers in zip(self.kept, self._split_kept(plain), strict=True):
                    left[:, x].sub_(numbers)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def decode(
        self, wire: UInt8[Tensor, "rows bytes"], dtype: torch.dtype
    ) -> Float[Tensor, "rows size"]:
        """Return the numbers that bytes stand for, ``[rows, size]``."""
        rounded = None
        if self.plan is not None:
            whole = self.plan.with_gaps(wire[:, : self.sent], self.bits, self.packed)
            rounded = dequantise_rows(whole, self.bits, self.block, self.width, dtype)
        return self._join(rounded, self._plain(wire).to(dtype))

    def sum(
        self, wire: UInt8[Tensor, "hosted workers bytes"], dtype: torch.dtype
    ) -> Float[Tensor, "hosted size"]:
        """Add what all workers have sent, ``[hosted, size]``; see `all_reduce.in_order_sum`."""
        rounded = None
        if self.plan is not None:
            whole = self.plan.with_gaps(wire[..., : self.sent], self.bits, self.packed)
            rounded = in_order_sum(whole, self.bits, self.block, self.width, dtype)
        plain = self._plain(wire)
        total = plain[:, 0].to(dtype)
        for worker in range(1, plain.shape[1]):
            total = total + plain[:, worker]
        return self._join(rounded, total)

    def _plain(self, wire: UInt8[Tensor, "*rows bytes"]) -> Float[Tensor, "*rows kept"]:
        """What travels as it is."""
        plain = wire.new_empty((*wire.shape[:-1], self.kept_size), dtype=self.kind)  # aligned
        if self.kept_size:
            plain.view(torch.uint8).copy_(wire[..., self.sent :])
        return plain

    def _split_kept(self, plain: Tensor) -> Sequence[Tensor]:
        return plain.split([x.stop - x.start for x in self.kept], dim=1)

    def _join(
        self, rounded: Float[Tensor, "rows width"] | None, plain: Float[Tensor, "rows kept"]
    ) -> Float[Tensor, "rows size"]:
        """Rows in the order of the pieces."""
        if rounded is None and len(self.kept) == 1:
            return plain
        if rounded is not None and not self.kept and self.width == self.size:
            return rounded
        rows = plain.new_empty(len(plain), self.size)
        ours, theirs = [rows[:, x] for x in self.kept], [*self._split_kept(plain)]
        if rounded is not None and self.plan is not None:
            starts = zip(self.plan.starts, self.plan.sizes, strict=True)
            ours += [rows[:, x] for x in self.rounded]
            theirs += [rounded[:, start : start + size] for start, size in starts]
        foreach_copy_(ours, theirs)
        return rows


@lru_cache(maxsize=256)
def make_pieces(
    pieces: tuple[Piece, ...], bits: int, block: int, kind: torch.dtype = torch.float32
) -> Pieces:
    """Make `Pieces`, once."""
    return Pieces(pieces, bits, block, kind)
