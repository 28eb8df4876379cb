"""Both ends of a symmetric operator's spectrum from one Krylov space (Lanczos 1950).

The space (`krylov.py`) grows by one product at a time and satisfies, exactly and with full
reorthogonalisation, H V' = V' T + F' C. The residual of a Ritz pair (theta, V' y) is then |C y|, at
no cost. A full space is restarted from its best Ritz vectors, which satisfy the same relation
(thick restart, Wu & Simon 2000).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.curvature.krylov import Krylov
from regimes.errors import require

Operator = Callable[[Float[Tensor, " d"]], Float[Tensor, " d"]]
Stop = Literal["converged", "max_products", "max_seconds"]
BASIS = 40  # vectors held before a restart, if twice what is wanted is fewer


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues with vectors, and their cost. NaN where a budget ended before a value existed."""

    largest: Float[Tensor, " k"]  # algebraically largest eigenvalues, descending, float64
    smallest: Float[Tensor, " s"]  # algebraically smallest, ascending, float64
    residuals: Float[Tensor, " k+s"]  # |H v - lambda v| of largest, then smallest
    vectors: Float[Tensor, "k+s d"]  # unit rows in the same order, the operator's dtype
    products: int
    seconds: float
    stopped: Stop  # why it ended

    @property
    def converged(self) -> bool:
        """Whether every residual is within the tolerance."""
        return self.stopped == "converged"


def lanczos(
    operator: Operator,
    dimension: int,
    *,
    largest: int = 1,
    smallest: int = 0,
    tolerance: float = 1e-3,
    start: Float[Tensor, " d"] | None = None,
    max_products: int = 200,
    max_seconds: float | None = None,
    generator: torch.Generator,
    agree: Callable[[float], float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """The `largest` and `smallest` eigenvalues, with vectors, residuals and cost.

    A pair has converged when its residual is at most `tolerance` * |lambda|, or `tolerance` times
    a thousandth of the spectral radius where |lambda| is smaller than that. The error of the value
    is of the order of the residual's square over the gap to the next eigenvalue. Budgets are
    checked before each product: the count, and the clock plus the last product's duration. What
    was reached by then is returned, with the reason in `stopped`.

    Args:
        operator: gives a new tensor each time; it is overwritten.
        start: the vector to start from; None: a random one. A multiple eigenvalue may be found
            once (it looks again wherever the space is exhausted).
        generator: for the random directions; the result is a function of it.
        agree: maps a local number to one that all processes share (`HessianProduct.agree`).

    Raises:
        ConfigError: more eigenvalues than dimensions, none at all, a start of a wrong shape, or a
            budget too small for as many pairs.
    """
    began = time.perf_counter()
    ends, wanted = _Ends(largest, smallest), min(largest + smallest, dimension)
    require(min(ends) >= 0 < sum(ends), "(largest, smallest)", tuple(ends), "at least one in all")
    most = f"at most the operator's dimension {dimension}"
    require(max(ends) <= dimension, "(largest, smallest)", tuple(ends), most)
    require(max_products >= wanted, "max_products", max_products, f"at least {wanted}, one a value")
    if start is None:
        start = random_direction(dimension, generator, dtype, device)
    shape = tuple(start.shape)
    require(shape == (dimension,), "shape of start", shape, f"({dimension},)")
    capacity = max(2 * (wanted + 2), BASIS)
    space = Krylov(start.to(device, dtype), min(capacity, dimension))

    def late(moment: float) -> bool:
        if max_seconds is None:
            return False
        spent = moment - began
        # All processes take part in each product, so all must stop after the same one.
        return (agree(spent) if agree else spent) > max_seconds

    stopped = _grow(space, operator, ends, tolerance, max_products, late, generator)
    return _report(space, ends, stopped, time.perf_counter() - began)


def random_direction(
    dimension: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> Float[Tensor, " d"]:
    """A Gaussian vector drawn on the CPU, so that it is the same on every device."""
    return torch.randn(dimension, generator=generator, dtype=dtype).to(device)


class _Ends(NamedTuple):
    """How many eigenvalues are wanted at each end."""

    largest: int
    smallest: int

    def among(self, count: int) -> list[int]:
        """Indices of the wanted ones in an ascending list of `count` values (each once)."""
        top = range(max(count - self.largest, 0), count)
        return sorted({*top, *range(min(self.smallest, count))})

    def after_restart(self, size: int, capacity: int) -> list[int]:
        """The wanted ones, and their neighbours up to half of the room."""
        spare = max((capacity - sum(self)) // 2 - 1, 0)
        share = spare * self.largest // sum(self)
        more = self.smallest + spare - share if self.smallest else 0
        indices = _Ends(self.largest + share, more).among(size)
        return indices if len(indices) < size else self.among(size)


def _grow(
    space: Krylov,
    operator: Operator,
    ends: _Ends,
    tolerance: float,
    max_products: int,
    late: Callable[[float], bool],
    generator: torch.Generator,
) -> Stop:
    """Adds products until every wanted pair has converged or a budget would be exceeded."""
    last, exhausted_at, before = 0.0, 0, None  # last: seconds of the last product
    while space.size < space.dimension:  # then the space is everything, and all values exact
        values, residuals = space.ritz()
        wanted = ends.among(len(values))
        all_there = len(wanted) == min(sum(ends), space.dimension)
        if space.exhausted:  # an invariant subspace: is there anything beyond it?
            reached = values[wanted]
            if all_there and before is not None and torch.allclose(reached, before, rtol=1e-6):
                break
            exhausted_at, before = space.size, reached if all_there else None
            space.insert(random_direction(space.dimension, generator, space.dtype, space.device))
        ratio = residuals / (tolerance * values.abs().clamp(min=1e-3 * space.radius))
        if all_there and space.products >= 2 * exhausted_at and bool((ratio[wanted] <= 1).all()):
            break
        if space.products >= max_products:
            return "max_products"
        now = time.perf_counter()
        if space.products and late(now + last):
            return "max_seconds"
        if space.full:
            space.restart(ends.after_restart(space.size, space.capacity))
        else:
            space.step(operator)
            last = time.perf_counter() - now
    return "converged"


def _report(space: Krylov, ends: _Ends, stopped: Stop, seconds: float) -> Eigenpairs:
    values, residuals = space.ritz()
    n, k = len(values), ends.largest
    order = torch.tensor([*range(n - 1, n - 1 - k, -1), *range(ends.smallest)])
    exists = (order >= 0) & (order < n)
    index = order.where(exists, torch.tensor(0))
    noise = torch.finfo(space.dtype).eps * space.radius  # a residual below it means nothing
    reached = values[index].masked_fill(~exists, math.nan)
    left = residuals[index].clamp(min=noise).masked_fill(~exists, math.nan)
    vectors = space.vectors(index)
    vectors[~exists.to(vectors.device)] = math.nan
    return Eigenpairs(reached[:k], reached[k:], left, vectors, space.products, seconds, stopped)
