"""PowerSGD (Vogels, Karimireddy & Jaggi, 2019, algorithm 1): low-rank updates by power iteration.

The level is the rank. One power iteration per step from the last step's right factor Q, which
therefore follows the gradient's leading directions. Differences with the paper: none in the
maths; Q is kept when the rank changes (columns are added or dropped).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Layer, Mean, Program, Together, Traffic
from regimes.compression.base import HALF, Compressor, Sending, State
from regimes.compression.batched import by_shape, launches
from regimes.compression.orthonormal import orthonormal
from regimes.config import DENSE, Level
from regimes.errors import require
from regimes.seeding import stream


@dataclass
class PowerState(State):
    """``q``: the right factor of the last step, the same on every worker; its rows are columns of
    Q, because products with row factors are several times faster on a CPU."""

    q: Float[Tensor, "rank m"] | None = None


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Rank-r updates; two small means per layer and step, ``(n + m) min(r, n, m)`` floats.

    Attributes:
        reset_on_change: the authors' quirk: a change of level forgets Q, and a change to dense
            forgets the residual instead of sending it.
        wire: what the two factors travel as: "full", the model's type, or "fp16" or "bf16", half
            the bytes of float32. Error feedback keeps what the rounding loses. Equal between
            simulated and real workers up to rounding, as with ``Cast``, and not linear.
    """

    reset_on_change: bool = False
    wire: str = "full"
    linear: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 4, "high": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.wire in ("full", *HALF)
        require(good, "compressor.wire", self.wire, '"full", "fp16" or "bf16"')
        if self.wire != "full":  # each worker rounds its own factors, before the mean
            object.__setattr__(self, "linear", False)

    def check(self, level: Level) -> None:
        good = level == DENSE or (type(level) is int and level >= 1)
        require(good, "level of PowerSGD", level, 'a rank, a whole number from 1, or "dense"')

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> PowerState:
        return PowerState((seed, layer.name), first_worker)

    def reduce(self, grad: Tensor, state: State, level: Level) -> Program:
        if self.reset_on_change and level == DENSE:
            state.residual = cast(PowerState, state).q = None
        return super().reduce(grad, state, level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        state = cast(PowerState, state)
        n, m = delta.shape[1:]
        q = self._start(state, min(int(level), n, m), delta)
        wire = HALF.get(self.wire, delta.dtype)
        p = yield Mean((yield Together(_left, q, delta)).to(wire))  # [r, n]
        p = yield Together(orthonormal, p.to(delta.dtype))
        state.q = (yield Mean((yield Together(_right, p, delta)).to(wire))).to(delta.dtype)
        if launches(delta):
            update = yield Together(_product, p, state.q)  # [n, m]
        else:
            update = torch.mm(p.mT, state.q, out=state.update_like(delta[0]))
        return update, update

    def _start(self, state: PowerState, rank: int, like: Tensor) -> Float[Tensor, "rank m"]:
        """Last step's Q with columns dropped, or added as seeded normal noise."""
        have = 0 if state.q is None else len(state.q)
        if self.reset_on_change and have != rank:
            have = 0
        if have >= rank:
            return cast(Tensor, state.q)[:rank]
        fresh = [
            torch.randn(like.shape[-1], generator=stream(*state.key, "q", column), dtype=like.dtype)
            for column in range(have, rank)
        ]
        kept = [] if state.q is None else list(state.q[:have])
        return torch.stack([*kept, *(f.to(like.device) for f in fresh)])

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        n, m = layer.matrix
        floats = (n + m) * min(int(level), n, m)
        if self.wire != "full":
            return Traffic(floats / 2, floats * 2)
        return Traffic(floats, floats * itemsize)


_left = by_shape(lambda q, delta: q.unsqueeze(-3) @ delta.mT)
_right = by_shape(lambda p, delta: p.unsqueeze(-3) @ delta)
_product = by_shape(lambda p, q: p.mT @ q)
