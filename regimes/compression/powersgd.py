"""PowerSGD (Vogels, Karimireddy & Jaggi, 2019, algorithm 1): low-rank updates by power iteration.

The level is the rank. Each step makes one power iteration that starts from the last step's right
factor Q, so that Q follows the gradient's leading directions. Differences with the paper: none in
the maths; Q survives a change of rank (rows are added or dropped).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Batched, Layer, Mean, Program, Request, Traffic
from regimes.compression.base import HALF, Compressor, Sending, State
from regimes.compression.factors import (
    left_product,
    reconstruct,
    reconstruct_and_subtract_,
    right_product,
)
from regimes.compression.orthonormal import orthonormal
from regimes.config import DENSE, Level
from regimes.errors import require
from regimes.seeding import stream


@dataclass
class PowerState(State):
    """``q``: the right factor of the last step, transposed; the same on every worker."""

    q: Float[Tensor, "rank m"] | None = None


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Rank-r updates; two small means per layer and step, ``(n + m) min(r, n, m)`` floats.

    Attributes:
        reset_on_change: the authors' quirk: a change of level forgets Q, and a change to dense
            forgets the residual instead of sending it.
        wire: the type in which the two factors travel: "full", the model's, or "fp16" or "bf16",
            half the bytes of float32. Error feedback keeps what the rounding loses. Equal between
            simulated and real workers up to rounding, as with ``Cast``, and not linear.
    """

    reset_on_change: bool = False
    wire: str = "full"
    linear: ClassVar[bool] = True
    propagates_nonfinite: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 4, "high": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.wire in ("full", *HALF)
        require(good, "compressor.wire", self.wire, '"full", "fp16" or "bf16"')
        if self.wire != "full":
            # Each worker rounds its own factors before the mean; a large finite factor overflows.
            object.__setattr__(self, "linear", False)
            object.__setattr__(self, "propagates_nonfinite", False)

    def check(self, level: Level) -> None:
        check_rank("PowerSGD", level)

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> PowerState:
        return PowerState((seed, layer.name), first_worker)

    def reduce(self, grad: Tensor, state: State, level: Level) -> Program:
        if self.reset_on_change and level == DENSE:
            state.residual = cast(PowerState, state).q = None
        return super().reduce(grad, state, level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        """Algorithm 1. ``delta`` is the gradient plus the residual, which `reduce` has added."""
        state = cast(PowerState, state)
        q = self._warm_start(state, level, delta)  # [r, m]
        p = yield from self._mean((yield Batched(left_product, q, delta)))  # [r, n]
        p = yield Batched(orthonormal, p)
        q = state.q = yield from self._mean((yield Batched(right_product, p, delta)))
        if self.error_feedback:  # what remains in delta is the residual
            return (yield Batched(reconstruct_and_subtract_, p, q, state, delta)), None
        return (yield Batched(reconstruct, p, q, state)), None

    def _mean(self, factor: Tensor) -> Generator[Request, Any, Tensor]:
        """The mean of the workers' factors; it travels as ``wire``."""
        mean = yield Mean(factor.to(HALF.get(self.wire, factor.dtype)))
        return mean.to(factor.dtype)

    def _warm_start(self, state: PowerState, level: Level, like: Tensor) -> Tensor:
        """The last step's Q, ``[rank, m]``, with rows dropped, or added as seeded normal noise."""
        rank = min(int(level), *like.shape[1:])
        forget = self.reset_on_change and state.q is not None and len(state.q) != rank
        last = None if forget else state.q
        return resize_rows(last, rank, like.shape[-1], like, (*state.key, "q"))

    def finite_probe(self, update: Tensor, state: State, level: Level) -> Tensor:
        return update if level == DENSE else cast(Tensor, cast(PowerState, state).q)

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


def resize_rows(
    rows: Float[Tensor, "old m"] | None, rank: int, width: int, like: Tensor, key: Sequence[Any]
) -> Float[Tensor, "rank m"]:
    """A factor with rows dropped, or added as normal noise that is seeded by ``key``."""
    if rows is not None and len(rows) >= rank:
        return rows[:rank]
    old = [] if rows is None else list(rows)
    fresh = [
        torch.randn(width, generator=stream(*key, row), dtype=like.dtype).to(like.device)
        for row in range(len(old), rank)
    ]
    return torch.stack([*old, *fresh])
