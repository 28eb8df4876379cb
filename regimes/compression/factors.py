"""Products of gradients with their low-rank factors, layers of equal shape in one go (``batched``).

On a CPU what a step of error feedback and power iteration costs is visits to memory. A matrix that
is larger than a block is therefore taken block by block of its rows: what can be done with a block
is done while the cache has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.batched import by_shape

BLOCK = 2**19  # bytes: half of the second cache of a core, where that is 1 MiB

left = by_shape(lambda q, delta: q.unsqueeze(-3) @ delta.mT)  # [L, r, n]
right = by_shape(lambda p, delta: p.unsqueeze(-3) @ delta)  # [L, r, m]
product = by_shape(lambda p, q: p.mT @ q)  # [n, m]


def length(matrix: Float[Tensor, "*rows n m"], rank: int) -> int:
    """Rows of a block: as many as fit in ``BLOCK`` bytes, evenly shared out; at least one. All of
    them at rank 1, whose products are as fast as memory: there blocks only cost calls."""
    n, m = matrix.shape[-2:]
    if rank == 1:
        return n
    fit = max(1, BLOCK // max(1, m * matrix.element_size()))
    return -(-n // max(1, -(-n // fit)))


def added_and_left(
    entries: Sequence[tuple[Tensor, Tensor, float, Tensor]],
) -> list[Float[Tensor, "hosted r n"]]:
    """For ``(owed [L, n, m], grad [L, n, m], share, q [r, m])``: ``share * owed + grad`` in place
    of ``owed``; the product of that with ``q``. On a CPU."""
    found = []
    for owed, grad, share, q in entries:
        step = length(owed, len(q))
        parts = zip(owed.split(step, 1), grad.split(step, 1), strict=True)
        if step >= owed.shape[1]:
            p = left([(q, _add(owed, grad, share))])[0]
        else:
            p = owed.new_empty(len(owed), owed.shape[1], len(q))
            for (block, fresh), into in zip(parts, p.split(step, 1), strict=True):
                _add(block, fresh, share)
                torch.matmul(block, q.mT, out=into)
            p = p.mT
        found.append(p)
    return found


def product_and_rest(
    entries: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
) -> list[Float[Tensor, "n m"]]:
    """For ``(p [r, n], q [r, m], update [n, m], delta [L, n, m])``: the product of the factors in
    place of ``update``; it is taken out of every row of ``delta``. On a CPU."""
    for p, q, update, delta in entries:
        step = length(update, len(q))
        blocks = zip(p.split(step, 1), update.split(step), delta.split(step, 1), strict=True)
        for some, block, rest in blocks:
            rest.sub_(torch.mm(some.mT, q, out=block))
    return [update for _, _, update, _ in entries]


def _add(owed: Tensor, grad: Tensor, share: float) -> Tensor:
    return (owed if share == 1 else owed.mul_(share)).add_(grad)
