"""How the gradients of one module are reduced in place of FSDP2's reduce-scatter: quantised, the
parts of their owners; by other compressors whole, as DDP's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.base.config import DENSE, AnyLevel
from regimes.base.precision import full_precision
from regimes.collectives.comm import Comm
from regimes.compression.bucket import State
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import QuantisedScatter, ScatterState
from regimes.hook.fsdp.groups import FlatLayout, ParameterGroup

_Numbers = Float[Tensor, " numbers"]
_Memory = Callable[[int, float], State]  # a layer and its scale: what the step may change


class QuantisedReduction:
    """Reduces all parameters of a module as one layer ``[shards, part]``."""

    def __init__(
        self, layer: int, group: ParameterGroup, layout: FlatLayout, reducer: Reducer
    ) -> None:
        self.layer, self.group, self.layout, self.reducer = layer, group, layout, reducer

    def reduce_module(
        self, flat: Float[Tensor, " numbers"], levels: Sequence[AnyLevel], memory: _Memory
    ) -> Float[Tensor, " part"] | None:
        """Return the sum over all processes of what this one owns, ``[part]``, in float32 at least.

        Args:
            flat: ``[shards * part]``, without parameters that have no gradient.
            levels: of all layers.

        Returns:
            None: torch's own reduce-scatter is to run, of ``flat``, which may have changed.
        """
        layer, world = self.layer, self.reducer.world
        compressor, level = self.reducer.resolve_level(layer, levels[layer])
        parts = flat.view(1, self.layout.shards, -1)
        kept = memory(layer, self.group.gradient_scale(flat.dtype, self.layout.shards))
        state, pieces = kept, self.layout.pieces
        if self.group.arriving:  # of the parameters that have a gradient in this pass
            pieces = tuple(compress(pieces, self.group.arriving))
        if parts.shape[2] != self.layout.owned_size:  # its residual is of another order of numbers
            state = kept.copy_for_step()
            state.residual = None
            if isinstance(state, ScatterState):
                state.pieces = pieces
        known = parts.shape[2] == sum(piece.size for piece in pieces)
        rounds = known and any(piece.compressed for piece in pieces)
        total = None
        if isinstance(compressor, QuantisedScatter):
            if rounds and level != DENSE:
                total = compressor.reduce(parts, state, level, Comm(world, [layer]))
            elif state.residual is not None:
                parts.copy_(compressor.with_residual(parts, state))
        if total is None:
            state.step += 1
        kept.step = state.step
        return total

    def count_dense(self, output: Float[Tensor, " part"]) -> None:
        """Count what torch's own reduce-scatter sends for this process's output."""
        sent = output.expand(1, self.layout.shards, -1)
        self.reducer.world.meter.count_request(self.layer, "scatter", sent)

    def updates_of(self, output: Float[Tensor, " part"]) -> dict[int, _Numbers]:
        """Return by layer what this process owns of the reduced gradient, in float32 at least."""
        update, missing = full_precision(output), self.layout.owned_size - len(output)
        padded = torch.nn.functional.pad(update, (0, missing)) if missing > 0 else update
        return {self.layer: padded}


class WholeReduction:
    """Reduces each parameter of a module as a layer. Whole gradients are exchanged as in a bucket
    of DDP, and each process keeps its rows of their mean."""

    def __init__(
        self, layers: Sequence[int], group: ParameterGroup, layout: FlatLayout, reducer: Reducer
    ) -> None:
        self.layers, self.group, self.layout, self.reducer = layers, group, layout, reducer
        self.arrived, self.here = layers, layout  # in the last reduce-scatter

    def reduce_module(
        self, flat: _Numbers, levels: Sequence[AnyLevel], memory: _Memory
    ) -> Float[Tensor, " part"] | None:
        """Reduce like ``QuantisedReduction.reduce_module``."""
        places = [*compress(range(len(self.layers)), self.group.arriving)]
        self.here = here = self.layout.only(places)
        self.arrived = layers = [self.layers[i] for i in places]
        reducer, parts = self.reducer, flat.view(here.shards, -1)
        scale = self.group.gradient_scale(flat.dtype, here.shards)
        states = {i: memory(i, scale) for i in layers}
        whole = here.to_parameters(full_precision(parts))
        gradients = {i: x[None] for i, x in zip(layers, whole, strict=True)}
        chosen = {i: reducer.resolve_level(i, levels[i]) for i in layers}
        if any(chosen[i][1] != DENSE and reducer.layers[i].compressed for i in layers):
            means = reducer.reduce(layers, gradients, levels)
            world = reducer.world
            return here.own_row([means[i] for i in layers], world.rank) * world.workers
        owing = any(state.residual is not None for state in states.values())
        reducer.set_rates(layers)
        sent = [chosen[i][0].send_whole(gradients[i], states[i], reducer.scale) for i in layers]
        if owing:
            own = [x.view(shape) for x, shape in zip(sent, here.shapes, strict=True)]
            parts.copy_(here.from_parameters(own))
        return None

    def count_dense(self, output: Float[Tensor, " part"]) -> None:
        """Count like ``QuantisedReduction.count_dense``."""
        shards = self.here.shards
        sizes = [shards * size for size in self.here.piece_sizes]
        sent = output.expand(1, shards, -1)
        self.reducer.world.meter.count_request(self.arrived, "scatter", sent, sizes=sizes)

    def updates_of(self, output: Float[Tensor, " part"]) -> dict[int, _Numbers]:
        """Return updates like ``QuantisedReduction.updates_of``."""
        own = full_precision(output).split(self.here.piece_sizes)
        return dict(zip(self.arrived, own, strict=True))
