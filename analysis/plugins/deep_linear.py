"""A deep linear network: a matrix as a product of matrices; single entries are asked for.

Small random factors make the product small and of low rank in effect, so that gradient descent
finds matrices of low rank first (Arora et al., "Implicit Regularization in Deep Matrix
Factorization", 2019); its singular values follow a closed form (Saxe et al., 2014).
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

from jaxtyping import Float, Int64
from torch import Tensor, nn

SCALE = 1e-3  # of the product at first: its Frobenius norm is about this times the root of its rows


class DeepLinear(nn.Module):
    """``depth`` square factors without bias, normal, of standard deviation ``SCALE^(1 / depth) /
    sqrt(width)`` (Kleinman, Achille & Soatto, 2024)."""

    matrix = True
    head = None  # all factors are hidden

    def __init__(self, classes: int, rows: int, width: int | None = None, depth: int = 3) -> None:
        super().__init__()
        sizes = [rows, *[width or rows] * (depth - 1), rows]
        factors = [nn.Linear(n, m, bias=False) for n, m in pairwise(sizes)]
        for factor in factors:
            nn.init.normal_(factor.weight, std=SCALE ** (1 / depth) * factor.in_features**-0.5)
        self.factors = nn.ModuleList(factors)

    def product(self) -> Float[Tensor, "rows rows"]:
        """The matrix that the factors make: the last one times ... times the first."""
        weights: list[Tensor] = list(self.parameters())
        return reduce(lambda below, above: above @ below, weights)

    def forward(self, x: Int64[Tensor, "n 2"]) -> Float[Tensor, " n"]:
        """The entries (row, column)."""
        return self.product()[x[:, 0], x[:, 1]]
