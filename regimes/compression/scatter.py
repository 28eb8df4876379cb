"""Reduce-scatter of quantised gradients: the first phase of the quantised all-reduce alone.

Each worker owns a part of the numbers. All send their quantised numbers of a part to its owner,
which decodes them and adds them up in float32 at least (ZeRO++'s qgZ, Wang et al., 2023, without
its hierarchy of nodes). Nothing is gathered: the parameters are divided as the sums are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.capabilities import MODULE_PARTS
from regimes.collectives.requests import Layer, Program, Scatter, Traffic
from regimes.compression.all_reduce import (
    QuantisedAllReduce,
    in_order_sum,
    quantise,
    wire_bytes,
)
from regimes.compression.base import Sending, State
from regimes.config import DENSE, Bounds, Level


@dataclass(frozen=True, kw_only=True)
class QuantisedScatter(QuantisedAllReduce):
    """Integers of 8 or 4 bits, scaled by the largest magnitude of each block, which one part has
    alone; the level is the number of bits. Rounding errs as in `QuantisedAllReduce`, once.

    Attributes:
        block: how many numbers share a scale.
        error_feedback: each worker adds to its gradient what rounding took from its earlier ones.
            That is a number in float32 (float64) for each parameter of the whole model, not of a
            shard, on each process.
    """

    block: Annotated[int, Bounds("a whole number from 1", low=1)] = 64
    takes_bucket: ClassVar[bool] = False

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {MODULE_PARTS}

    def send(
        self, delta: Float[Tensor, "hosted workers part"], state: State, level: Level
    ) -> Sending:
        """Returns the sum of the hosted worker's part, ``[part]``, beside what was sent."""
        total, own = yield from self.send_parts(delta, state, level)
        return total[0], own

    def send_parts(
        self, delta: Float[Tensor, "hosted workers part"], state: State, level: Level
    ) -> Sending:
        """Likewise of each hosted worker, ``[hosted, part]``."""
        noise = yield from self._noise(delta.flatten(1), state, "numbers")
        wire, own = quantise(delta, int(level), self.block, noise)
        received = yield Scatter(wire)  # [L, W, bytes]: of all workers, this one's part
        size = delta.shape[2]
        return in_order_sum(received, int(level), self.block, size, delta.dtype), own

    def reduce(
        self, grad: Float[Tensor, "hosted workers part"], state: State, level: Level
    ) -> Program:
        """The sum of the hosted worker's part over all workers, ``[part]``, in float32 at least;
        ``grad`` is left as it is. Not for the level "dense", see ``add_residual``."""
        exact = self.add_residual(grad, state)
        state.step += 1
        total, own = yield from self.send(exact, state, level)
        if self.error_feedback:
            assert own is not None
            left = exact - own
            # a step that is not finite is skipped, and must not spoil those after it
            state.residual = torch.where(left.isfinite(), left, 0.0)
        return total

    def add_residual(self, grad: Tensor, state: State) -> Tensor:
        """The gradient in float32 at least, with what earlier steps have not sent, which is then
        taken from the memory."""
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if state.residual is not None:
            decay = float(self.error_feedback or True)
            exact = torch.add(exact, state.residual.view(exact.shape), alpha=decay)
            state.residual = None
        return exact

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """The parts of other owners, of a layer ``[workers, part]``."""
        size = (workers - 1) * wire_bytes(layer.size // workers, int(level), self.block, itemsize)
        return Traffic(size / 4, size)

    def cost(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        if level != DENSE:
            return self.traffic(layer, level, workers, itemsize)
        size = layer.size - layer.size // workers
        return Traffic(size, size * itemsize)


@dataclass(frozen=True)
class Weights:
    """How weights are gathered.

    Attributes:
        level: the bits of a number, or "dense".
        block: how many numbers share a scale.
    """

    level: Level = DENSE
    block: int = 64
