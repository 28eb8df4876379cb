"""Reduce-scatter of compressed gradients among the processes that divide a model.

Quantised, it is the first phase of the quantised all-reduce alone. Each worker owns a part of the
numbers. All send their quantised numbers of a part to its owner, which decodes them and adds them
up in float32 at least (ZeRO++'s qgZ, Wang et al., 2023, without its hierarchy of nodes). Nothing is
gathered: the parameters are divided as the sums are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.capabilities import MODULE_PARTS
from regimes.collectives.requests import Layer, Program, Scatter, Traffic
from regimes.compression.all_reduce import (
    QuantisedAllReduce,
    dequantise_rows,
    in_order_sum,
    quantise_rows,
    wire_bytes,
)
from regimes.compression.base import Sending, State
from regimes.config import DENSE, Bounds, Level


@dataclass
class ScatterState(State):
    """``residual_scale``: the ``scale`` of the step that has left the residual."""

    residual_scale: float = 1.0

    @property
    def residual_unit(self) -> float:
        return self.residual_scale

    def rescale_residual(self, ratio: float) -> None:
        self.residual_scale *= ratio


@dataclass(frozen=True, kw_only=True)
class QuantisedScatter(QuantisedAllReduce):
    """Integers of 8 or 4 bits, scaled by the largest magnitude of each block, which one part has
    alone; the level is the number of bits. Rounding errs as in `QuantisedAllReduce`, once.

    Attributes:
        block: how many numbers share a scale.
        error_feedback: each worker adds to its gradient what rounding took from its earlier ones,
            a number for each parameter of the whole model, not of a shard, on each process.
        residual_bits: of each of these numbers in memory: 16 keeps it in bfloat16, 8 as an integer
            with a scale for each block, both rounded to the nearest; None in the type of the sums.
    """

    block: Annotated[int, Bounds("a whole number from 1", low=1)] = 64
    takes_bucket: ClassVar[bool] = False
    residual_bits: Literal[16, 8] | None = None
    in_place: ClassVar[bool] = False
    memory: ClassVar[type[State]] = ScatterState

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {MODULE_PARTS}

    def send(
        self, delta: Float[Tensor, "hosted workers part"], state: State, level: Level
    ) -> Sending:
        """Returns the sum of the hosted worker's part, ``[part]``, beside what was sent, None
        without error feedback."""
        total, own = yield from self.send_parts(delta, state, level)
        return total[0], own

    def send_parts(
        self, delta: Float[Tensor, "hosted workers part"], state: State, level: Level
    ) -> Sending:
        """Likewise of each hosted worker, ``[hosted, part]``."""
        noise = yield from self._noise(delta.flatten(1), state, "numbers")
        own = None
        if self.error_feedback:
            own = torch.empty_like(delta, memory_format=torch.contiguous_format)
        wire = quantise_rows(delta, int(level), self.block, noise, own)
        received = yield Scatter(wire)  # [L, W, bytes]: of all workers, this one's part
        size = delta.shape[2]
        return in_order_sum(received, int(level), self.block, size, delta.dtype), own

    def reduce(
        self, grad: Float[Tensor, "hosted workers part"], state: State, level: Level
    ) -> Program:
        """The sum of the hosted worker's part over all workers, ``[part]``, in float32 at least;
        ``grad`` and the residual's memory are left as they are. Not for the level "dense", see
        ``add_residual``."""
        exact = self.add_residual(grad, state)
        state.step += 1
        total, own = yield from self.send(exact, state, level)
        if own is not None:
            state.residual = self.stored(torch.sub(exact, own, out=own))
            cast(ScatterState, state).residual_scale = state.scale
        return total

    def add_residual(self, grad: Tensor, state: State) -> Tensor:
        """The gradient in float32 at least, with what earlier steps have not sent, which is then
        taken from the memory."""
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if state.residual is not None:
            held = self._numbers(state.residual, exact.shape[2]).to(exact.dtype)
            ratio = state.scale / state.residual_unit
            exact = torch.add(exact, held, alpha=float(self.error_feedback or True) * ratio)
            state.residual = None
        return exact

    # -- the residual in memory ------------------------------------------------------------------

    def stored(self, left: Float[Tensor, "hosted workers part"]) -> Tensor:
        """A residual as it is kept."""
        if self.residual_bits == 8:
            return quantise_rows(left.float(), 8, self.block, 0.5)
        return left.to(torch.bfloat16) if self.residual_bits == 16 else left

    def numbers(self, residual: Tensor, layer: Layer) -> Tensor:
        return self._numbers(residual, layer.matrix[1])

    def _numbers(self, residual: Tensor, part: int) -> Float[Tensor, "hosted workers part"]:
        if self.residual_bits == 8:
            return dequantise_rows(residual, 8, self.block, part, torch.float32)
        return residual

    def residual_shape(self, layer: Layer) -> tuple[int, ...]:
        if self.residual_bits == 8:
            workers, part = layer.matrix
            return workers, wire_bytes(part, 8, self.block)
        return super().residual_shape(layer)

    # -- traffic -----------------------------------------------------------------------------------

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

    def table(self) -> dict[str, Any]:
        """In plain types."""
        return {"level": self.level, "block": self.block}


@dataclass(frozen=True)
class WithinReplicas:
    """How the processes of a replica exchange gradients and weights.

    Attributes:
        compressor, level: of gradients; "dense" is FSDP2's own reduce-scatter.
    """

    compressor: QuantisedScatter
    level: Level
    weights: Weights

    def table(self) -> dict[str, Any]:
        """In plain types."""
        scatter: dict[str, Any] = {"level": self.level}
        if self.level != DENSE:
            made = self.compressor
            scatter |= {"block": made.block, "stochastic": made.stochastic}
        return {"scatter": scatter, "gather": self.weights.table()}
