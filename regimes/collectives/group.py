"""W workers on a process group that the user has made: the world of the hook and of local steps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives import devices, outside
from regimes.collectives.call_guard import SOON, CallGuard, done_within
from regimes.collectives.launcher import attempt
from regimes.collectives.processes import (
    ProcessWorld,
    _abort_nccl,
    backends,
    errors_are_raised,
)
from regimes.collectives.world import World
from regimes.errors import TrainingError

_groups = itertools.count()  # the same on all processes, which make their groups in one order


def default_group() -> Any:
    """torch's default group, or None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class GroupWorld(ProcessWorld):
    """One worker for each process of an existing group. All its processes must create it.

    It has a communicator of its own: on a shared one its collectives, which a thread issues, would
    mix with DDP's and the user's in another order on each process. It ends when the user destroys
    the default group, with ``close``, or when Python ends.

    Args:
        call: the user's call that all processes make, for errors about a process that does not.
        ranks: the workers, by their ranks in the default group, where they are more than the group
            has.
    """

    _guard_group: weakref.ref[Any] | None = None
    _tensor_group: weakref.ref[Any] | None = None
    _shares: Tensor | None = None
    _looking: threading.Event | None = None

    def __init__(
        self,
        group: Any,
        device: torch.device,
        timeout: float,
        call: str = "attach()",
        ranks: Sequence[int] = (),
    ) -> None:
        ranks = list(ranks or dist.get_process_group_ranks(group))
        World.__init__(self, len(ranks), processes=len(ranks), rank=ranks.index(dist.get_rank()))
        self.device, self.first = device, ranks[0]
        place = f"hook/{next(_groups)}/{self.first}"  # two groups of a mesh count alike
        store = _store(place)
        self.guard = CallGuard(store, self.rank, self.workers, timeout)
        devices.post_kind(store, self.rank, device)
        self.guard.enter(call)
        devices.check_kinds(store, self.rank, self.workers)
        own = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._kind, self._limit = own[device.type], timedelta(seconds=timeout)
        self._group = self._make(ranks, self._kind)
        if self.guard.others:
            self._guard_group = self._make(ranks, "gloo")
            self.guard.gather = functools.partial(_all_reduce_max, self._guard_group)
            self._looking = outside.watch(self.guard, SOON / 2)
        if self._kind == "nccl":
            waits = {"suspect": self.guard.report_wait, "settled": self.guard.leave}
            self._watch(store, timeout, patience=SOON, **waits)

    def _make(self, ranks: list[int], kind: str) -> weakref.ref[Any]:
        """A new group of some processes, which all call this.

        Weak, here and in the guard: torch holds a group until it is destroyed, and a gloo group
        that is held longer still has its threads when Python ends, which may abort the process.
        """
        with contextlib.nullcontext() if kind == "gloo" else errors_are_raised():
            made = dist.new_group(
                ranks, self._limit, backends(kind, self.device), use_local_synchronization=True
            )
        if kind == "gloo":
            atexit.register(_destroy, reference := weakref.ref(made))
            return reference
        return weakref.ref(made)

    @property
    def group(self) -> Any:
        return _alive(self._group)

    def divide(self, group: Any, shares: Sequence[float]) -> None:
        """Take into account that layers are also divided among the processes of another group
        (tensor parallel); each of these calls this.

        Args:
            shares: of each layer, how much of the group's sum of squares is the layer's: 1, or
                1 / processes where each of them has a copy.
        """
        self._tensor_group = self._make(dist.get_process_group_ranks(group), self._kind)
        self._shares = torch.tensor(shares, dtype=torch.float64, device=self.device)

    @property
    def divided(self) -> bool:
        return self._shares is not None

    def fewest(self, count: int) -> int:
        if self._tensor_group is None:
            return count
        least = torch.tensor([count], device=self.device)
        options = {"op": dist.ReduceOp.MIN, "group": _alive(self._tensor_group), "async_op": True}
        self._wait(dist.all_reduce, least, **options)
        return int(least)

    def whole_norms(self, norms: Tensor) -> Tensor:
        if self._tensor_group is None or self._shares is None:
            return norms
        total = norms.square() * self._shares.to(norms.dtype)
        self._wait(dist.all_reduce, total, group=_alive(self._tensor_group), async_op=True)
        return total.sqrt()

    def _broadcast(self, flat: Tensor) -> None:
        self._wait(dist.broadcast, flat, self.first, async_op=True)

    def collect(self, value: Any) -> list[Any] | None:
        """Every process's value on process 0, in rank order; None elsewhere."""
        everyone = [None] * self.processes if self.rank == 0 else None
        self._wait(dist.gather_object, value, everyone, self.first)
        return everyone

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """This process's entry of the values that process 0 passes, one for each process."""
        mine = [None]
        self._wait(dist.scatter_object_list, mine, values, self.first)
        return mine[0]

    def claim(self, what: str) -> None:
        """Post this group's claim to something that only one group of a job can have, such as the
        name of a record; see ``claimants``."""
        if self.processes < dist.get_world_size():
            _store(f"claim/{what}").set(str(self.first), "")

    def claimants(self, what: str) -> list[int]:
        """The first processes of the groups that claim it, this one included, in order. Call it in
        a backward pass, with ``claim`` before the forward pass: groups that share a forward pass
        (a mesh of data and tensor parallel processes) have then all posted their claims."""
        store, count = _store(f"claim/{what}"), dist.get_world_size()
        others = range(count) if self.processes < count else ()
        return sorted({self.first, *(rank for rank in others if store.check([str(rank)]))})

    def take(self, what: str) -> int:
        """Take what is claimed, for good; the first process of the group that has it, which may be
        another one that was earlier."""
        if self.processes == dist.get_world_size():
            return self.first
        return int(_store(f"claim/{what}").compare_set("owner", "", str(self.first)))

    def post(self, what: str, key: str, text: str) -> None:
        """Leave a text for the group that has what this one claims too."""
        _store(f"claim/{what}").set(f"{key}/{self.first}", text)

    def posted(self, what: str, key: str, wait: float = 0.0) -> list[str]:
        """What the other groups that claim it have left under a key, in order.

        Args:
            wait: seconds for those that have not.
        """
        store, texts = _store(f"claim/{what}"), []
        for other in self.claimants(what):
            place = [f"{key}/{other}"]
            if other == self.first:
                continue
            if wait and not store.check(place):
                with contextlib.suppress(RuntimeError):  # its time is over
                    store.wait(place, timedelta(seconds=wait))
            if store.check(place):
                texts.append(store.get(place[0]).decode())
        return texts

    def _finish(self, work: Any) -> None:
        try:
            while not done_within(work, SOON):
                self.guard.report_wait()
        except RuntimeError:
            self.guard.report_wait()  # a process that has left may have posted why
            raise
        self.guard.leave()

    def abort_communicators(self) -> None:
        for group in self._all_groups():
            _abort_nccl(group())

    def abort(self) -> None:
        if self._kind == "nccl":
            self.abort_communicators()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.set()
        self._stop_watching()
        for group in self._all_groups():
            _destroy(group)

    def _all_groups(self) -> list[weakref.ref[Any]]:
        others = [g for g in (self._guard_group, self._tensor_group) if g is not None]
        return [self._group, *others]


def _alive(group: weakref.ref[Any]) -> Any:
    """The group; TrainingError if it has ended."""
    if (ours := group()) is None:
        raise TrainingError(
            "the process group has ended: train before dist.destroy_process_group()"
        )
    return ours


def _all_reduce_max(group: weakref.ref[Any], tensor: Tensor) -> Any:
    """Begin an all-reduce."""
    return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_alive(group), async_op=True)


def _store(name: str) -> dist.Store:
    """A part of the default group's store; ``name`` is the same on all processes of a group."""
    return dist.PrefixStore(f"{attempt()}/{name}", dist.distributed_c10d._get_default_store())


def _destroy(group: weakref.ref[Any]) -> None:
    """Destroy a group that is still there."""
    if (ours := group()) is not None:
        with contextlib.suppress(ValueError):  # destroyed already, but still referenced
            dist.destroy_process_group(ours)
