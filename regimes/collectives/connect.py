"""The world of processes that a launcher has started: torch's default group."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regimes.base.torch_compat import abort_default_group
from regimes.collectives import devices
from regimes.collectives.launcher import LaunchedProcess, attempt_name, read_launch
from regimes.collectives.lost_processes import Faults, describe_loss, name_silent
from regimes.collectives.process_group import Group, backend_string, errors_are_raised
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World

_connections = itertools.count()  # the same on all processes, which connect in one order


def connect_world(workers: int, device: torch.device, timeout: float = 600.0) -> World:
    """Make the world of this process: simulated if it is alone, else joined to the launched group.

    NCCL carries the tensors if every process has a GPU for itself, gloo otherwise. A process's GPU
    becomes torch's current one.

    Raises:
        ConfigError: W is not a multiple of the number of processes; some are on a CPU, others on a
            GPU.
        TrainingError: the other processes do not connect in time.
    """
    count, us = next(_connections), read_launch()
    if us.count == 1:
        return World(workers)
    World(workers, processes=us.count)  # checks the division, before any waits
    membership = join_group(device, timedelta(seconds=timeout), f"{attempt_name()}/{count}")
    return world_of(workers, device, membership)


def world_of(workers: int, device: torch.device, membership: Membership) -> ProcessWorld:
    """Make the world of all processes of the default group, which all call this."""
    store, limit = membership.run_store, membership.nccl_limit
    everyone = Group.of_default("gloo" if limit is None else "nccl")
    faults = Faults(everyone.index, len(everyone), store)
    if limit is not None:
        faults.watch_streams(store, limit, device, [everyone])
    return ProcessWorld(workers, device, everyone, faults=faults, owner=membership)


@dataclass
class Membership:
    """Holds this process's place in torch's default group, which runs may use one after the other.

    Attributes:
        store: of the group.
        wants: what it was made for; a run that wants something else makes another one.
        nccl_limit: seconds that a collective of NCCL may take; None: tensors go over gloo.
        prefix: of the run under way, in the store.
        released: the last run in it has ended well on this process.
        lost: a process may be elsewhere in the program, so that the group cannot be used again.
    """

    store: dist.Store
    wants: Any
    nccl_limit: float | None
    prefix: str
    released: bool = False
    lost: bool = False

    @property
    def run_store(self) -> dist.Store:
        """Return the part of the group's store that belongs to the run under way."""
        return dist.PrefixStore(self.prefix, self.store)

    def abort(self) -> None:
        """Leave the group at once, and wait for no other process from here on."""
        self.lost = True
        leave_group(at_once=True)

    def close(self) -> None:
        """Leave the group, or release it to the next run."""
        if self.lost or not _shared or _shared[-1] is None:
            leave_group()
        else:
            self.released = True


_shared: list[Membership | None] = []  # of each ``shared_group``, the inner one last


@contextlib.contextmanager
def shared_group() -> Iterator[None]:
    """Let the runs inside, which come one after the other, share a group: a grid has hundreds of
    runs, and making a group takes as long as a short run. The next run takes the group if all
    processes have ended the last one well and want the same group; otherwise they leave it and make
    a new one."""
    _shared.append(None)
    try:
        yield
    finally:
        if _shared.pop() is not None:
            _end_group()


def join_group(device: torch.device, timeout: timedelta, name: str) -> Membership:
    """Make a group for a run of this name, or use the group of the previous run again."""
    us, wants = read_launch(), (device, timeout)
    group = _shared[-1] if _shared else None
    store: dist.Store | None = None
    try:
        if group is not None:
            usable = group.released and group.wants == wants
            group.released, group.prefix, store = False, name, dist.PrefixStore(name, group.store)
            # each process tells all others through the store whether it can use the group again
            store.set(f"whole/{us.rank}", "yes" if usable else "no")
            if {store.get(f"whole/{other}").decode() for other in range(us.count)} == {"yes"}:
                return group
        _end_group()  # the group of a run in this process that has failed
        if device.type == "cuda":
            torch.cuda.set_device(device)
        job, _, _ = next(dist.rendezvous(us.rendezvous, us.rank, us.count, timeout=timeout))
        job.set_timeout(timeout)  # rendezvous does not pass it to a store in a file
        store = dist.PrefixStore(name, job)
        group = Membership(job, wants, _init_process_group(store, us, device, timeout), name)
    except (RuntimeError, ValueError) as error:  # ValueError: the launcher names no address
        who = f"process {us.rank} of {us.count}"
        silent = name_silent(store, us.rank, us.count)
        raise describe_loss(who, "at the start", silent, error) from error
    if _shared:  # offer it to later runs
        _shared[-1] = group
    return group


def _init_process_group(
    store: dist.Store, us: LaunchedProcess, device: torch.device, timeout: timedelta
) -> float | None:
    """Make torch's default group; the limit of ``Membership``."""
    devices.post_kind(store, us.rank, device)
    devices.check_kinds(store, us.rank, us.count)
    own_gpus = devices.one_gpu_each(store, us.rank, us.count, device)
    with errors_are_raised():
        dist.init_process_group(
            backend_string("nccl", device) if own_gpus else "gloo",
            store=store,
            world_size=us.count,
            rank=us.rank,
            timeout=timeout,
            device_id=device if own_gpus else None,
        )
    # A process that leaves at once must not close the store on one that still connects.
    store.set(f"met/{us.rank}", "")
    store.wait([f"met/{rank}" for rank in range(us.count)], timeout)
    return timeout.total_seconds() if own_gpus else None


def _end_group() -> None:
    """Leave the group, if there is one, even where other processes have died."""
    leave_group(at_once=True)
    leave_group()


def leave_group(*, at_once: bool = False) -> None:
    """Leave the group, if there is one.

    Args:
        at_once: abort NCCL, and leave a gloo group as it is.
    """
    if not dist.is_initialized():
        return
    if not at_once:
        dist.destroy_process_group()  # of NCCL: it waits for the other processes, dead or not
    elif "nccl" in dist.get_backend_config():
        abort_default_group()
