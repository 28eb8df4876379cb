"""ACP-SGD (Zhang et al., ICDCS 2023): power iteration by halves, one factor and one mean each.

The level is the rank. PowerSGD sends P and then Q, which depends on P; a half-iteration sends one
of them and takes the other from the half before. A worker's residual is against its own factor, not
the mean: it is subtracted before the mean arrives. So a step may have several halves, each on what
the one before has left; two are ``num_iters_per_step = 2`` of epfml/powersgd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.requests import Batched, Layer, Mean, Traffic
from regimes.compression.base import Compressor, Sending, State
from regimes.compression.factors import (
    left_product,
    reconstruct,
    right_product,
    subtract_product_,
)
from regimes.compression.orthonormal import orthonormal
from regimes.compression.powersgd import check_rank, resize_rows
from regimes.config import Level
from regimes.errors import require


@dataclass
class AlternatingState(State):
    """``factor``: the mean that was sent last, the same on every worker; P transposed where
    ``is_left``, else Q."""

    factor: Float[Tensor, "rank side"] | None = None
    is_left: bool = False


@dataclass(frozen=True, kw_only=True)
class ACPSGD(Compressor):
    """P in one step, Q in the next: ``(n + m) min(r, n, m) / 2`` floats a step on average, half of
    PowerSGD's, and one small mean in place of two that depend on each other.

    Attributes:
        iterations: half-iterations per step. Two cost what PowerSGD costs, and approximate by up to
            twice the rank.
    """

    iterations: int = 1
    linear: ClassVar[bool] = True
    phases: ClassVar[int] = 2
    usual: ClassVar[Mapping[str, Level]] = {"low": 4, "high": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.iterations >= 1
        require(good, "compressor.iterations", self.iterations, "a whole number from 1")

    def check(self, level: Level) -> None:
        check_rank("ACP-SGD", level)

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> AlternatingState:
        return AlternatingState((seed, layer.name), first_worker)

    def send(self, delta: Float[Tensor, "hosted n m"], state: State, level: Level) -> Sending:
        state, several = cast(AlternatingState, state), self.iterations > 1
        rank = min(int(level), *delta.shape[1:])
        rest = delta.clone() if several and not self.error_feedback else delta
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        for half in range(self.iterations):
            basis = yield Batched(orthonormal, _last_factor(state, rank, delta))
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
        """The mean of two steps, of which one sends P and one Q where ``iterations`` is odd."""
        n, m = layer.matrix
        twice = self.iterations * (n + m) * min(int(level), n, m)
        return Traffic(twice / 2, twice * itemsize // 2)

    def phase(self, state: State) -> int:
        """1 where P was sent last, 0 where Q was."""
        return int(cast(AlternatingState, state).is_left)


def _last_factor(state: AlternatingState, rank: int, like: Float[Tensor, "hosted n m"]) -> Tensor:
    """The factor of the last half, ``[rank, n or m]``; random at first."""
    side, name = (1, "p") if state.is_left else (2, "q")
    return resize_rows(state.factor, rank, like.shape[side], like, (*state.key, name))


def _in_order(state: AlternatingState, new: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The two as (P, Q); the new one is Q where the last was P."""
    return (basis, new) if state.is_left else (new, basis)
