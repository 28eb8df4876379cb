"""Low-rank updates by power iteration: PowerSGD and ACP-SGD. The level is the rank."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import (
    Batched,
    JoinShards,
    Layer,
    Mean,
    Program,
    Request,
    SumShards,
    Traffic,
)
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.kernels import (
    left_product,
    orthonormalise,
    reconstruct,
    reconstruct_and_subtract_,
    right_product,
    subtract_product_,
)
from regimes.config import DENSE, Bounds, Level
from regimes.errors import require
from regimes.precision import HALF
from regimes.seeding import make_generator


class LowRank(Compressor):
    """Base of both."""

    replayable: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    usual: ClassVar[Mapping[str, Level]] = {"low": 4, "high": 1}

    def check(self, level: Level) -> None:
        good = level == DENSE or (type(level) is int and level >= 1)
        where = f"level of {type(self).__name__}"
        require(good, where, level, 'a rank, a whole number from 1, or "dense"')


@dataclass
class PowerState(State):
    """``q``: the right factor of the last step, transposed; the same on every worker."""

    q: Float[Tensor, "rank m"] | None = None


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """PowerSGD (Vogels, Karimireddy & Jaggi, 2019, algorithm 1): two small means per layer and
    step, ``(n + m) min(r, n, m)`` floats.

    Each step makes one power iteration that starts from the last step's right factor Q, so that Q
    follows the gradient's leading directions. Differences with the paper: none in the maths; Q
    survives a change of rank (rows are added or dropped). Where a matrix is divided into shards of
    rows, each process has its rows of P; the shards' contributions to Q are added.

    Attributes:
        reset_on_change: the authors' quirk: a change of level forgets Q, and a change to dense
            forgets the residual instead of sending it.
        wire: the type in which the two factors travel: "full", the model's, or "fp16" or "bf16",
            half the bytes of float32. Error feedback keeps what the rounding loses. Equal between
            simulated and real workers up to rounding, as with ``Cast``, and not linear.
    """

    reset_on_change: bool = False
    wire: str = "full"
    propagates_nonfinite: ClassVar[bool] = True
    joins_shards: ClassVar[bool] = True
    memory: ClassVar[type[State]] = PowerState

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.wire in ("full", *HALF)
        require(good, "compressor.wire", self.wire, '"full", "fp16" or "bf16"')
        if self.wire != "full":
            # Each worker rounds its own factors before the mean; a large finite factor overflows.
            object.__setattr__(self, "linear", False)
            object.__setattr__(self, "propagates_nonfinite", False)

    def reduce(self, grad: Tensor, state: State, level: Level) -> Program:
        if self.reset_on_change and level == DENSE:
            state.residual = cast(PowerState, state).q = None
        return super().reduce(grad, state, level)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        """Algorithm 1. ``delta`` is the gradient plus the residual, which `reduce` has added."""
        state = cast(PowerState, state)
        q = self._warm_start(state, level, delta)  # [r, m]
        p = yield from self._mean((yield Batched(left_product, q, delta)))  # [r, n]
        p = yield from self._orthonormal(p, state)
        own = yield Batched(right_product, p, delta)
        q = state.q = yield from self._mean_of_shards(own, state)
        if self.error_feedback:  # what remains in delta is the residual
            return (yield Batched(reconstruct_and_subtract_, p, q, state, delta)), None
        return (yield Batched(reconstruct, p, q, state)), None

    def _mean(self, factor: Tensor) -> Generator[Request, Any, Tensor]:
        """The mean of the workers' factors; it travels as ``wire``."""
        mean = yield Mean(factor.to(HALF.get(self.wire, factor.dtype)))
        return mean.to(factor.dtype)

    def _orthonormal(self, p: Tensor, state: State) -> Generator[Request, Any, Tensor]:
        """This process's part of an orthonormal basis. All shards compute the basis of the joined
        factor, which is the same on each, completed or not."""
        shard = state.shard
        if shard is not None:
            rank, own = len(p), p.mT.reshape(-1)  # row by row of the matrix
            joined = yield JoinShards(own, shard.chunk * rank, shard.rows * rank)
            p = joined.view(-1, rank).mT
        p = yield Batched(orthonormalise, p)
        return p if shard is None else p[:, shard.here]

    def _mean_of_shards(
        self, own: Float[Tensor, "hosted r m"], state: State
    ) -> Generator[Request, Any, Float[Tensor, "r m"]]:
        """The workers' mean of sums over shards. Each shard exchanges its share of the sum, so that
        the worker sends it once."""
        if (shard := state.shard) is None:
            return (yield from self._mean(own))
        share = yield SumShards(own.flatten(1))
        mean = yield from self._mean(share)
        size = own[0].numel()
        joined = yield JoinShards(mean, -(-size // shard.count), size)
        return joined.view(own.shape[1:])

    def _warm_start(self, state: PowerState, level: Level, like: Tensor) -> Tensor:
        """The last step's Q, ``[rank, m]``, with rows dropped, or added as seeded normal noise."""
        rows = like.shape[1] if state.shard is None else state.shard.rows
        rank = min(int(level), rows, like.shape[2])
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


def resize_rows(
    rows: Float[Tensor, "old m"] | None, rank: int, width: int, like: Tensor, key: Sequence[Any]
) -> Float[Tensor, "rank m"]:
    """A factor with rows dropped, or added as normal noise that is seeded by ``key``."""
    if rows is not None and len(rows) >= rank:
        return rows[:rank]
    old = [] if rows is None else list(rows)
    fresh = [
        torch.randn(width, generator=make_generator(*key, row), dtype=like.dtype).to(like.device)
        for row in range(len(old), rank)
    ]
    return torch.stack([*old, *fresh])


@dataclass
class AlternatingState(State):
    """``factor``: the mean that was sent last, the same on every worker; P transposed where
    ``is_left``, else Q."""

    factor: Float[Tensor, "rank side"] | None = None
    is_left: bool = False


@dataclass(frozen=True, kw_only=True)
class ACPSGD(LowRank):
    """ACP-SGD (Zhang et al., ICDCS 2023): P in one step, Q in the next. On average a step sends
    ``(n + m) min(r, n, m) / 2`` floats, half of PowerSGD's, in one mean instead of two that depend
    on each other.

    Such a half-iteration sends one factor and takes the other from the half before. A worker's
    residual is against its own factor, not the mean: it is subtracted before the mean arrives. So a
    step may have several halves, each on what the one before has left; two are
    ``num_iters_per_step = 2`` of epfml/powersgd.

    Attributes:
        iterations: half-iterations per step. Two cost what PowerSGD costs, and approximate by up to
            twice the rank.
    """

    iterations: Annotated[int, Bounds("a whole number from 1", low=1)] = 1
    phases: ClassVar[int] = 2
    memory: ClassVar[type[State]] = AlternatingState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations % 2 == 0:  # each step sends as many P as Q, and P last
            object.__setattr__(self, "phases", 1)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        state, several = cast(AlternatingState, state), self.iterations > 1
        rank = min(int(level), *delta.shape[1:])
        rest = delta.clone() if several and not self.error_feedback else delta
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        for half in range(self.iterations):
            side, name = (1, "p") if state.is_left else (2, "q")
            key = (*state.key, name)
            last = resize_rows(state.factor, rank, delta.shape[side], delta, key)
            basis = yield Batched(orthonormalise, last)
            own = yield Batched(right_product if state.is_left else left_product, basis, rest)
            if self.error_feedback or half < self.iterations - 1:
                p, q = _in_order(state, own, basis.expand(len(own), -1, -1))
                yield Batched(subtract_product_, p, q, rest)
            mean = yield Mean(own)
            p, q = _in_order(state, mean, basis)
            lefts.append(p)
            rights.append(q)
            state.factor, state.is_left = mean, not state.is_left
        p, q = (torch.cat(x) if several else x[0] for x in (lefts, rights))
        return (yield Batched(reconstruct, p, q, state)), None

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The mean of two steps; where ``iterations`` is odd, one sends P and the other Q."""
        n, m = layer.matrix
        twice = self.iterations * (n + m) * min(int(level), n, m)
        return Traffic(twice / 2, twice * itemsize // 2)

    def phase(self, state: State) -> int:
        """1 where P was sent last, 0 where Q was."""
        return int(cast(AlternatingState, state).is_left)


def _in_order(state: AlternatingState, new: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The two as (P, Q); the new one is Q where the last was P."""
    return (basis, new) if state.is_left else (new, basis)
