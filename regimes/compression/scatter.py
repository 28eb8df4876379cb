"""Reduce-scatter of compressed gradients among the processes that divide a model.

Quantised, it is the first phase of the quantised all-reduce alone. Each worker owns a part of the
numbers. All send their quantised numbers of a part to its owner, which decodes them and adds them
up in float32 at least (ZeRO++'s qgZ, Wang et al., 2023, without its hierarchy of nodes). Nothing is
gathered: the parameters are divided as the sums are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.capabilities import MODULE_PARTS
from regimes.base.config import DENSE, Bounds, Level
from regimes.collectives.comm import Comm
from regimes.collectives.layers import Layer, Piece, Traffic
from regimes.compression.all_reduce import QuantisedAllReduce
from regimes.compression.bucket import Bucket, State
from regimes.compression.pieces import Pieces, make_pieces


@dataclass
class ScatterState(State):
    """Holds the memory of a layer of `QuantisedScatter`.

    Attributes:
        residual_scale: The ``scale`` of the step that has left the residual.
        pieces: The pieces of parameters in one worker's part. Checkpoints leave them out.
    """

    residual_scale: float = 1.0
    pieces: tuple[Piece, ...] = ()

    @property
    def residual_unit(self) -> float:
        return self.residual_scale

    def rescale_residual(self, ratio: float) -> None:
        self.residual_scale *= ratio

    def shared_state(self) -> dict[str, Any]:
        shared = super().shared_state()
        del shared["pieces"]
        return shared


@dataclass(frozen=True, kw_only=True)
class QuantisedScatter(QuantisedAllReduce):
    """Sends integers of 8 or 4 bits in a reduce-scatter of FSDP2. The level is the number of bits.

    The numbers of a block are scaled by its largest magnitude s. A block belongs to one part of one
    parameter. A number is sent as a multiple of s / n, with n = 2^(bits - 1) - 1, and is rounded
    once, by default up or down at random, so that the error is zero in the mean. The sums that the
    owners of the parts keep are not rounded. Parameters of one dimension travel as they are.

    Attributes:
        block: The number of numbers that share a scale.
        error_feedback: Add to each worker's gradient what rounding took from its earlier ones. This
            keeps a number for each parameter of the whole model, not of a shard, on each process.
        residual_bits: The bits of each of these numbers in memory. 16 keeps it in bfloat16, and 8
            as an integer with a scale for each block, both rounded to the nearest. None: in the
            type of the sums.
    """

    block: Annotated[int, Bounds("a whole number from 1", low=1)] = 64
    residual_bits: Literal[16, 8] | None = None
    in_place: ClassVar[bool] = False
    memory: ClassVar[type[State]] = ScatterState

    @property
    def requires(self) -> frozenset[str]:
        """Name the capabilities that a job must offer: besides those of all compressors
        "module_parts", which only FSDP2 gives."""
        return super().requires | {MODULE_PARTS}

    def init(self, layer: Layer, seed: int, first_worker: int = 0) -> State:
        state = super().init(layer, seed, first_worker)
        if isinstance(state, ScatterState):
            state.pieces = layer.pieces
        return state

    def exchange(self, bucket: Bucket, comm: Comm) -> list[Tensor]:
        """Send the parts of each layer to their owners; return, for each layer, the sum of the part
        that the hosted worker owns, ``[part]``. This is a sum over workers, not a mean."""
        pieces = [
            self._pieces(delta, state, bucket.level)
            for delta, state in zip(bucket.deltas, bucket.states, strict=True)
        ]
        return [total[0] for total in self.sum_parts(bucket.deltas, bucket.states, pieces, comm)]

    def sum_parts(
        self,
        deltas: Sequence[Float[Tensor, "hosted workers _"]],
        states: Sequence[State],
        pieces: Sequence[Pieces],
        comm: Comm,
    ) -> list[Float[Tensor, "hosted _"]]:
        """Return, for each layer, the sum over all workers of the part that a hosted worker owns,
        ``[L, part]``. With error feedback the deltas, ``[L, W, part]``, become what was not
        sent."""
        hosted, workers, _ = deltas[0].shape
        wires = []
        for delta, state, own in zip(deltas, states, pieces, strict=True):
            drawn = delta.new_empty(1).expand(hosted, workers * own.width)
            noise = self._noise(drawn, state, "numbers")
            if isinstance(noise, Tensor):
                noise = noise.view(hosted * workers, own.width)
            rows = delta.flatten(0, 1)
            wire = own.encode(rows, noise, rows if self.error_feedback else None)
            wires.append(wire.unflatten(0, (hosted, workers)))
            del noise, rows, wire  # and their memory
        received = comm.all_to_all(wires, owner_keeps=True)  # of all, this one's parts
        return [own.sum(x, deltas[0].dtype) for own, x in zip(pieces, received, strict=True)]

    def reduce(
        self, grad: Float[Tensor, "hosted workers part"], state: State, level: Level, comm: Comm
    ) -> Float[Tensor, " part"]:
        """Return the sum over all workers of the part that the hosted worker owns, ``[part]``, in
        float32 or float64. ``grad`` stays as it is. At the level "dense" call ``with_residual``
        instead."""
        exact = self.with_residual(grad, state)
        if self.error_feedback and exact is grad:
            exact = grad.clone()
        state.step += 1
        (total,) = self.sum_parts([exact], [state], [self._pieces(grad, state, level)], comm)
        if self.error_feedback:
            state.residual = self.stored(exact, self._pieces_of(grad, state))
            cast(ScatterState, state).residual_scale = state.scale
        return total[0]

    def with_residual(self, grad: Tensor, state: State) -> Tensor:
        """Return the gradient in float32 or float64, plus the residual. The memory then has no
        residual."""
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if state.residual is not None:
            held = self._numbers(state.residual, self._pieces_of(grad, state)).to(exact.dtype)
            ratio = state.scale / state.residual_unit
            exact = torch.add(exact, held, alpha=float(self.error_feedback or True) * ratio)
            state.residual = None
        return exact

    def _pieces_of(self, parts: Tensor, state: State) -> tuple[Piece, ...]:
        """What a part consists of."""
        return cast(ScatterState, state).pieces or (Piece(parts.shape[2], True),)

    def _pieces(self, parts: Tensor, state: State, level: Level) -> Pieces:
        """How parts travel at a level."""
        return make_pieces(self._pieces_of(parts, state), int(level), self.block, parts.dtype)

    # -- the residual in memory ------------------------------------------------------------------

    def stored(
        self, left: Float[Tensor, "hosted workers part"], pieces: tuple[Piece, ...]
    ) -> Tensor:
        """Return a residual in the form in which the memory keeps it: rounded to
        ``residual_bits``."""
        if self.residual_bits == 8:
            return (
                make_pieces(pieces, 8, self.block)
                .encode(left.float().flatten(0, 1), 0.5)
                .unflatten(0, left.shape[:2])
            )
        return left.to(torch.bfloat16) if self.residual_bits == 16 else left

    def numbers(self, residual: Tensor, layer: Layer) -> Tensor:
        """Return a residual as numbers, from the ``residual_bits`` in which the memory keeps it."""
        return self._numbers(residual, layer.row)

    def _numbers(
        self, residual: Tensor, pieces: tuple[Piece, ...]
    ) -> Float[Tensor, "hosted workers part"]:
        if self.residual_bits == 8:
            kept = make_pieces(pieces, 8, self.block)
            return kept.decode(residual.flatten(0, 1), torch.float32).unflatten(
                0, residual.shape[:2]
            )
        return residual

    def residual_shape(self, layer: Layer) -> tuple[int, ...]:
        """Return the shape in which the residual of one worker is kept in memory: (n, m), or
        (n, bytes of a row) if ``residual_bits`` is 8."""
        if self.residual_bits == 8:
            return layer.matrix[0], make_pieces(layer.row, 8, self.block).bytes
        return super().residual_shape(layer)

    # -- traffic -----------------------------------------------------------------------------------

    def traffic(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return what a worker sends of one layer in one step: the parts of the W - 1 other owners,
        in bytes, and in floats as a quarter of the bytes."""
        kind = {2: torch.bfloat16, 8: torch.float64}.get(itemsize, torch.float32)
        size = (workers - 1) * make_pieces(layer.row, int(level), self.block, kind).bytes
        return Traffic(size / 4, size)

    def cost(self, layer: Layer, level: Level, workers: int, itemsize: int = 4) -> Traffic:
        """Return the traffic of one step of any layer at any level, in floats and bytes. The layer
        may have one dimension, and the level may be "dense". A parameter that would need as many
        bytes quantised travels as it is. The arguments are those of ``traffic``."""
        if level != DENSE and layer.compressed:
            return self.traffic(layer, level, workers, itemsize)
        size = layer.size - layer.size // workers
        return Traffic(size, size * itemsize)


@dataclass(frozen=True)
class WeightGather:
    """Says how weights are gathered.

    Attributes:
        level: the bits of a number, or "dense".
        block: how many numbers share a scale.
    """

    level: Level = DENSE
    block: int = 64

    def table(self) -> dict[str, Any]:
        """Return the fields in plain types."""
        return {"level": self.level, "block": self.block}


@dataclass(frozen=True)
class WithinReplicas:
    """Says how the processes of a replica exchange gradients and weights.

    Attributes:
        compressor, level: of gradients; "dense" is FSDP2's own reduce-scatter.
    """

    compressor: QuantisedScatter
    level: Level
    weights: WeightGather

    def table(self) -> dict[str, Any]:
        """Return the fields in plain types."""
        scatter: dict[str, Any] = {"level": self.level}
        if self.level != DENSE:
            made = self.compressor
            scatter |= {"block": made.block, "stochastic": made.stochastic}
        return {"scatter": scatter, "gather": self.weights.table()}
