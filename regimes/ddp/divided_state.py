"""The state of a hook on FSDP2's own collectives, for ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regimes.collectives.sharded_models import saved_names
from regimes.compression.scatter import QuantisedScatter
from regimes.ddp.sharded_state import pack_state, unpack_state
from regimes.errors import ConfigError
from regimes.job.move_residuals import Residuals, residuals_for
from regimes.job.refit import damage_refused, list_names, refuse_state
from regimes.job.state import (
    State,
    by_layer,
    get_column,
    layer_shapes,
    own_part,
    place_state,
    with_column,
)
from regimes.precision import full_precision

if TYPE_CHECKING:
    from regimes.ddp.hook import Hook

_PROCESS_ENTRY = re.compile(r"(?:^|\.)process/(\d+)/\d+$")


class DividedState:
    """A ``Stateful`` of DCP: each process's state as bytes, and in an entry of its own what the
    process owes (its residuals), which may be as large as the whole model.

    Loaded on as many processes the job goes on bit for bit. On another number, which needs
    ``saved``, each process takes over a part of what the saved ones owe, such that the mean over
    processes is preserved; and what it owns of the sums of a unit under way.

    Attributes:
        processes: how many have saved the checkpoint that is loaded next; once it is loaded, the
            number of the job.
    """

    def __init__(self, hook: Hook, branch: bool = False, saved: Any = None) -> None:
        self.hook, self.branch = hook, branch
        self.processes = hook.world.processes if saved is None else _saved_processes(saved)

    def state_dict(self) -> dict[str, bytes]:
        """The entries of this process. To load those of another number of processes: their names,
        empty, because DCP loads the entries that it finds here."""
        world, count = self.hook.world, self.processes
        if count != world.processes:
            names = [_entry_name("process", count, i) for i in range(count)]
            return dict.fromkeys(
                [*names, *(_entry_name("owed", count, i) for i in self._saved_sources())], b""
            )
        state = self.hook.state_dict()
        owed = get_column(own_part(state)["layers"], "residual")
        rest = _with_residuals(state, dict.fromkeys(owed))
        found = {"process": pack_state(rest), "owed": pack_state(owed)}
        return {_entry_name(what, count, world.rank): data for what, data in found.items()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """Continue where it was saved; through ``dcp.load``, on all processes, once the model and
        its optimiser have their own states again.

        Raises:
            ConfigError: as ``load_state_dict`` of the hook.
        """
        world, count = self.hook.world, self.processes
        with damage_refused():
            if count == world.processes:
                owed = unpack_state(saved[_entry_name("owed", count, world.rank)])
                state = unpack_state(saved[_entry_name("process", count, world.rank)])
                state = _with_residuals(state, owed)
            else:
                states = [
                    unpack_state(saved[_entry_name("process", count, i)]) for i in range(count)
                ]
                owed_by = {
                    i: unpack_state(saved[_entry_name("owed", count, i)])
                    for i in self._saved_sources()
                }
                state = self._regroup_states(states, owed_by)
        self.hook.load_state_dict(state, branch=self.branch)
        self.processes = world.processes

    def _saved_sources(self) -> range:
        """The saved processes from which this one takes over what they owe."""
        rank, processes = self.hook.world.rank, self.hook.world.processes
        first, stop = rank * self.processes, (rank + 1) * self.processes
        return range(first // processes, -(-stop // processes))

    def _regroup_states(self, states: Sequence[State], owed_by: Mapping[int, Residuals]) -> State:
        """The state of this process, from the states of another number of processes.

        Args:
            owed_by: the residuals of those saved processes from which this one takes over.
        """
        world, layers, first = self.hook.world, self.hook.layers, states[0]
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
            return [*self.hook.layers[layer].shape]
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
            self.hook.world.rank,
        )

    def _layer_layout(self, layer: int) -> Any:
        source: Any = self.hook.source
        return source.layouts[layer]

    @property
    def _of_parts(self) -> bool:
        """Is a residual of the parts of owners, whose shapes depend on the number of processes?"""
        return isinstance(self.hook.chosen.compressor, QuantisedScatter)

    @property
    def _quantiser(self) -> QuantisedScatter:
        return cast(QuantisedScatter, self.hook.chosen.compressor)


def _saved_processes(saved: Any) -> int:
    """How many processes have saved a checkpoint.

    Args:
        saved: its folder, or a ``StorageReader`` of ``torch.distributed.checkpoint``.

    Raises:
        ConfigError: it holds no such state of a hook, or cannot be read.
    """
    found = {int(match[1]) for name in saved_names(saved) if (match := _PROCESS_ENTRY.search(name))}
    if len(found) != 1:
        raise ConfigError(
            f"saved: {saved} has no state of a hook with shards=: save hook.sharded_state() in it"
        )
    return found.pop()


def _entry_name(what: str, processes: int, process: int) -> str:
    return f"{what}/{processes}/{process}"


def _with_residuals(state: State, residuals: Residuals) -> State:
    """The state of one process with these residuals."""
    return {**state, "parts": [{**own_part(state), "layers": by_layer(residual=residuals)}]}
