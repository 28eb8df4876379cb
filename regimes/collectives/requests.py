"""What a compressor asks of the other workers, and how it is counted.

A program is a generator that yields ``Mean``, ``Gather`` or ``Exchange`` requests, receives their
results, and returns a tensor. It never calls a collective; ``World.drive`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

NO_LAYER = -1  # a layer index for traffic that belongs to no layer, such as the loss


@dataclass(frozen=True)
class Layer:
    """One named parameter tensor: the unit at which compressors and policies decide."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """(n, m): the first dimension against all others."""
        return self.shape[0], self.size // self.shape[0]

    @property
    def compressed(self) -> bool:
        """1-D parameters travel dense (paper, Appendix F)."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Mean:
    """Ask for the mean over all W workers: ``[L, ...] -> [...]``."""

    tensor: Tensor


@dataclass(frozen=True)
class Gather:
    """Ask for every worker's tensor, in worker order: ``[L, ...] -> [W, ...]``."""

    tensor: Tensor


@dataclass(frozen=True)
class Exchange:
    """Ask for the parts that all workers have for each hosted one, an all-to-all: ``[L, W, ...]``,
    of which part w is for worker w, to ``[L, W, ...]``, of which part w is from worker w."""

    tensor: Tensor


class Batched:
    """Ask for ``kernel([arguments])[0]``, work of this process: nothing travels. On a GPU the
    requests of all programs for one kernel share a call, in which each has an entry of the list."""

    def __init__(
        self, kernel: Callable[[Sequence[tuple[Any, ...]]], Sequence[Any]], *arguments: Any
    ) -> None:
        self.kernel, self.arguments = kernel, arguments


@dataclass(frozen=True)
class Traffic:
    """What one step hands to the collectives.

    Attributes:
        floats: the paper's convention, in elements of the model's dtype (other dtypes count by
            their bits, 32 to a float): a mean counts once, a gather once per worker. An exchange
            counts nothing: with the gather of what it adds up it is one mean.
        bytes: what one worker sends.

    The two means of PowerSGD at rank 2 on a matrix of 64 x 576, in float32:

    >>> p, q = 2 * 64, 2 * 576
    >>> Traffic(p, 4 * p) + Traffic(q, 4 * q)
    Traffic(floats=1280, bytes=5120)
    """

    floats: float
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.floats + other.floats, self.bytes + other.bytes)


Collected = Mean | Gather | Exchange
Request = Collected | Batched
Program = Generator[Request, Any, Tensor]
