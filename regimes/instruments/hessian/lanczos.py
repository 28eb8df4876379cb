"""Both ends of a symmetric operator's spectrum from one Krylov space (Lanczos 1950).

The space grows by one product at a time and satisfies, exactly and with full reorthogonalisation,
H V' = V' T + F' C. V (the basis) and F (what the products left outside it: one row, or none) have
orthonormal rows; T and C are small, float64 and on the CPU. The residual of a Ritz pair (theta,
V' y) is then |C y|, at no cost. A full space is restarted from its best Ritz vectors, which satisfy
the same relation (thick restart, Wu & Simon 2000).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.errors import require

Operator = Callable[[Float[Tensor, " d"]], Float[Tensor, " d"]]
Stop = Literal["converged", "max_products", "max_seconds"]
BASIS = 40  # vectors held before a restart, if twice what is wanted is fewer
CHUNK = 2**14  # terms summed in the vectors' own precision


@dataclass(frozen=True)
class Eigenpairs:
    """Holds eigenvalues with vectors, and their cost. NaN stands where a budget ended before a
    value existed."""

    largest: Float[Tensor, " k"]  # algebraically largest eigenvalues, descending, float64
    smallest: Float[Tensor, " s"]  # algebraically smallest, ascending, float64
    residuals: Float[Tensor, " k+s"]  # |H v - lambda v| of largest, then smallest
    vectors: Float[Tensor, "k+s d"]  # unit rows in the same order, the operator's dtype
    products: int
    seconds: float
    stopped: Stop  # why it ended

    @property
    def converged(self) -> bool:
        """Answer whether every residual is within the tolerance."""
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
    """Compute the `largest` and `smallest` eigenvalues, with vectors, residuals and cost.

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
        ConfigError: more eigenvalues than dimensions, none at all, a tolerance that is not positive
            and finite, a start of a wrong shape, or a budget too small for as many pairs.
    """
    began = time.perf_counter()
    check_options(largest, smallest, tolerance, max_products, max_seconds)
    ends, wanted = _Ends(largest, smallest), min(largest + smallest, dimension)
    require(min(ends) >= 0 < sum(ends), "(largest, smallest)", tuple(ends), "at least one in all")
    most = f"at most the operator's dimension {dimension}"
    require(max(ends) <= dimension, "(largest, smallest)", tuple(ends), most)
    require(max_products >= wanted, "max_products", max_products, f"at least {wanted}, one a value")
    if start is None:
        start = random_direction(dimension, generator, dtype, device)
    shape = tuple(start.shape) if isinstance(start, Tensor) else type(start).__name__
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


def check_options(
    largest: int, smallest: int, tolerance: float, max_products: int, max_seconds: float | None
) -> None:
    """Raise ConfigError for a number of a wrong type or range."""
    for name, count in (
        ("largest", largest),
        ("smallest", smallest),
        ("max_products", max_products),
    ):
        whole = isinstance(count, Integral) and not isinstance(count, bool)
        require(whole and count >= 0, name, count, "a whole number from 0 up")
    good = isinstance(tolerance, Real) and 0 < tolerance < math.inf  # NaN is neither
    require(good, "tolerance", tolerance, "a positive number")
    timed = max_seconds is None or (isinstance(max_seconds, Real) and max_seconds >= 0)
    require(timed, "max_seconds", max_seconds, "a number of seconds, or None")


def random_direction(
    dimension: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> Float[Tensor, " d"]:
    """Draw a Gaussian vector on the CPU, so that it is the same on every device."""
    return torch.randn(dimension, generator=generator, dtype=dtype).to(device)


class _Ends(NamedTuple):
    """How many eigenvalues are wanted at each end."""

    largest: int
    smallest: int

    def among(self, count: int) -> list[int]:
        """Return the indices of the wanted ones in an ascending list of `count` values (each
        once)."""
        top = range(max(count - self.largest, 0), count)
        return sorted({*top, *range(min(self.smallest, count))})

    def after_restart(self, size: int, capacity: int) -> list[int]:
        """Return the indices of the wanted ones, and of their neighbours up to half of the room."""
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


class Krylov:
    """Grows V, T, F and C; `step` costs one product, everything else none. At first F is the start.

    A vector of a network is large and new memory costs more than arithmetic on it, so V and F are
    consecutive rows of one buffer and `step` works in place.
    """

    def __init__(self, start: Float[Tensor, " d"], capacity: int) -> None:
        self.dimension, self.capacity = len(start), capacity
        self.dtype, self.device = start.dtype, start.device
        self.size = self.products = 0
        self.radius = 0.0  # largest |Ritz value| so far
        self._rows = start.new_empty(capacity + 1, self.dimension)  # V, then F
        self._t = torch.zeros(capacity, capacity, dtype=torch.float64)
        self._c = torch.zeros(0, capacity, dtype=torch.float64)
        self._pairs: tuple[Tensor, Tensor] | None = None  # eigen-decomposition of T
        self.insert(start)

    @property
    def full(self) -> bool:
        return self.size == self.capacity  # the next step needs a restart first

    @property
    def exhausted(self) -> bool:
        return len(self._c) == 0  # no direction is left: the space is invariant

    def insert(self, direction: Float[Tensor, " d"]) -> None:
        """Put a direction in an empty F; one that lies in the space already is dropped."""
        n = self.size
        if n == self.dimension:
            return
        rest = self._rows[n].copy_(direction)
        before = vector_norm(rest)
        for _ in range(2):
            _project_out(rest, self._rows[:n])
        norm = vector_norm(rest)
        if norm > 1e3 * torch.finfo(self.dtype).eps * before:
            rest /= norm
            self._c = self._c.new_zeros(1, self.capacity)

    def ritz(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Return Ritz values in ascending order and the norms of their residuals."""
        values, y = self._eigen()
        return values, (self._c[:, : self.size] @ y).norm(dim=0)

    def _eigen(self) -> tuple[Tensor, Tensor]:
        if self._pairs is None:
            m = self.size
            values, y = torch.linalg.eigh(self._t[:m, :m])
            self.radius = max(self.radius, float(values.abs().max())) if m else 0.0
            self._pairs = values, y
        return self._pairs

    def weights(self) -> Float[Tensor, " m"]:
        """Return the squared first components of the Ritz vectors: the quadrature weights of the
        start."""
        return self._eigen()[1][0].square()

    def vectors(self, index: Tensor) -> Float[Tensor, "n d"]:
        """Compute the Ritz vectors of some Ritz values, as unit rows."""
        y = self._eigen()[1][:, index].to(self.device, self.dtype)
        rows = y.mT @ self._rows[: self.size]
        for row in rows:
            row /= vector_norm(row)
        return rows

    def step(self, operator: Callable[[Tensor], Tensor]) -> None:
        """Take the row of F into the space. Overwrites the operator's answer, a new tensor."""
        m = self.size
        self._t[m, :m] = self._t[:m, m] = self._c[0, :m]
        self._c, self.size, self._pairs = self._c[1:], m + 1, None
        v, near = self._rows[m], self._t[m, :m].nonzero().flatten().tolist()
        v /= vector_norm(v)
        w = operator(v)
        self.products += 1
        scale = vector_norm(w)
        for i in near:  # w's components along the basis, by the relation
            w.add_(self._rows[i], alpha=-float(self._t[m, i]))
        alpha = float(inner_products(v[None], w))
        w.add_(v, alpha=-alpha)
        # The above is the short recursion, one pass over few vectors; the second orthogonalisation,
        # over all of them, makes it good to rounding (twice is enough: Parlett 1998).
        h = _project_out(w, self._rows[: m + 1])
        # Beside alpha's, this is the only wait of the host for the device in a step.
        size, left, *along = torch.cat([scale[None], vector_norm(w)[None], h]).tolist()
        self._t[m, m] = alpha + along[m]
        floor = max(size, self.radius) * 10 * torch.finfo(self.dtype).eps
        if left > floor and self.size < self.dimension:
            torch.div(w, left, out=self._rows[m + 1])
            self._c = self._c.new_zeros(1, self.capacity)
            self._c[0, m] = left

    def restart(self, keep: list[int]) -> None:
        """Shrink the space to some of its Ritz vectors, which satisfy the same relation."""
        values, y = self._eigen()
        y = y[:, keep]
        n = len(keep)
        self._rows[:n] = y.mT.to(self.device, self.dtype) @ self._rows[: self.size]
        self._rows[n] = self._rows[self.size]
        c = self._c[:, : self.size] @ y
        self._t.zero_()
        self._t[:n, :n] = torch.diag(values[keep])
        self._c.zero_()
        self._c[:, :n] = c
        self.size, self._pairs = n, None


