"""Products of gradients with their low-rank factors, layers of equal shape in one go (``batched``).

What a step of error feedback and power iteration costs on a CPU is visits to memory, and which
kernel a layout gets: a product whose first dimension is a rank of two to four, the columns of a
factor, is several times slower than the same with the rank last. So factors lie in rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.batched import by_shape

BLOCK = 2**20  # bytes: the second cache of a core, or half of it

left = by_shape(lambda q, delta: q.unsqueeze(-3) @ delta.mT)  # [L, r, n]
right = by_shape(lambda p, delta: p.unsqueeze(-3) @ delta)  # [L, r, m]
product = by_shape(lambda p, q: p.mT @ q)  # [n, m]


def add_and_left(
    owed: Float[Tensor, "hosted n m"],
    grad: Float[Tensor, "hosted n m"],
    share: float,
    q: Float[Tensor, "r m"],
) -> Float[Tensor, "hosted r n"]:
    """``share * owed + grad`` in place of ``owed``; the product of that with ``q``. On a CPU, where
    one layer after the other finds its sum in a cache."""
    delta = (owed if share == 1 else owed.mul_(share)).add_(grad)
    return q.unsqueeze(-3) @ delta.mT


def product_and_rest(
    p: Float[Tensor, "r n"],
    q: Float[Tensor, "r m"],
    update: Float[Tensor, "n m"],
    delta: Float[Tensor, "hosted n m"],
) -> None:
    """The product of the factors in place of ``update``; it is taken out of every row of ``delta``.
    On a CPU.

    Above rank 1 in blocks of rows: some kernels write over a product several times, which is cheap
    while a cache has it. At rank 1 no kernel does, and blocks only cost calls.
    """
    step = rows_of_a_block(update) if len(p) > 1 else len(update)
    if step >= len(update):
        delta.sub_(torch.mm(p.mT, q, out=update))
        return
    blocks = zip(p.split(step, 1), update.split(step), delta.split(step, 1), strict=True)
    for some, block, rest in blocks:
        rest.sub_(torch.mm(some.mT, q, out=block))


def rows_of_a_block(matrix: Float[Tensor, "n m"]) -> int:
    """As many as fit in ``BLOCK`` bytes, evenly shared out; at least one."""
    n, m = matrix.shape
    fit = max(1, BLOCK // max(1, m * matrix.element_size()))
    return -(-n // max(1, -(-n // fit)))
