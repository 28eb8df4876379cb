"""The state of a job for ``torch.distributed.checkpoint`` (DCP): that of each process as bytes, and
in an entry of its own what the process owes (its residuals), which may be as large as the whole
model."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regimes.collectives.sharded_models import saved_names
from regimes.errors import ConfigError
from regimes.job.attached import AttachedJob
from regimes.job.move_residuals import Residuals, on_process, overlaps
from regimes.job.refit import damage_refused
from regimes.job.state import State, get_column, owed_table, own_part, with_owed

_PROCESS_ENTRY = re.compile(r"(?:^|\.)process/(\d+)/\d+$")


class ProcessStates:
    """A ``Stateful`` of DCP: save and load it with model and optimiser, on all processes::

        dcp.save({"model": ..., "hook": hook.sharded_state()}, checkpoint_id=folder)

    Loaded on as many processes the job goes on bit for bit. On another number, which needs
    ``saved``, each process takes over a part of what the saved ones owe, such that the mean over
    processes is preserved.

    Attributes:
        processes: how many have saved the checkpoint that is loaded next; once it is loaded, the
            number of the job.
    """

    def __init__(self, job: AttachedJob, branch: bool = False, saved: Any = None) -> None:
        self.job, self.branch = job, branch
        self.processes = job.world.processes if saved is None else _saved_processes(saved)

    def state_dict(self) -> dict[str, bytes]:
        """The entries of this process. To load those of another number of processes: their names,
        empty, because DCP loads the entries that it finds here."""
        world, count = self.job.world, self.processes
        if count != world.processes:
            names = [_entry_name("process", count, i) for i in range(count)]
            return dict.fromkeys(
                [*names, *(_entry_name("owed", count, i) for i in self._saved_sources())], b""
            )
        world.guard.enter_call("sharded_state()")
        self.job._end_due_unit()
        state = self.job.state_dict()
        owed = get_column(owed_table(own_part(state)), "residual")
        rest = with_owed(state, dict.fromkeys(owed))
        found = {"process": pack_state(rest), "owed": pack_state(owed)}
        return {_entry_name(what, count, world.rank): data for what, data in found.items()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """Continue where it was saved; through ``dcp.load``, on all processes, once the model and
        its optimiser have their own states again.

        Raises:
            ConfigError: as ``load_state_dict`` of the job.
        """
        world, count = self.job.world, self.processes
        alike = count == world.processes
        with damage_refused():
            states = {
                i: unpack_state(saved[_entry_name("process", count, i)])
                for i in ([world.rank] if alike else range(count))
            }
            owed_by = {
                i: unpack_state(saved[_entry_name("owed", count, i)])
                for i in ([world.rank] if alike else self._saved_sources())
            }
            if alike:
                state = with_owed(states[world.rank], owed_by[world.rank])
            else:
                state = self._regroup_states([*states.values()], owed_by)
        self.job._load_own(state, self.branch)
        self.processes = world.processes

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
        self.job._check_whole("sharded_state")
        known = [with_owed(x, owed_by[i]) if i in owed_by else x for i, x in enumerate(states)]
        job, world = self.job, self.job.world
        worker = on_process(job._join_states(known), world.rank // world.shards, world.workers)
        return job._divide_worker(worker)


def _saved_processes(saved: Any) -> int:
    """How many processes have saved a checkpoint.

    Args:
        saved: its folder, or a ``StorageReader`` of ``torch.distributed.checkpoint``.

    Raises:
        ConfigError: it holds no such state of a job, or cannot be read.
    """
    found = {int(match[1]) for name in saved_names(saved) if (match := _PROCESS_ENTRY.search(name))}
    if len(found) != 1:
        raise ConfigError(f"saved: {saved} has no state of such a job: save sharded_state() in it")
    return found.pop()


def _entry_name(what: str, processes: int, process: int) -> str:
    return f"{what}/{processes}/{process}"


def pack_state(state: Mapping[str, Any]) -> bytes:
    """A saved state as bytes, for ``unpack_state``."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack_state(saved: bytes) -> dict[str, Any]:
    """A state from ``pack_state``, with its tensors on the CPU; damaged bytes raise ConfigError."""
    with damage_refused():
        return torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
