"""The state of a hook on a sharded model, for ``torch.distributed.checkpoint`` (DCP).

What differs between processes is saved as sharded tensors, which DCP divides anew where the number
of shards has changed: an island's residuals, and the norm's sums, which all islands have alike. All
else is saved as bytes, those of process 0: the record's pending rows are there.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regimes.collectives.islands import local_part, sharded_tensor
from regimes.collectives.requests import Layer
from regimes.ddp.refit import damage_refused, refuse
from regimes.ddp.sharded import ShardedGradients
from regimes.errors import ConfigError

if TYPE_CHECKING:
    from regimes.ddp.hook import Hook

SHARED = "shared"  # the key of the bytes


class ShardedState:
    """A ``Stateful`` of DCP: save and load it with model and optimiser, on all processes::

        dcp.save({"model": ..., "hook": hook.sharded_state()}, checkpoint_id=folder)

    Loaded on the same mesh, the job goes on bit for bit; on another number of shards with the same
    numbers, but that compressors which see each shard by itself begin with an empty memory. The
    number of islands must be the same.
    """

    def __init__(self, hook: Hook, branch: bool = False) -> None:
        self.hook, self.branch = hook, branch

    def state_dict(self) -> dict[str, Any]:
        """The sharded tensors, by island and layer, and the bytes of all else; all processes call
        this.

        Raises:
            ConfigError: within a unit, when the signal is not "update".
        """
        hook, world = self.hook, self.hook.world
        world.guard.enter("sharded_state()")
        if not self._sums_known() and hook.schedule.is_over(hook.buckets.steps):
            hook._end(*hook.schedule.rates())
        if not self._sums_known():
            raise ConfigError(
                "sharded_state: the sums of this signal cannot be saved within a unit: save after "
                f"a multiple of {hook.schedule.steps} steps, or choose the signal 'update'"
            )
        state = hook.state_dict()
        residuals, sums = state["residuals"], state["sums"].get("update")
        memories = world.gather_object(state["memories"])[: world.shards]  # of the first island
        plain = {
            **state,
            "residuals": list(residuals),
            "sums": sums is not None,
            "memories": memories,
            "shards": world.shards,
        }
        packed = world.gather_object(_packed(plain) if world.rank == 0 else None)[0]
        island, parts = world.hosted.start, world.parts(hook.layers)
        tensors = {}
        for i, (layer, part) in enumerate(zip(hook.layers, parts, strict=True)):
            if self._keeps_residual(layer):
                kept = residuals[layer.name]
                rows = self._zeros(part.matrix) if kept is None else kept[0].view(part.matrix)
                tensors[f"residuals/{island}/{layer.name}"] = self._sharded(rows, layer.matrix)
            total = self._zeros(part.shape) if sums is None else sums[i]
            tensors[f"sums/{layer.name}"] = self._sharded(total.view(part.shape), layer.shape)
        return {**tensors, SHARED: packed}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where it was saved; all processes call this, through ``dcp.load``.

        Raises:
            ConfigError: it is of another model, compressor, policy or number of islands.
        """
        hook, world = self.hook, self.hook.world
        with damage_refused():
            state = torch.load(io.BytesIO(saved[SHARED]), weights_only=True)
            shards = state.pop("shards")
            if (count := state["workers"] // shards) != world.workers:
                refuse(f"it is of {count} islands, and here are {world.workers}")
            state["residuals"] = dict.fromkeys(state["residuals"])
            for layer in hook.layers:
                rows = saved.get(f"residuals/{world.hosted.start}/{layer.name}")
                if rows is not None:
                    state["residuals"][layer.name] = local_part(rows)[None].clone()
            sums = [local_part(saved[f"sums/{x.name}"]).clone() for x in hook.layers]
            state["sums"] = {"update": sums} if state["sums"] else {}
            state["memories"] = self._memories(state["memories"])
            state["worker"], state["workers"] = world.rank, world.processes
        hook.load_state_dict(state, branch=self.branch)

    def _memories(self, by_shard: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This shard's; where there were as many others, or a shard's memory is its own, empty ones
        that count on."""
        hook, world = self.hook, self.hook.world
        if len(by_shard) == world.shards:
            return dict(by_shard[world.rank % world.shards])
        memories = {}
        for layer, c in zip(world.parts(hook.layers), hook.reducer.compressors, strict=True):
            if c.joins_shards:
                memories[layer.name] = by_shard[0][layer.name]
                continue
            steps = max(memory[layer.name]["step"] for memory in by_shard)
            memories[layer.name] = c.init(layer, 0).shared_state() | {"step": steps}
        return memories

    def _sums_known(self) -> bool:
        return self.hook._norm_sums().keys() <= {"update"}

    def _keeps_residual(self, layer: Layer) -> bool:
        return layer.compressed and bool(self.hook.chosen.compressor.error_feedback)

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self.hook.world.meter.dtype, device=self.hook.world.device)

    def _sharded(self, rows: Tensor, shape: Sequence[int]) -> Any:
        assert isinstance(self.hook.source, ShardedGradients)
        return sharded_tensor(rows, self.hook.source.mesh, shape)


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
