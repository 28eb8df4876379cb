"""The state of a hook on a sharded model, for ``torch.distributed.checkpoint`` (DCP).

It is the state of ``job.state`` with its large parts as sharded tensors: a replica's residuals, and
the norm's sums, which all replicas have alike. DCP divides them anew where the number of shards has
changed. All else is saved as the bytes of process 0, with a part for each shard of the first
replica: the record's pending rows are there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regimes.base.errors import ConfigError
from regimes.base.torch_compat import foreach_copy_
from regimes.collectives.layers import Layer
from regimes.collectives.sharded_models import local_part, saved_names, sharded_tensor
from regimes.hook.ddp.node_state import shard_memories, sum_meters
from regimes.job.fit_state import damage_as_error, refuse_state
from regimes.job.move_residuals import Residuals, overlaps, residuals_for
from regimes.job.process_states import pack_state, unpack_state
from regimes.job.state import (
    by_layer,
    check_format,
    get_column,
    own_part,
    place_state,
    with_column,
)

if TYPE_CHECKING:
    from regimes.hook.ddp.hook import Hook

_SHARED = "shared"  # the key of the bytes
_RESIDUAL = re.compile(r"(?:^|\.)residuals/(\d+)/")


class ShardedState:
    """Is a ``Stateful`` of DCP: save and load it with model and optimiser, on all processes::

        dcp.save({"model": ..., "hook": hook.sharded_state()}, checkpoint_id=folder)

    Loaded on the same mesh, the job goes on bit for bit; on another number of shards with the same
    numbers, but that compressors which see each shard by itself begin with an empty memory. On
    another number of replicas, which ``saved`` tells, each replica takes over a part of the saved
    ones' residuals such that their mean over replicas is preserved.

    Attributes:
        replicas: of the checkpoint that is loaded next; once it is loaded, of the job.
    """

    def __init__(self, hook: Hook, branch: bool = False, saved: Any = None) -> None:
        self.hook, self.branch = hook, branch
        self.replicas = hook.world.workers
        if saved is not None and any(map(self._keeps_residual, hook.layers)):
            self.replicas = _saved_replicas(saved)

    def state_dict(self) -> dict[str, Any]:
        """Return the sharded tensors, by replica and layer, and the bytes of all else; all
        processes call this.

        Raises:
            ConfigError: within a unit, when the signal is not "update".
        """
        hook, world = self.hook, self.hook.world
        world.guard.enter_call("sharded_state()")
        if not self._sums_known() and hook.schedule.is_over(hook.steps.in_unit):
            hook._finish_unit()
        if not self._sums_known():
            raise ConfigError(
                "sharded_state: the sums of this signal cannot be saved within a unit: save after "
                f"a multiple of {hook.schedule.steps} steps, or choose the signal 'update'"
            )
        state = hook.state_dict()
        own = own_part(state)
        residuals, sums = get_column(own["layers"], "residual"), own["sums"].get("update")
        # a shard's memories may be its own; the tensors stand beside these bytes
        memories = by_layer(memory=get_column(state["layers"], "memory"))
        mine = {**own, "layers": memories, "sums": {}}
        first = world.gather_object(mine)[: world.shards]  # the processes of the first replica
        table = {key: get_column(state["layers"], key) for key in ("shape", "level")}
        plain = {
            **state,
            "layers": by_layer(**table),
            "shards": world.shards,
            "summed": sums is not None,
            "parts": first,
        }
        everything = world.gather_object(pack_state(plain) if world.rank == 0 else None)[0]
        parts = world.local_layers(hook.layers)
        tensors = {}
        for i, (layer, part) in enumerate(zip(hook.layers, parts, strict=True)):
            for replica in self._saved_sources() if self._keeps_residual(layer) else ():
                kept = residuals[layer.name] if self.replicas == world.workers else None
                rows = self._new_zeros(part.matrix) if kept is None else kept[0].view(part.matrix)
                tensors[f"residuals/{replica}/{layer.name}"] = self._as_sharded(rows, layer.matrix)
            total = self._new_zeros(part.shape) if sums is None else sums[i]
            tensors[f"sums/{layer.name}"] = self._as_sharded(total.view(part.shape), layer.shape)
        return {**tensors, _SHARED: everything}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where the state was saved; all processes call this, through ``dcp.load``.

        Raises:
            ConfigError: it is of another model, compressor, policy or number of replicas.
        """
        hook, world = self.hook, self.hook.world
        with damage_as_error():
            state = unpack_state(saved[_SHARED])
            check_format(state)
            count, shards, by_shard = state["workers"], state.pop("shards"), state["parts"]
            owing = {layer.name for layer in hook.layers if self._keeps_residual(layer)}
            if count != self.replicas and state["layers"].keys() & owing:
                refuse_state(
                    f"it was saved with {count} replicas, this job has {self.replicas}: load it "
                    "with hook.sharded_state(saved=FOLDER)"
                )
            owed = dict.fromkeys(state["layers"]) | self._residuals(saved, count)
            here, alike = world.rank % world.shards, shards == world.shards
            own = by_shard[here if alike else 0]
            part = {
                **own,
                "layers": by_layer(residual=owed),
                "sums": {},
                "meter": own["meter"] if alike else sum_meters(by_shard, first=not here),
            }
            if state.pop("summed"):
                sums = [local_part(saved[f"sums/{x.name}"]) for x in hook.layers]
                # in the order in memory of the gradients, in which a norm adds up
                ordered = [torch.empty_like(t, dtype=sums[0].dtype) for t in hook.source.local]
                foreach_copy_(ordered, sums)
                part["sums"] = {"update": ordered}
            memories = shard_memories(
                [get_column(p["layers"], "memory") for p in by_shard],
                world,
                hook.layers,
                hook.reducer.compressors,
            )
            table = with_column(state["layers"], "memory", memories)
            state |= {"workers": world.workers, "layers": table, "parts": [part]}
            state = place_state(state, world.rank, world.processes, world.hosted)
        hook.load_state_dict(state, branch=self.branch)
        self.replicas = world.workers

    def _residuals(self, saved: Mapping[str, Any], count: int) -> Residuals:
        """This shard's rows of what its replica owes; ``count`` replicas have saved theirs."""
        world, found = self.hook.world, dict[str, Tensor | None]()
        for layer in self.hook.layers:
            old = {i: saved.get(f"residuals/{i}/{layer.name}") for i in self._saved_sources()}
            parts = [
                {"workers": [i], "layers": {layer.name: {"residual": local_part(t)[None].clone()}}}
                for i, t in old.items()
                if t is not None
            ]
            if parts:
                found |= residuals_for(world.hosted, world.workers, parts, count, [layer.name])
        return found

    def _saved_sources(self) -> list[int]:
        """The saved replicas that this one continues: itself, if there were as many."""
        world = self.hook.world
        return [*overlaps(world.hosted[0], world.workers, self.replicas)]

    def _sums_known(self) -> bool:
        return self.hook._norm_sums().keys() <= {"update"}

    def _keeps_residual(self, layer: Layer) -> bool:
        return layer.compressed and self.hook.chosen.keeps_residuals

    def _new_zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self.hook.world.meter.dtype, device=self.hook.world.device)

    def _as_sharded(self, rows: Tensor, shape: Sequence[int]) -> Any:
        return sharded_tensor(rows, self.hook.source.mesh, shape)


def _saved_replicas(saved: Any) -> int:
    """How many replicas have saved a checkpoint.

    Args:
        saved: its folder, or a ``StorageReader`` of ``torch.distributed.checkpoint``.

    Raises:
        ConfigError: it holds no residual of a hook, or cannot be read.
    """
    found = [_RESIDUAL.search(name) for name in saved_names(saved)]
    replicas = {int(match[1]) for match in found if match is not None}
    if not replicas:
        raise ConfigError(
            f"saved: {saved} has no residuals of a hook: save hook.sharded_state() in it"
        )
    return 1 + max(replicas)
