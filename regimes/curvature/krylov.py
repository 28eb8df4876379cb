"""The space that `lanczos.py` grows: H V' = V' T + F' C, one product at a time.

V (the basis) and F (what the products left outside it: one row, or none) have orthonormal rows; T
and C are small, float64 and on the CPU. At first F is the start vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 2**14  # terms summed in the vectors' own precision


class Krylov:
    """Basis, projection and left-overs; `step` costs one product, everything else none.

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
        """Puts a direction in an empty F; one that lies in the space already is dropped."""
        n = self.size
        if n == self.dimension:
            return
        rest = self._rows[n].copy_(direction)
        before = length(rest)
        for _ in range(2):
            _project_out(rest, self._rows[:n])
        norm = length(rest)
        if norm > 1e3 * torch.finfo(self.dtype).eps * before:
            rest /= norm
            self._c = self._c.new_zeros(1, self.capacity)

    def ritz(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Ritz values in ascending order and the norms of their residuals."""
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
        """Squared first components of the Ritz vectors: the quadrature weights of the start."""
        return self._eigen()[1][0].square()

    def vectors(self, index: Tensor) -> Float[Tensor, "n d"]:
        """The Ritz vectors of some Ritz values, as unit rows."""
        y = self._eigen()[1][:, index].to(self.device, self.dtype)
        rows = y.mT @ self._rows[: self.size]
        for row in rows:
            row /= length(row)
        return rows

    def step(self, operator: Callable[[Tensor], Tensor]) -> None:
        """Takes the row of F into the space. Overwrites the operator's answer, a new tensor."""
        m = self.size
        self._t[m, :m] = self._t[:m, m] = self._c[0, :m]
        self._c, self.size, self._pairs = self._c[1:], m + 1, None
        v, near = self._rows[m], self._t[m, :m].nonzero().flatten().tolist()
        v /= length(v)
        w = operator(v)
        self.products += 1
        scale = length(w)
        for i in near:  # w's components along the basis, by the relation
            w.add_(self._rows[i], alpha=-float(self._t[m, i]))
        alpha = float(inner(v[None], w))
        w.add_(v, alpha=-alpha)
        # The above is the short recursion, one pass over few vectors; the second orthogonalisation,
        # over all of them, makes it good to rounding (twice is enough: Parlett 1998, section 6.9).
        h = _project_out(w, self._rows[: m + 1])
        # With alpha's, the only synchronisation of host and device in a step.
        size, left, *along = torch.cat([scale[None], length(w)[None], h]).tolist()
        self._t[m, m] = alpha + along[m]
        floor = max(size, self.radius) * 10 * torch.finfo(self.dtype).eps
        if left > floor and self.size < self.dimension:
            torch.div(w, left, out=self._rows[m + 1])
            self._c = self._c.new_zeros(1, self.capacity)
            self._c[0, m] = left

    def restart(self, keep: list[int]) -> None:
        """Shrinks the space to some of its Ritz vectors, which satisfy the same relation."""
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


def inner(rows: Float[Tensor, "n d"], w: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
    """rows @ w in float64, from sums of few enough terms for float32.

    Over 1e7 terms a float32 dot product or norm on a CPU is off by up to 1e-3, on this way by 1e-7.
    """
    if w.device.type == "cpu":  # where a batched product takes up to 8 times as long
        parts = zip(rows.split(CHUNK, dim=1), w.split(CHUNK), strict=True)
        return torch.stack([a @ b for a, b in parts]).double().sum(0)
    (blocks, rest), (w_blocks, w_rest) = _cut(rows), _cut(w)
    sums = torch.bmm(blocks.transpose(0, 1), w_blocks[..., None])[..., 0]
    return torch.cat([sums, (rest @ w_rest)[None]]).double().sum(0)


def length(w: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    """The Euclidean norm in float64, summed like `inner`."""
    blocks, rest = _cut(w)
    return torch.cat([blocks.norm(dim=1), rest.norm()[None]]).double().norm()


def _cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """The last axis in blocks, ``[..., blocks, CHUNK]``, and what is left over."""
    n = x.shape[-1] // CHUNK
    return x[..., : n * CHUNK].unflatten(-1, (n, CHUNK)), x[..., n * CHUNK :]


def _project_out(w: Float[Tensor, " d"], rows: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Takes the part of w along orthonormal rows out of it, in place; returns its coordinates."""
    along = inner(rows, w)
    if len(rows):
        w.addmv_(rows.mT, along.to(w.dtype), alpha=-1)
    return along
