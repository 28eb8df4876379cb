"""PowerSGD (Vogels, Karimireddy & Jaggi, 2019, algorithm 1): low-rank updates by power iteration.

The level is the rank. One power iteration per step from the last step's right factor Q, which
therefore follows the gradient's leading directions. Differences with the paper: none in the
maths; Q is kept when the rank changes (columns are added or dropped).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Layer, Mean, Program, Together, Traffic
from regimes.compression.base import HALF, Compressor, Owing, Sending, State
from regimes.compression.batched import launches
from regimes.compression.factors import add_and_left, left, product, product_and_rest, right
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
    tells: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 4, "high": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.wire in ("full", *HALF)
        require(good, "compressor.wire", self.wire, '"full", "fp16" or "bf16"')
        if self.wire != "full":  # each worker rounds its own factors, before the mean
            object.__setattr__(self, "linear", False)
            object.__setattr__(self, "tells", False)  # a large factor may be none in half precision

    def check(self, level: Level) -> None:
        check_rank("PowerSGD", level)

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> PowerState:
        return PowerState((seed, layer.name), first_worker)

    def reduce(self, grad: Tensor, state: State, level: Level) -> Program:
        if self.reset_on_change and level == DENSE:
            state.residual = cast(PowerState, state).q = None
        return super().reduce(grad, state, level)

    def owe(self, grad: Float[Tensor, "hosted n m"], state: State, level: Level) -> Owing:
        if level == DENSE or launches(grad):
            return (yield from super().owe(grad, state, level))
        q = self._start(cast(PowerState, state), level, grad)
        owed = cast(Tensor, state.residual)
        state.early = add_and_left(owed, grad, self.share, q)
        return owed

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        state = cast(PowerState, state)
        wire = HALF.get(self.wire, delta.dtype)
        p = state.take_early()
        if p is None:
            p = yield Together(left, self._start(state, level, delta), delta)
        p = yield Together(orthonormal, (yield Mean(p.to(wire))).to(delta.dtype))  # [r, n]
        state.q = (yield Mean((yield Together(right, p, delta)).to(wire))).to(delta.dtype)
        if launches(delta):
            update = yield Together(product, p, state.q)  # [n, m]
            return update, update
        update = state.update_like(delta[0])
        if self.error_feedback:
            product_and_rest(p, state.q, update, delta)
            return update, None
        return torch.mm(p.mT, state.q, out=update), None

    def evidence(self, update: Tensor, state: State, level: Level) -> Tensor:
        return update if level == DENSE else cast(Tensor, cast(PowerState, state).q)

    def _start(self, state: PowerState, level: Level, like: Tensor) -> Float[Tensor, "rank m"]:
        """Last step's Q with columns dropped, or added as seeded normal noise."""
        rank = min(int(level), *like.shape[1:])
        forgets = self.reset_on_change and state.q is not None and len(state.q) != rank
        kept = None if forgets else state.q
        return with_rows(kept, rank, like.shape[-1], like, (*state.key, "q"))

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        n, m = layer.matrix
        floats = (n + m) * min(int(level), n, m)
        if self.wire != "full":
            return Traffic(floats / 2, floats * 2)
        return Traffic(floats, floats * itemsize)


def check_rank(name: str, level: Level) -> None:
    """Raise ConfigError unless the level is a rank, or "dense"."""
    good = level == DENSE or (type(level) is int and level >= 1)
    require(good, f"level of {name}", level, 'a rank, a whole number from 1, or "dense"')


def with_rows(
    rows: Float[Tensor, "had m"] | None, rank: int, width: int, like: Tensor, key: Sequence[Any]
) -> Float[Tensor, "rank m"]:
    """A factor with rows dropped, or added as normal noise that is seeded by ``key``."""
    if rows is not None and len(rows) >= rank:
        return rows[:rank]
    kept = [] if rows is None else list(rows)
    fresh = [
        torch.randn(width, generator=stream(*key, row), dtype=like.dtype)
        for row in range(len(kept), rank)
    ]
    return torch.stack([*kept, *(f.to(like.device) for f in fresh)])