def inner_products(rows: Float[Tensor, "n d"], w: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
    """Compute rows @ w in float64, from sums of few enough terms for float32.

    Over 1e7 terms a float32 dot product or norm on a CPU is off by up to 1e-3, on this way by 1e-7.
    """
    if w.device.type == "cpu":  # where a batched product takes up to 8 times as long
        parts = zip(rows.split(CHUNK, dim=1), w.split(CHUNK), strict=True)
        return torch.stack([a @ b for a, b in parts]).double().sum(0)
    (blocks, rest), (w_blocks, w_rest) = _split_blocks(rows), _split_blocks(w)
    sums = torch.bmm(blocks.transpose(0, 1), w_blocks[..., None])[..., 0]
    return torch.cat([sums, (rest @ w_rest)[None]]).double().sum(0)


def vector_norm(w: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    """Compute the Euclidean norm in float64, summed like `inner_products`."""
    blocks, rest = _split_blocks(w)
    return torch.cat([blocks.norm(dim=1), rest.norm()[None]]).double().norm()


def _split_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """The last axis in blocks, ``[..., blocks, CHUNK]``, and what is left over."""
    n = x.shape[-1] // CHUNK
    return x[..., : n * CHUNK].unflatten(-1, (n, CHUNK)), x[..., n * CHUNK :]


def _project_out(w: Float[Tensor, " d"], rows: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Takes the part of w along orthonormal rows out of it, in place; returns its coordinates."""
    along = inner_products(rows, w)
    if len(rows):
        w.addmv_(rows.mT, along.to(w.dtype), alpha=-1)
    return along
