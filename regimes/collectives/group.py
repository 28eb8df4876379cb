"""W workers on a group of processes that a user has made: the DDP hook's world."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives import devices
from regimes.collectives.launcher import attempt
from regimes.collectives.meeting import SOON, Meeting, done_within
from regimes.collectives.processes import ProcessWorld, backends, errors_are_raised
from regimes.collectives.world import World
from regimes.errors import TrainingError

_groups = itertools.count()  # of this process; the others count alike


def default_group() -> Any:
    """torch's default group, or None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class GroupWorld(ProcessWorld):
    """One worker for each process of an existing group, on a communicator of its own, so that its
    collectives keep their order whatever else travels (DDP's own, the user's). Made collectively.
    It ends when the user destroys the default group, with ``close``, or when Python ends. ``call``
    names what the processes have come for.
    """

    _voice: weakref.ref[Any] | None = None  # the meetings' own

    def __init__(
        self, group: Any, device: torch.device, timeout: float, call: str = "attach()"
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        World.__init__(self, len(ranks), processes=len(ranks), rank=dist.get_rank(group))
        self.device, self.first = device, ranks[0]
        place = f"hook/{next(_groups)}/{self.first}"  # two groups of a mesh count alike
        store = _store(place)
        self.meeting = Meeting(store, self.rank, self.workers, timeout)
        devices.post_kind(store, self.rank, device)
        self.meeting.come(call)
        devices.check_kinds(store, self.rank, self.workers)
        own = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        kind, patience = own[device.type], timedelta(seconds=timeout)
        self.patience = (patience,) if kind == "nccl" else ()
        with errors_are_raised():
            ours = dist.new_group(
                ranks, patience, backends(kind, device), use_local_synchronization=True
            )
        self._group = weakref.ref(ours)  # torch holds it until it is destroyed
        if kind == "gloo":
            atexit.register(_destroy, self._group)
        if self.meeting.others:
            voice = dist.new_group(ranks, patience, "gloo", use_local_synchronization=True)
            self._voice = weakref.ref(voice)
            atexit.register(_destroy, self._voice)
            self.meeting.gather = functools.partial(_largest, self._voice)

    @property
    def group(self) -> Any:
        return _alive(self._group)

    def _broadcast(self, flat: Tensor) -> None:
        self._wait(dist.broadcast, flat, self.first, async_op=True)

    def collect(self, value: Any) -> list[Any] | None:
        """Every process's value on process 0, in rank order; None elsewhere."""
        everyone = [None] * self.processes if self.rank == 0 else None
        self._wait(dist.gather_object, value, everyone, self.first)
        return everyone

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """This process's own of the values that process 0 gives, one for each process."""
        mine = [None]
        self._wait(dist.scatter_object_list, mine, values, self.first)
        return mine[0]

    def claim(self, what: str) -> None:
        """Post that this group wants what one group of the job can have; see ``claimants``."""
        if self.processes < dist.get_world_size():
            _store(f"claim/{what}").set(str(self.first), "")

    def claimants(self, what: str) -> list[int]:
        """The first processes of the groups that want it, this one among them, in order. Groups
        that share a forward pass (a mesh of data and tensor parallel processes) have all posted
        it before the first backward pass if they do so before the forward pass."""
        store, count = _store(f"claim/{what}"), dist.get_world_size()
        others = range(count) if self.processes < count else ()
        return sorted({self.first, *(rank for rank in others if store.check([str(rank)]))})

    def _finish(self, work: Any) -> None:
        if self.patience:  # NCCL's wait takes the time once, and gives up after it
            super()._finish(work)
            return
        try:
            while not done_within(work, SOON):
                self.meeting.stuck()
        except RuntimeError:
            self.meeting.stuck()  # who has left may have said why
            raise
        self.meeting.free()

    def abort(self) -> None:
        """Nothing: when a wait has failed, NCCL has aborted this communicator itself."""

    def close(self) -> None:
        _destroy(self._group)
        if self._voice is not None:
            _destroy(self._voice)


def _alive(group: weakref.ref[Any]) -> Any:
    """The group; TrainingError if it has ended."""
    if (ours := group()) is None:
        raise TrainingError(
            "the process group has ended: train before dist.destroy_process_group()"
        )
    return ours


def _largest(group: weakref.ref[Any], tensor: Tensor) -> Any:
    """Begin the all-reduce of the largest values."""
    return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_alive(group), async_op=True)


def _store(name: str) -> dist.Store:
    """A part of the default group's store; ``name`` is the same on all processes of a group."""
    return dist.PrefixStore(f"{attempt()}/{name}", dist.distributed_c10d._get_default_store())


def _destroy(group: weakref.ref[Any]) -> None:
    """Destroy a group that is still there."""
    if (ours := group()) is not None:
        with contextlib.suppress(ValueError):  # destroyed, but somebody keeps it
            dist.destroy_process_group(ours)
