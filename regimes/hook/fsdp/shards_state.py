"""The state of a hook on FSDP2's own collectives, for ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regimes.base.precision import full_precision
from regimes.compression.scatter import QuantisedScatter
from regimes.job.fit_state import list_names, refuse_state
from regimes.job.move_residuals import Residuals, residuals_for
from regimes.job.process_states import ProcessStates
from regimes.job.state import (
    State,
    by_layer,
    get_column,
    layer_shapes,
    own_part,
    place_state,
    with_column,
)

if TYPE_CHECKING:
    from regimes.hook.ddp.hook import Hook


class DividedState(ProcessStates):
    """Saves and loads the state of a hook on FSDP2's own collectives. If another number of
    processes has saved it, each process also takes over what it owns of the sums of a unit under
    way, and the layers have other shapes."""

    job: Hook

    def _regroup_states(self, states: Sequence[State], owed_by: Mapping[int, Residuals]) -> State:
        """The state of this process, from the states of another number of processes.

        Args:
            owed_by: the residuals of those saved processes from which this one takes over.
        """
        world, layers, first = self.job.world, self.job.layers, states[0]
        was = get_column(first["layers"], "shape")
        if unmatched := was.keys() ^ {layer.name for layer in layers}:
            refuse_state(f"{list_names(sorted(unmatched))} is trained by one of the two jobs alone")
        for i, layer in enumerate(layers):
            if was[layer.name] != self._layer_shape(i, len(states)):
                refuse_state(
                    f"it was saved for another model: layer {layer.name!r} has shape "
                    f"{was[layer.name]} in the state, expected {self._layer_shape(i, len(states))}"
                )
        parts = []
        for process, owed in owed_by.items():
            numbers = {x.name: self._to_numbers(i, owed[x.name]) for i, x in enumerate(layers)}
            parts.append({"workers": [process], "layers": by_layer(residual=numbers)})
        mine = residuals_for(world.hosted, world.workers, parts, len(states), was)
        residuals = {x.name: self._from_numbers(i, mine[x.name]) for i, x in enumerate(layers)}
        table = with_column(first["layers"], "shape", layer_shapes(layers))
        part = {**own_part(first), "layers": by_layer(residual=residuals)}
        if part["sums"]:
            places = {name: i for i, name in enumerate(was)}
            every = [own_part(state)["sums"]["update"] for state in states]
            columns = [[sums[places[x.name]] for sums in every] for x in layers]
            part["sums"] = {"update": [self._owned_sum(i, rows) for i, rows in enumerate(columns)]}
        state = {**first, "workers": world.workers, "layers": table, "parts": [part]}
        return place_state(state, world.rank, world.processes, world.hosted)

    # -- one layer: as each process has it, and as the numbers of whole parameters ---------------

    def _layer_shape(self, layer: int, processes: int) -> list[int]:
        """The shape of a layer where so many processes divide the model."""
        if not self._of_parts:
            return [*self.job.layers[layer].shape]
        return [processes, self._layer_layout(layer).with_shards(processes).owned_size]

    def _to_numbers(self, layer: int, residual: Tensor | None) -> Tensor | None:
        """A saved process's residual as numbers, ``[1, numbers]``, or of a whole layer."""
        if residual is None or not self._of_parts:
            return residual
        layout = self._layer_layout(layer).with_shards(self.processes)
        parts = full_precision(self._quantiser.numbers(residual, layout.make_layer("")))
        return torch.cat([x.flatten() for x in layout.to_parameters(parts[0])])[None]

    def _from_numbers(self, layer: int, numbers: Tensor | None) -> Tensor | None:
        """The inverse of `_to_numbers`, on this job's number of processes."""
        if numbers is None or not self._of_parts:
            return numbers
        layout = self._layer_layout(layer)
        flat = numbers[0].split([math.prod(shape) for shape in layout.shapes])
        tensors = [x.view(shape) for x, shape in zip(flat, layout.shapes, strict=True)]
        return self._quantiser.stored(layout.from_parameters(tensors)[None], layout.pieces)

    def _owned_sum(self, layer: int, rows: Sequence[Tensor]) -> Tensor:
        """What this process owns of a sum, from what each saved one owned."""
        layout = self._layer_layout(layer)
        return layout.own_row(
            layout.with_shards(len(rows)).to_parameters(torch.stack(list(rows))),
            self.job.world.rank,
        )

    def _layer_layout(self, layer: int) -> Any:
        source: Any = self.job.source
        return source.layouts[layer]

    @property
    def _of_parts(self) -> bool:
        """Is a residual of the parts of owners, whose shapes depend on the number of processes?"""
        return isinstance(self.job.chosen.compressor, QuantisedScatter)

    @property
    def _quantiser(self) -> QuantisedScatter:
        return cast(QuantisedScatter, self.job.chosen.compressor)
