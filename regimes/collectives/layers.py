"""What is exchanged and how it is counted: layers, their shards, and traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NO_LAYER = -1  # a layer index for traffic that belongs to no layer, such as the loss
MARKS = -2  # of marks by which processes tell each other which layers they used: never counted


@dataclass(frozen=True)
class Shard:
    """Describes the rows of a layer on one of several processes, divided as ``torch.chunk`` does:
    the last ones may hold fewer, or none.

    Attributes:
        index, count: which of how many.
        rows: of the whole layer.
    """

    index: int
    count: int
    rows: int

    @property
    def chunk(self) -> int:
        """Return the number of rows of the first shard."""
        return -(-self.rows // self.count)

    @property
    def here(self) -> slice:
        """Return which rows of the whole layer this shard has."""
        start = min(self.rows, self.index * self.chunk)
        return slice(start, min(self.rows, start + self.chunk))


class Piece(NamedTuple):
    """Describes what one parameter has in a row of a layer.

    Attributes:
        size: so many numbers.
        compressed: the parameter has several dimensions.
    """

    size: int
    compressed: bool


@dataclass(frozen=True)
class Layer:
    """Names one parameter tensor, for which compressors and policies decide; or what FSDP2
    exchanges for one of its modules.

    >>> Layer("conv", (64, 3, 3, 3)).matrix
    (64, 27)

    Attributes:
        name: The name of the parameter.
        shape: Its shape.
        shard: The rows of the whole layer that ``shape`` describes. None: the layer is whole.
        pieces: For a module of FSDP2, the pieces of its parameters in each row, in their order.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def size(self) -> int:
        """Return how many numbers the layer has."""
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Return the shape of the layer as a matrix, (n, m): its first dimension, and the product
        of all others."""
        return self.shape[0] if self.shape else 1, math.prod(self.shape[1:])

    @property
    def inner(self) -> tuple[int, int] | None:
        """Return the shape of each matrix of a layer that is a stack of matrices, ``[count, n,
        m]``, such as the experts of a mixture; None if the layer is one matrix.

        A convolution over sequences has three dimensions, too. A layer of three dimensions is read
        as a stack or as one matrix: whichever gives low-rank factors with fewer numbers at the same
        rank. So its shape alone decides.
        """
        if len(self.shape) != 3:
            return None
        (count, n, m), rows = self.whole.shape, self.whole.matrix
        return (n, m) if count * (n + m) < sum(rows) else None

    @property
    def row(self) -> tuple[Piece, ...]:
        """Return the pieces of a row; for one parameter this is one piece, the whole row."""
        return self.pieces or (Piece(self.matrix[1], True),)

    @property
    def compressed(self) -> bool:
        """Return whether the layer is compressed. 1-D parameters travel dense (paper, Appendix F),
        and so do those without any number."""
        if self.pieces:
            return any(piece.compressed for piece in self.pieces)
        rows = self.shape[:1] if self.shard is None else (self.shard.rows,)
        return len(self.shape) > 1 and 0 not in (*rows, *self.shape[1:])

    @property
    def whole(self) -> Layer:
        """Return the layer of which this is a shard, or the layer itself."""
        shard = self.shard
        return self if shard is None else Layer(self.name, (shard.rows, *self.shape[1:]))

    def on(self, index: int, count: int) -> Layer:
        """Return the part of this layer on process ``index`` of ``count``: its share of the
        rows."""
        shard = Shard(index, count, self.matrix[0])
        rows = shard.here
        return Layer(self.name, (rows.stop - rows.start, *self.shape[1:]), shard)


@dataclass(frozen=True)
class Traffic:
    """Counts what one step passes to the collectives.

    The two means of PowerSGD at rank 2 on a matrix of 64 x 576, in float32:

    >>> p, q = 2 * 64, 2 * 576
    >>> Traffic(p, 4 * p) + Traffic(q, 4 * q)
    Traffic(floats=1280, bytes=5120)

    Attributes:
        floats: Floats by the paper's convention. A number of the model's type is one float; numbers
            of other types count by their bits, 32 to a float. A mean counts once, and a gather once
            per worker. An exchange counts nothing: it makes one mean together with the gather that
            follows it. A reduce-scatter counts the parts for other workers.
        bytes: The bytes that one worker has for others: the whole tensor of a mean, its own part of
            a gather, and the parts for other workers of an exchange or a reduce-scatter. How often
            they cross its link depends on the algorithm of the collective; between two workers they
            cross it once (``Pattern.copies`` in `regimes.cost.network`).
    """

    floats: float
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.floats + other.floats, self.bytes + other.bytes)
