"""The state of a job for ``torch.distributed.checkpoint`` (DCP): that of each process as bytes, and
in an entry of its own what the process owes (its residuals), which may be as large as the whole
model."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regimes.base.errors import ConfigError
from regimes.collectives.sharded_models import saved_names
from regimes.job.attached import AttachedJob
from regimes.job.fit_state import damage_as_error
from regimes.job.move_residuals import Residuals, on_process, overlaps
from regimes.job.state import State, get_column, owed_table, own_part, with_owed

_PROCESS_ENTRY = re.compile(r"(?:^|\.)process/(\d+(?:x\d+)?)/\d+$")


class ProcessStates:
    """Is a ``Stateful`` of DCP: save and load it with model and optimiser, on all processes::

        dcp.save({"model": ..., "hook": hook.sharded_state()}, checkpoint_id=folder)

    Loaded on as many processes the job goes on bit for bit. On another number, which needs
    ``saved``, each process takes over a part of what the saved ones owe, such that the mean over
    processes is preserved.

    Attributes:
        group: the processes that have saved the checkpoint that is loaded next, "6", or "6x3" where
            three of them hold a worker together; once it is loaded, those of the job.
    """

    def __init__(self, job: AttachedJob, branch: bool = False, saved: Any = None) -> None:
        self.job, self.branch = job, branch
        self.group = self._own_group if saved is None else _saved_group(saved)

    @property
    def _own_group(self) -> str:
        world = self.job.world
        return f"{world.processes}x{world.shards}" if world.node else str(world.processes)

    @property
    def processes(self) -> int:
        """Return how many processes have saved the checkpoint."""
        return int(self.group.partition("x")[0])

    def state_dict(self) -> dict[str, bytes]:
        """Return the entries of this process. To load those of another number of processes, return
        their names with empty values, because DCP loads the entries that it finds here."""
        world, group = self.job.world, self.group
        if group != self._own_group:
            names = [f"process/{group}/{i}" for i in range(self.processes)]
            owed_names = [f"owed/{group}/{i}" for i in self._saved_sources()]
            return dict.fromkeys([*names, *owed_names], b"")
        world.guard.enter_call("sharded_state()")
        self.job._end_due_unit()
        state = self.job.state_dict()
        owed = get_column(owed_table(own_part(state)), "residual")
        rest = with_owed(state, dict.fromkeys(owed))
        found = {"process": pack_state(rest), "owed": pack_state(owed)}
        return {f"{what}/{group}/{world.rank}": data for what, data in found.items()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """Continue where the state was saved. DCP calls this (``dcp.load``) on all processes, once
        the model and its optimiser have their own states again.

        Raises:
            ConfigError: as ``load_state_dict`` of the job.
        """
        rank, group = self.job.world.rank, self.group
        alike = group == self._own_group
        with damage_as_error():
            processes = [rank] if alike else range(self.processes)
            states = [unpack_state(saved[f"process/{group}/{i}"]) for i in processes]
            sources = [rank] if alike else self._saved_sources()
            owed = {i: unpack_state(saved[f"owed/{group}/{i}"]) for i in sources}
            if alike:
                state = with_owed(states[0], owed[rank])
            else:
                state = self._regroup_states(states, owed)
        self.job._load_own(state, self.branch)
        self.group = self._own_group

    def _saved_sources(self) -> list[int]:
        """The saved processes from which this one takes over what they owe."""
        world = self.job.world
        if world.node:  # each has rows of a worker
            return [*range(self.processes)]
        return [*overlaps(world.rank, world.processes, self.processes)]

    def _regroup_states(self, states: Sequence[State], owed_by: Mapping[int, Residuals]) -> State:
        """The state of this process, from the states of another number of processes.

        Args:
            owed_by: the residuals of those saved processes from which this one takes over.
        """
        self.job._check_undivided("sharded_state")
        known = [with_owed(x, owed_by[i]) if i in owed_by else x for i, x in enumerate(states)]
        job, world = self.job, self.job.world
        worker = on_process(job._join_states(known), world.rank // world.shards, world.workers)
        return job._divide_worker(worker)


def _saved_group(saved: Any) -> str:
    """The processes that have saved a checkpoint.

    Args:
        saved: its folder, or a ``StorageReader`` of ``torch.distributed.checkpoint``.

    Raises:
        ConfigError: it holds no such state of a job, or cannot be read.
    """
    found = {match[1] for name in saved_names(saved) if (match := _PROCESS_ENTRY.search(name))}
    if len(found) != 1:
        raise ConfigError(f"saved: {saved} has no state of such a job: save sharded_state() in it")
    return found.pop()


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Turn a saved state into bytes, for ``unpack_state``."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack_state(saved: bytes) -> dict[str, Any]:
    """Read a state from the bytes of ``pack_state``, with its tensors on the CPU; raise ConfigError
    if the bytes are damaged."""
    with damage_as_error():
        return torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
