"""Products of gradients with their low-rank factors: the kernels of PowerSGD and ACP-SGD.

Factors lie in rows, ``P [r, n]`` and ``Q [r, m]``. On a CPU a product whose *last* dimension is a
rank of two to four is several times slower than one whose first is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.batched import batch_by_shape, on_gpu, sub_
from regimes.compression.state import Workspace

BLOCK = 2**20  # bytes: the second cache of a core, or half of it

left_product = batch_by_shape(lambda q, delta: q.unsqueeze(-3) @ delta.mT)  # [L, r, n]
right_product = batch_by_shape(lambda p, delta: p.unsqueeze(-3) @ delta)  # [L, r, m]
_product = batch_by_shape(lambda p, q: p.mT @ q)


def reconstruct(entries: Sequence[tuple[Tensor, Tensor, Workspace]]) -> list[Tensor]:
    """``P Q^T``, ``[n, m]``; on a CPU in the workspace's buffer."""
    if on_gpu(entries[0][0]):
        return _product([(p, q) for p, q, _ in entries])
    return [
        torch.mm(p.mT, q, out=workspace.buffer((p.shape[1], q.shape[1]), q))
        for p, q, workspace in entries
    ]


def subtract_product_(entries: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """``delta -= P Q^T`` in place, with factors of each worker: ``[L, r, n]``, ``[L, r, m]``."""
    if on_gpu(entries[0][0]):
        products = _product([(p, q) for p, q, _ in entries])
        return sub_([(e[2], product) for e, product in zip(entries, products, strict=True)])
    return [delta.baddbmm_(p.mT, q, alpha=-1) for p, q, delta in entries]


def reconstruct_and_subtract_(
    entries: Sequence[tuple[Tensor, Tensor, Workspace, Tensor]],
) -> list[Tensor]:
    """`reconstruct`; the product is subtracted from each worker's row of ``delta``, in place."""
    if on_gpu(entries[0][0]):
        updates = reconstruct([entry[:3] for entry in entries])
        sub_([(e[3], update) for e, update in zip(entries, updates, strict=True)])
        return updates
    return [_block_by_block(p, q, workspace, delta) for p, q, workspace, delta in entries]


def _block_by_block(
    p: Float[Tensor, "r n"],
    q: Float[Tensor, "r m"],
    workspace: Workspace,
    delta: Float[Tensor, "hosted n m"],
) -> Float[Tensor, "n m"]:
    """Above rank 1 in blocks of rows: some kernels write over a product several times, which is
    cheap while it is in a cache. At rank 1 no kernel does, and blocks only cost calls."""
    update = workspace.buffer(delta.shape[1:], delta)
    step = rows_per_block(update) if len(p) > 1 else len(update)
    if step >= len(update):
        delta.sub_(torch.mm(p.mT, q, out=update))
        return update
    blocks = zip(p.split(step, 1), update.split(step), delta.split(step, 1), strict=True)
    for p_block, update_block, delta_block in blocks:
        delta_block.sub_(torch.mm(p_block.mT, q, out=update_block))
    return update


def rows_per_block(matrix: Float[Tensor, "n m"]) -> int:
    """As many as fit in ``BLOCK`` bytes, shared out evenly; at least one."""
    n, m = matrix.shape
    fit = max(1, BLOCK // max(1, m * matrix.element_size()))
    return -(-n // max(1, -(-n // fit)))
