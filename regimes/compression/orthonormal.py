"""Orthonormal bases of many matrices at once, which PowerSGD and ACP-SGD need of their factors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.torch_compat import foreach_copy_
from regimes.compression.kernels import cache_tensors, on_gpu

T = TypeVar("T")
TINY = 1e-10  # of a matrix's norm: what completes a basis, far below the rounding of float32
FEW = 1 << 18  # numbers of a batch whose padding costs less than another batch's launches
PLANS = 8  # of padding that stay in memory, one for each vector of levels and bucket
SHIFTS = (1e-10, 0.0, 0.0)  # of the Gram matrix, pass by pass

Once = Callable[[Hashable, Callable[[], Any]], Any]  # see ``kernels.make_once``


def make_again(what: Hashable, make: Callable[[], T]) -> T:
    """Make a thing each time: an ``Once`` that keeps nothing."""
    return make()


def orthonormalise(
    stacks: Sequence[Float[Tensor, "_ _ _"]], once: Once = make_again
) -> list[Tensor]:
    """Compute an orthonormal basis ``[rank, n]`` of each matrix's row space, rank <= n, for stacks
    ``[layers, rank, n]``: by Householder QR, or on a GPU by ``orthonormalise_in_batches``. The
    basis is completed where rows are dependent: power iteration never leaves a zero factor, which a
    zero gradient would give."""
    if on_gpu(stacks[0]):
        return orthonormalise_in_batches(stacks, once)
    return [torch.linalg.qr(rows.mT)[0].mT for rows in stacks]


def orthonormalise_in_batches(
    stacks: Sequence[Float[Tensor, "_ _ _"]], once: Once = make_again
) -> list[Tensor]:
    """Orthonormalise in few batches and without a wait of the host, by shifted CholeskyQR3 (Fukaya
    et al., 2020) in float64. Each matrix is scaled to norm 1, and a tiny identity completes its
    basis. The shift keeps the first Cholesky factor real; two more passes orthogonalise to the last
    bits."""
    results: dict[int, Tensor] = {}
    shapes = tuple(tuple(rows.shape) for rows in stacks)
    for ids in choose_batches(shapes):
        own = tuple(shapes[i] for i in ids)
        padded = once(("padded", own), partial(PaddedBatch, own, stacks[0].device))
        results.update(zip(ids, padded.orthonormalise([stacks[i] for i in ids]), strict=True))
    return [results[i] for i in range(len(stacks))]


@lru_cache(maxsize=PLANS)
def choose_batches(shapes: tuple[tuple[int, int, int], ...]) -> list[list[int]]:
    """Choose which stacks ``[layers, rank, n]`` are padded to the size of the largest of their
    batch. Zeros are at most as many as numbers, except in a batch of few numbers: a batch costs
    launches.

    >>> choose_batches(((2, 4, 768), (1, 4, 50257), (1, 4, 2304)))
    [[1, 2], [0]]
    >>> choose_batches(((1, 1, 64), (1, 4, 512), (1, 2, 10)))
    [[1, 0, 2]]
    """
    found: list[list[int]] = []
    numbers = layers = rank = width = 0
    for i in sorted(range(len(shapes)), key=lambda i: -shapes[i][2]):
        count, rows, columns = shapes[i]
        numbers += count * rows * columns
        padded = (layers + count) * max(rank, rows) * width if found else 0
        if not found or padded > max(FEW, 2 * numbers):
            found.append([])
            numbers, layers, rank, width = count * rows * columns, 0, 0, columns
        found[-1].append(i)
        rank, layers = max(rank, rows), layers + count
    return found


class PaddedBatch:
    """Holds room for stacks of several sizes as one batch, ``[layers, ranks, n]``; zeros around
    them stay. With several ranks a padding row has a 1 in a column of its own, where it is
    orthogonal to all others."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.shapes, self.layers = shapes, [layers for layers, _, _ in shapes]
        self.ranks, self.n = max(x[1] for x in shapes), max(x[2] for x in shapes)
        mixed = any(rank < self.ranks for _, rank, _ in shapes)
        self.tiny: Tensor | float = TINY
        self.one: Tensor | None = None
        if mixed:
            self.tiny, self.one = _diagonals(tuple(shapes), device)
        width = self.n + self.ranks if mixed else self.n
        self.room = torch.zeros(
            (sum(self.layers), self.ranks, width), dtype=torch.float64, device=device
        )
        self.places = self._parts(self.room)

    def _parts(self, batch: Tensor) -> list[Tensor]:
        parts = zip(batch.split(self.layers), self.shapes, strict=True)
        return [x if x.shape == shape else x[:, : shape[1], : shape[2]] for x, shape in parts]

    def orthonormalise(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Orthonormalise the stacks, as ``orthonormalise_in_batches`` says."""
        foreach_copy_(self.places, [*stacks])
        a = self.room / torch.linalg.matrix_norm(self.room, keepdim=True).clamp_min_(1e-300)
        a.diagonal(dim1=1, dim2=2).add_(self.tiny)
        if self.one is not None:
            a[:, :, -self.ranks :].diagonal(dim1=1, dim2=2).add_(self.one)
        for shift in SHIFTS:
            gram = torch.bmm(a, a.mT)
            if shift:
                gram.diagonal(dim1=1, dim2=2).add_(shift)
            factor, _ = torch.linalg.cholesky_ex(gram)
            a = torch.linalg.solve_triangular(factor, a, upper=False)
        return self._parts(a.to(stacks[0].dtype))


@cache_tensors(1024)  # small, and all buckets of a step have theirs when graphs are recorded
def _diagonals(
    stacks: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Float[Tensor, "layers ranks"], Float[Tensor, "layers ranks"]]:
    """What is added to the first and to the last diagonal of a padded batch."""
    ranks = max(rank for _, rank, _ in stacks)
    real = torch.tensor(
        [[row < rank for row in range(ranks)] for layers, rank, _ in stacks for _ in range(layers)]
    )
    return (TINY * real.double()).to(device), (~real).double().to(device)
