"""How the gradients of one module are reduced in place of FSDP2's reduce-scatter: all as one
quantised layer, or each parameter as a layer that PowerSGD compresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from regimes.compression.base import State
from regimes.compression.reducer import Reducer
from regimes.compression.scatter import QuantisedScatter
from regimes.config import DENSE, AnyLevel
from regimes.ddp.fsdp_groups import Arrivals, Layout, ParameterGroup
from regimes.precision import full_precision

_Memory = Callable[[int, float], State]  # a layer and its scale: what the step may change


class ModuleReduction(Protocol):
    """The reduction of one module.

    Attributes:
        layers: the module's, by their places among the job's.
    """

    layers: Sequence[int]

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
        ...

    def count_dense(self, output: Float[Tensor, " part"], arrived: Sequence[int]) -> None:
        """Count what torch's own reduce-scatter has sent.

        Args:
            output: of this process.
            arrived: the module's parameters that had a gradient, by their places in the module.
        """
        ...

    def updates_by_layer(
        self, output: Float[Tensor, " part"], arrived: Sequence[int]
    ) -> dict[int, Float[Tensor, " size"]]:
        """What this process owns of the reduced gradient, by layer, in float32 at least; arguments
        as of ``count_dense``."""
        ...


class QuantisedReduction:
    """All parameters of a module as one layer ``[shards, part]``."""

    def __init__(self, layer: int, group: ParameterGroup, layout: Layout, reducer: Reducer) -> None:
        self.layers, self.group, self.layout, self.reducer = [layer], group, layout, reducer

    def reduce_module(
        self, flat: Float[Tensor, " numbers"], levels: Sequence[AnyLevel], memory: _Memory
    ) -> Float[Tensor, " part"] | None:
        (layer,), world = self.layers, self.reducer.world
        compressor, level = self.reducer.at(layer, levels[layer])
        parts = flat.view(1, self.layout.shards, -1)
        kept = memory(layer, self.group.gradient_scale(flat.dtype, self.layout.shards))
        state = kept
        if parts.shape[2] != self.layout.owned_size:  # its residual is of another order of numbers
            state = kept.twin()
            state.residual = None
        total = None
        if level != DENSE and isinstance(compressor, QuantisedScatter):
            program = compressor.reduce(parts, state, level)
            total = world.run_programs([program], [layer])[0]
        else:
            if state.residual is not None and isinstance(compressor, QuantisedScatter):
                parts.copy_(compressor.add_residual(parts, state))
            state.step += 1
        kept.step = state.step
        return total

    def count_dense(self, output: Float[Tensor, " part"], arrived: Sequence[int]) -> None:
        sent = output.expand(1, self.layout.shards, -1)
        self.reducer.world.meter.count_request(self.layers[0], "scatter", sent)

    def updates_by_layer(
        self, output: Float[Tensor, " part"], arrived: Sequence[int]
    ) -> dict[int, Float[Tensor, " size"]]:
        update, missing = full_precision(output), self.layout.owned_size - len(output)
        if missing > 0:
            update = torch.nn.functional.pad(update, (0, missing))
        return {self.layers[0]: update}


class MatrixReduction:
    """Each parameter of a module as a layer of its whole shape: each process computes the updates
    of whole matrices and keeps its rows. If some parameters have no gradient in the module's first
    reduction, torch's own runs, because FSDP2 does not say which."""

    def __init__(
        self, layers: Sequence[int], layout: Layout, reducer: Reducer, arrivals: Arrivals
    ) -> None:
        self.layers, self.layout, self.reducer = layers, layout, reducer
        self.arrivals = arrivals

    def reduce_module(
        self, flat: Float[Tensor, " numbers"], levels: Sequence[AnyLevel], memory: _Memory
    ) -> Float[Tensor, " part"] | None:
        world, shards = self.reducer.world, self.layout.shards
        if (present := self.arrivals.take_places()) is None:
            present = [*range(len(self.layers))]
        layout, layers = self.layout.select_parameters(present), [self.layers[i] for i in present]
        if flat.numel() != shards * layout.owned_size:
            return None
        scale = self.arrivals.group.gradient_scale(flat.dtype, shards)
        states = {i: memory(i, scale) for i in layers}
        if all(self._is_dense(i, levels[i]) and states[i].residual is None for i in layers):
            for state in states.values():
                state.step += 1
            return None
        tensors = layout.to_parameters(full_precision(flat).view(shards, -1))
        gradients = {i: x[None] for i, x in zip(layers, tensors, strict=True)}
        means = self.reducer.reduce(layers, gradients, levels, states=states)
        return layout.own_row([means[i] for i in layers], world.rank).mul_(shards)

    def _is_dense(self, layer: int, level: AnyLevel) -> bool:
        return self.reducer.at(layer, level)[1] == DENSE

    def count_dense(self, output: Float[Tensor, " part"], arrived: Sequence[int]) -> None:
        for i in arrived:
            sent = output.new_empty(1).expand(1, self.layout.shards, self.layout.piece_sizes[i])
            self.reducer.world.meter.count_request(self.layers[i], "scatter", sent)

    def updates_by_layer(
        self, output: Float[Tensor, " part"], arrived: Sequence[int]
    ) -> dict[int, Float[Tensor, " size"]]:
        sizes = [self.layout.piece_sizes[i] for i in arrived]
        columns = full_precision(output).split(sizes)
        return {self.layers[i]: column for i, column in zip(arrived, columns, strict=True)}
