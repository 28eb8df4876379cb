"""How the gradients of one module are reduced in place of FSDP2's reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.collectives.comm import Comm
from regimes.collectives.layers import Piece
from regimes.compression.bucket import State
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import QuantisedScatter, ScatterState
from regimes.config import DENSE, AnyLevel
from regimes.ddp.fsdp_groups import Layout, ParameterGroup
from regimes.precision import full_precision

_Memory = Callable[[int, float], State]  # a layer and its scale: what the step may change


class QuantisedReduction:
    """All parameters of a module as one layer ``[shards, part]``."""

    def __init__(self, layer: int, group: ParameterGroup, layout: Layout, reducer: Reducer) -> None:
        self.layer, self.group, self.layout, self.reducer = layer, group, layout, reducer

    def reduce_module(
        self, flat: Float[Tensor, " numbers"], levels: Sequence[AnyLevel], memory: _Memory
    ) -> Float[Tensor, " part"] | None:
        """The sum over all processes of what this one owns, in float32 at least.

        Args:
            flat: ``[shards * part]``, without parameters that have no gradient.
            levels: of all layers.

        Returns:
            None: torch's own reduce-scatter is to run, of ``flat``, which may have changed.
        """
        layer, world = self.layer, self.reducer.world
        compressor, level = self.reducer.at(layer, levels[layer])
        parts = flat.view(1, self.layout.shards, -1)
        kept = memory(layer, self.group.gradient_scale(flat.dtype, self.layout.shards))
        state, pieces = kept, self._arrived_pieces()
        if parts.shape[2] != self.layout.owned_size:  # its residual is of another order of numbers
            state = kept.twin()
            state.residual = None
            if isinstance(state, ScatterState):
                state.pieces = pieces
        known = parts.shape[2] == sum(piece.size for piece in pieces)
        rounds = known and any(piece.compressed for piece in pieces)
        total = None
        if rounds and level != DENSE and isinstance(compressor, QuantisedScatter):
            total = compressor.reduce(parts, state, level, Comm(world, [layer]))
        else:
            if state.residual is not None and isinstance(compressor, QuantisedScatter):
                parts.copy_(compressor.with_residual(parts, state))
            state.step += 1
        kept.step = state.step
        return total

    def _arrived_pieces(self) -> tuple[Piece, ...]:
        """Of the parameters that have a gradient in this pass."""
        pieces, arriving = self.layout.pieces, self.group.arriving
        return tuple(compress(pieces, arriving)) if arriving else pieces

    def count_dense(self, output: Float[Tensor, " part"]) -> None:
        """Count what torch's own reduce-scatter sends for this process's output."""
        sent = output.expand(1, self.layout.shards, -1)
        self.reducer.world.meter.count_request(self.layer, "scatter", sent)

    def update_of(self, output: Float[Tensor, " part"]) -> Float[Tensor, " size"]:
        """What this process owns of the reduced gradient, in float32 at least."""
        update, missing = full_precision(output), self.layout.owned_size - len(output)
        return torch.nn.functional.pad(update, (0, missing)) if missing > 0 else update
