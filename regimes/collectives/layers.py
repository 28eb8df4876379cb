"""What is exchanged and how it is counted: layers, their shards, and traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NO_LAYER = -1  # a layer index for traffic that belongs to no layer, such as the loss
MARKS = -2  # of what processes tell each other of their passes: counted nowhere, as objects are


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
        shard: The shard that ``shape`` describes. None: the layer is whole.
        pieces: For a module, what each row has of its parameters, in their order.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Return (n, m): the first dimension, and the product of all others."""
        return self.shape[0] if self.shape else 1, math.prod(self.shape[1:])

    @property
    def inner(self) -> tuple[int, int] | None:
        """Return the shape of each matrix of a layer that is a stack of matrices, ``[count, n,
        m]``, such as the experts of a mixture; None if the layer is one matrix.

        A convolution over sequences has three dimensions, too. Of both readings a layer has the one
        whose factors have fewer numbers at a rank: its shape decides, and the largest rank of
        neither.
        """
        if len(self.shape) != 3:
            return None
        (count, n, m), rows = self.whole.shape, self.whole.matrix
        return (n, m) if count * (n + m) < sum(rows) else None

    @property
    def row(self) -> tuple[Piece, ...]:
        """Return the pieces of a row."""
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
        """Return this layer's part on one of ``count`` processes."""
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
        floats: Floats by the paper's convention, in elements of the model's dtype; other dtypes
            count by their bits, 32 to a float. A mean counts once, and a gather once per worker. An
            exchange counts nothing, because with the gather of what it adds up it is one mean. A
            reduce-scatter counts the parts for other workers.
        bytes: The bytes that one worker has for others: the tensor of a mean, its part of a gather,
            and of an exchange or a reduce-scatter the parts for other workers. How often they cross
            its link depends on the algorithm of the collective (`regimes.cost.network`,
            ``Pattern.copies``); between two workers it is once.
    """

    floats: float
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.floats + other.floats, self.bytes + other.bytes)
