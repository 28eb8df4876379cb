"""The space that `lanczos.py` grows: H V' = V' T + F' C, one product at a time.

V (the basis) and F (what the products left outside it) have orthonormal rows; T and C are small,
float64 and on the CPU. A start vector is just a row of F that nothing has asked for yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


class Krylov:
    """Basis, projection and left-overs; `step` costs one product, everything else none."""

    def __init__(self, start: Float[Tensor, "p d"], capacity: int) -> None:
        self.dimension, self.capacity = start.shape[1], capacity
        self.dtype, self.device = start.dtype, start.device
        self.size = self.products = 0
        self.radius = 0.0  # largest |Ritz value| so far
        self._v = torch.empty(capacity, self.dimension, dtype=self.dtype, device=self.device)
        self._t = torch.zeros(capacity, capacity, dtype=torch.float64)
        self._f = self._v.new_empty(0, self.dimension)
        self._c = torch.zeros(0, capacity, dtype=torch.float64)
        for row in start:
            self.insert(row)
        self._pending = len(self._f)
        self._pairs: tuple[Tensor, Tensor] | None = None  # eigen-decomposition of T

    @property
    def started(self) -> bool:
        """Whether every start vector is in the space."""
        return self._pending == 0

    @property
    def full(self) -> bool:
        """Whether the next step needs a restart first."""
        return self.size == self.capacity

    @property
    def complete(self) -> bool:
        """Whether the space is everything, and all values exact."""
        return self.size == self.dimension

    @property
    def exhausted(self) -> bool:
        """Whether no direction is left: the space is invariant."""
        return len(self._f) == 0

    def insert(self, direction: Float[Tensor, " d"]) -> None:
        """Adds a direction for later steps; one that lies in the space already is dropped."""
        length = direction.norm()
        rest = direction.clone()
        for _ in range(2):
            rest -= self._basis.mT @ (self._basis @ rest)
            rest -= self._f.mT @ (self._f @ rest)
        norm = rest.norm()
        if bool(norm > 1e3 * torch.finfo(self.dtype).eps * length):
            self._f = torch.cat([self._f, (rest / norm).unsqueeze(0)])
            self._c = torch.cat([self._c, self._c.new_zeros(1, self.capacity)])

    def ritz(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Ritz values in ascending order and the norms of their residuals."""
        if self._pairs is None:
            m = self.size
            values, y = torch.linalg.eigh(self._t[:m, :m])
            self.radius = max(self.radius, float(values.abs().max())) if m else 0.0
            self._pairs = values, y
        values, y = self._pairs
        return values, (self._c[:, : self.size] @ y).norm(dim=0)

    def weights(self) -> Float[Tensor, " m"]:
        """Squared first components of the Ritz vectors: the quadrature weights of the start."""
        self.ritz()
        assert self._pairs is not None
        return self._pairs[1][0].square()

    def vectors(self, index: Tensor) -> Float[Tensor, "n d"]:
        """The Ritz vectors of some Ritz values, as unit rows."""
        self.ritz()
        assert self._pairs is not None
        y = self._pairs[1][:, index].to(self.device, self.dtype)
        rows = y.mT @ self._basis
        return rows / rows.norm(dim=1, keepdim=True)

    def step(self, operator: Callable[[Tensor], Tensor], toward: int | None) -> None:
        """Takes one direction into the space: the next start vector, or a pair's residual."""
        m = self.size
        v = self._take(toward)
        self._v[m] = v
        self.size, self._pairs = m + 1, None
        w = operator(self._v[m]).clone()
        self.products += 1
        scale = w.norm()
        near = self._t[m, :m].nonzero().flatten()  # what the relation says w holds of the basis
        w -= self._t[m, near].to(self.device, self.dtype) @ self._v[near.to(self.device)]
        alpha, beta = self._v[m] @ w, self._f @ w
        w -= alpha * self._v[m] + beta @ self._f
        # The above is the short recursion, one pass over few vectors; a second orthogonalisation
        # over all of them makes it good to rounding (twice is enough: Parlett 1998, section 6.9).
        h = self._basis @ w
        w -= h @ self._basis
        again = self._f @ w
        w -= again @ self._f
        self._t[m, m] = float(alpha + h[m])
        if len(self._f):
            self._c[:, m] = (beta + again).double().cpu()
        left = w.norm()
        floor = max(float(scale), self.radius) * 10 * torch.finfo(self.dtype).eps
        if float(left) > floor and self.size + len(self._f) < self.dimension:
            self._f = torch.cat([self._f, (w / left).unsqueeze(0)])
            row = self._c.new_zeros(1, self.capacity)
            row[0, m] = left.double()
            self._c = torch.cat([self._c, row])

    def restart(self, keep: list[int]) -> None:
        """Shrinks the space to some of its Ritz vectors, which satisfy the same relation."""
        values, _ = self.ritz()
        assert self._pairs is not None
        y = self._pairs[1][:, keep]
        n = len(keep)
        self._v[:n] = y.mT.to(self.device, self.dtype) @ self._basis
        c = self._c[:, : self.size] @ y
        self._t.zero_()
        self._t[:n, :n] = torch.diag(values[keep])
        self._c.zero_()
        self._c[:, :n] = c
        self.size, self._pairs = n, None

    @property
    def _basis(self) -> Float[Tensor, "m d"]:
        return self._v[: self.size]

    def _take(self, toward: int | None) -> Float[Tensor, " d"]:
        """Splits F into the direction asked for and the rest, rotating C along; returns it."""
        p, m = len(self._f), self.size
        coordinates = torch.zeros(p, dtype=torch.float64)
        if self._pending or toward is None:
            coordinates[0] = 1.0
            self._pending = max(self._pending - 1, 0)
        else:
            assert self._pairs is not None
            coordinates = self._c[:, :m] @ self._pairs[1][:, toward]
            norm = coordinates.norm()
            coordinates = coordinates / norm if norm > 0 else torch.eye(p, dtype=torch.float64)[0]
        if p == 1:
            v, self._t[m, :m] = self._f[0], self._c[0, :m]
            self._f, self._c = self._f[:0], self._c[:0]
        else:
            q = _rotation(coordinates)
            rotated = q.mT.to(self.device, self.dtype) @ self._f
            c = q.mT @ self._c
            v, self._f = rotated[0], rotated[1:]
            self._t[m, :m], self._c = c[0, :m], c[1:]
        self._t[:m, m] = self._t[m, :m]
        return v / v.norm()


def _rotation(first: Float[Tensor, " p"]) -> Float[Tensor, "p p"]:
    """An orthogonal matrix with the given unit vector as its first column (a Householder one)."""
    u = first.clone()
    sign = -1.0 if u[0] < 0 else 1.0
    u[0] += sign
    identity = torch.eye(len(first), dtype=first.dtype)
    return -sign * (identity - 2 * torch.outer(u, u) / (u @ u))
