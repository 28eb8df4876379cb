"""Orthonormal bases of the rows of small matrices, on a GPU of many layers at once.

The basis is completed where rows are dependent: power iteration never leaves a zero factor, which a
zero gradient would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from regimes.compression.batched import on_gpu

TINY = 1e-10  # of a matrix's norm: what completes a basis, far below the rounding of float32
SHIFTS = (1e-10, 0.0, 0.0)  # of the Gram matrix, pass by pass


def orthonormal(entries: Sequence[tuple[Tensor]]) -> list[Tensor]:
    """A basis ``[rank, n]`` of each matrix's row space, rank <= n: by Householder QR, or on a GPU
    by ``in_one_batch``."""
    matrices = [rows for (rows,) in entries]
    if on_gpu(matrices[0]):
        return in_one_batch(matrices)
    return [torch.linalg.qr(rows.mT)[0].mT for rows in matrices]


def in_one_batch(matrices: Sequence[Tensor]) -> list[Tensor]:
    """All in one batch without a wait of the host: shifted CholeskyQR3 (Fukaya et al., 2020) in
    float64. Each matrix is scaled to norm 1, and a tiny identity completes its basis. The shift
    keeps the first Cholesky factor real; two more passes orthogonalise to the last bits.
    """
    gather, inverse, completion = _padding(
        tuple(rows.shape for rows in matrices), matrices[0].device
    )
    end = matrices[0].new_zeros(1)
    flat = torch.cat([*(rows.flatten() for rows in matrices), end]).double()
    a = flat[gather]  # [layers, ranks, n]
    a = a / torch.linalg.matrix_norm(a, keepdim=True).clamp_min(1e-300) + completion
    for shift in SHIFTS:
        gram = a @ a.mT
        if shift:
            gram.diagonal(dim1=1, dim2=2).add_(shift)
        factor, _ = torch.linalg.cholesky_ex(gram)
        a = torch.linalg.solve_triangular(factor, a, upper=False)
    pieces = a.flatten()[inverse].to(matrices[0].dtype).split([rows.numel() for rows in matrices])
    return [piece.view(rows.shape) for piece, rows in zip(pieces, matrices, strict=True)]


@lru_cache(maxsize=64)
def _padding(
    shapes: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Int64[Tensor, "layers ranks n"], Int64[Tensor, " numbers"], Tensor]:
    """For matrices laid end to end, with a zero at the end: the index of each number of the padded
    batch, the inverse, and what is added. A padding row has a 1 in a column of its own, where it is
    orthogonal to all others."""
    ranks, n = (max(sizes) for sizes in zip(*shapes, strict=True))
    end = sum(rank * columns for rank, columns in shapes)
    gather = torch.full((len(shapes), ranks, n + ranks), end)
    completion = torch.zeros(gather.shape, dtype=torch.float64)
    at = 0
    for i, (rank, columns) in enumerate(shapes):
        gather[i, :rank, :columns] = torch.arange(at, at + rank * columns).view(rank, columns)
        at += rank * columns
        for row in range(ranks):
            completion[i, row, row if row < rank else n + row] = TINY if row < rank else 1
    inside = gather.flatten() < end
    inverse = torch.empty(end, dtype=torch.int64)
    inverse[gather.flatten()[inside]] = inside.nonzero().flatten()
    return gather.to(device), inverse.to(device), completion.to(device)
