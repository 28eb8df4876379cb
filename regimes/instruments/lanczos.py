"""Both ends of a symmetric operator's spectrum from one Krylov space (Lanczos 1950).

Knows nothing of networks: an operator is a function from vectors [d] to vectors [d]. Everything
that `curvature.py` says about eigenvalues comes from here.

The space is grown by one product at a time and keeps, exactly, the relation

    H V' = V' T + F' C,        V: [m, d] orthonormal rows, the space
                               F: [p, d] orthonormal rows, what products left outside it

with full reorthogonalisation. The residual of a Ritz pair (theta, V' y) is then |C y|, at no cost.
From one start vector p is 1 and this is the textbook recursion. A block of start vectors (the
previous measurement's eigenvectors) makes it the band Lanczos process (Ruhe 1979), in which the
next direction is not taken in turn but is the one that the worst wanted pair asks for: F' C y.
When the space is full it is restarted from its best Ritz vectors, which satisfy the same relation
(thick restart, Wu & Simon 2000).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.errors import ConfigError
from regimes.instruments.krylov import Krylov

Operator = Callable[[Float[Tensor, " d"]], Float[Tensor, " d"]]
Stop = Literal["converged", "max_products", "max_seconds"]


@dataclass(frozen=True)
class Eigenpairs:
    """What was reached, and at what price. NaN where a budget ended before a value existed."""

    largest: Float[Tensor, " k"]  # algebraically largest eigenvalues, descending, float64
    smallest: Float[Tensor, " s"]  # algebraically smallest, ascending, float64
    residuals: Float[Tensor, " k+s"]  # |H v - lambda v| of largest, then smallest
    vectors: Float[Tensor, "k+s d"]  # unit rows in the same order, the operator's dtype
    products: int
    seconds: float
    stopped: Stop  # why it ended

    @property
    def converged(self) -> bool:
        """Whether every residual met the tolerance."""
        return self.stopped == "converged"


@dataclass(frozen=True)
class Budget:
    """When to stop at the latest."""

    max_products: int
    max_seconds: float | None
    agree: Callable[[float], float] | None  # makes all processes read the same clock


def lanczos(
    operator: Operator,
    dimension: int,
    *,
    largest: int = 1,
    smallest: int = 0,
    tolerance: float = 1e-3,
    start: Float[Tensor, "p d"] | None = None,
    max_products: int = 200,
    max_seconds: float | None = None,
    max_basis: int | None = None,
    generator: torch.Generator,
    agree: Callable[[float], float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """The `largest` and `smallest` eigenvalues, with vectors, residuals and what they cost.

    A pair has converged when its residual is at most `tolerance` * |lambda|, or `tolerance` times
    a thousandth of the spectral radius where |lambda| is smaller than that. The error of the value
    is of the order of the residual's square over the gap to the next eigenvalue. A budget is kept
    before each product: by count, and by the clock plus the last product's duration; what was
    reached by then is returned, with `stopped` saying so.

    Args:
        operator: gives a new tensor each time; it is overwritten.
        start: rows to start from, e.g. the last measurement's `vectors`; a random one if None.
            A random block finds eigenvalues of a multiplicity up to its size, one vector may
            find a multiple eigenvalue once (it looks again wherever its space is exhausted).
        max_basis: vectors held at most (each d numbers) before a restart.
        generator: for the random directions; the result is a function of it.
        agree: maps a local number to one that all processes share (`HessianProduct.agree`).

    Raises:
        ConfigError: more eigenvalues than dimensions, none at all, a start of a wrong shape, or a
            budget or basis too small for as many pairs.
    """
    began = time.perf_counter()
    capacity = _check(dimension, largest, smallest, start, max_products, max_basis)
    if start is None:
        start = random_direction(dimension, generator, dtype, device).unsqueeze(0)
    space = Krylov(start.to(device, dtype), min(capacity, dimension))
    budget = Budget(max_products, max_seconds, agree)
    stopped = _grow(space, operator, largest, smallest, tolerance, budget, generator, began)
    return _report(space, largest, smallest, stopped, time.perf_counter() - began)


def random_direction(
    dimension: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> Float[Tensor, " d"]:
    """A Gaussian vector drawn on the CPU, so that it is the same on every device."""
    return torch.randn(dimension, generator=generator, dtype=dtype).to(device)


def _check(
    d: int, largest: int, smallest: int, start: Tensor | None, max_products: int, basis: int | None
) -> int:
    if largest < 0 or smallest < 0 or largest + smallest == 0:
        raise ConfigError(f"Asked for {largest} largest and {smallest} smallest eigenvalues.")
    if max(largest, smallest) > d:
        k = max(largest, smallest)
        raise ConfigError(f"Asked for {k} eigenvalues, but the operator has dimension {d}.")
    wanted = min(largest + smallest, d)
    if start is not None and (start.ndim != 2 or start.shape[1] != d or not len(start)):
        raise ConfigError(f"Expected start vectors of shape (p, {d}), got {tuple(start.shape)}.")
    if max_products < wanted:
        raise ConfigError(f"max_products is {max_products}; {wanted} eigenvalues need that many.")
    block = 1 if start is None else len(start)
    needed = wanted + 2 * block
    if basis is not None and basis < min(needed, d):
        raise ConfigError(f"max_basis is {basis}; {wanted} eigenvalues need {min(needed, d)}.")
    return basis or max(2 * needed, 40)


def _grow(
    space: Krylov,
    operator: Operator,
    largest: int,
    smallest: int,
    tolerance: float,
    budget: Budget,
    generator: torch.Generator,
    began: float,
) -> Stop:
    """Adds products until every wanted pair has converged or the budget would be exceeded."""
    last, exhausted_at, before = 0.0, 0, None
    while True:
        values, residuals = space.ritz()
        wanted = wanted_of(len(values), largest, smallest)
        complete = space.started and len(wanted) == min(largest + smallest, space.dimension)
        if space.complete:
            return "converged"
        if space.exhausted:  # an invariant subspace: is there anything beyond it?
            found = values[wanted]
            if complete and before is not None and torch.allclose(found, before, rtol=1e-6):
                return "converged"
            exhausted_at, before = space.size, found if complete else None
            space.insert(random_direction(space.dimension, generator, space.dtype, space.device))
        scale = torch.clamp(values.abs(), min=1e-3 * space.radius)
        ratio = residuals / (tolerance * scale)
        if complete and space.products >= 2 * exhausted_at and bool((ratio[wanted] <= 1).all()):
            return "converged"
        if space.products >= budget.max_products:
            return "max_products"
        now = time.perf_counter()
        if budget.max_seconds is not None and space.products:
            spent = now - began + last
            if (budget.agree(spent) if budget.agree else spent) > budget.max_seconds:
                return "max_seconds"
        if space.full:
            space.restart(restart_set(space.size, largest, smallest, space.capacity))
            continue
        worst = wanted[int(ratio[wanted].argmax())] if len(wanted) else None
        space.step(operator, worst)
        last = time.perf_counter() - now


def wanted_of(found: int, largest: int, smallest: int) -> list[int]:
    """Indices, among `found` values in ascending order, of the wanted ones (each once)."""
    top = range(max(found - largest, 0), found)
    bottom = range(min(smallest, found))
    return sorted({*top, *bottom})


def restart_set(size: int, largest: int, smallest: int, capacity: int) -> list[int]:
    """The wanted Ritz vectors, and next to them as many more as leave half of the room free."""
    spare = max((capacity - largest - smallest) // 2 - 1, 0)
    share = spare * largest // (largest + smallest)
    kept = wanted_of(size, largest + share, smallest + spare - share if smallest else 0)
    return kept if len(kept) < size else wanted_of(size, largest, smallest)


def _report(
    space: Krylov, largest: int, smallest: int, stopped: Stop, seconds: float
) -> Eigenpairs:
    values, residuals = space.ritz()
    n = len(values)
    order = [n - 1 - i for i in range(largest)] + list(range(smallest))
    exists = torch.tensor([0 <= i < n for i in order])
    index = torch.tensor([i if 0 <= i < n else 0 for i in order])
    noise = torch.finfo(space.dtype).eps * space.radius  # a residual below it means nothing
    nan = torch.tensor(math.nan, dtype=torch.float64)
    found = torch.where(exists, values[index], nan)
    left = torch.where(exists, residuals[index].clamp(min=noise), nan)
    vectors = space.vectors(index)
    vectors[~exists.to(vectors.device)] = math.nan
    return Eigenpairs(
        largest=found[:largest],
        smallest=found[largest:],
        residuals=left,
        vectors=vectors,
        products=space.products,
        seconds=seconds,
        stopped=stopped,
    )
