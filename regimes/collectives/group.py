"""Worlds on process groups that the user has made, for the hook and for local steps."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives import call_guard, devices
from regimes.collectives.call_guard import CallGuard
from regimes.collectives.lost_processes import Faults, describe_loss
from regimes.collectives.process_group import Group, abort_nccl, job_store
from regimes.collectives.processes import ProcessWorld, TensorParallel

_groups, _meshes = itertools.count(), itertools.count()  # the same on all processes


def on_group(
    group: Any,
    device: torch.device,
    timeout: float,
    call: str = "attach()",
    tensor: tuple[Any, Sequence[float]] | None = None,
    mesh: Any = None,
) -> ProcessWorld:
    """Make a world with a worker for each process of a group.

    Args:
        call: the user's call that all processes make, for errors about a process that does not.
        tensor: the group among which layers are divided as well, and each layer's share; see
            ``TensorParallel``. All its processes must pass it.
        mesh: the same processes, where ``fully_shard`` divides a model among them.
    """
    groups = _Groups(group, dist.get_process_group_ranks(group), device, timeout, call)
    parallel = None
    if tensor is not None:
        members = groups.add_group(dist.get_process_group_ranks(tensor[0]))
        shares = torch.tensor(tensor[1], dtype=torch.float64, device=device)
        parallel = TensorParallel(members, shares)
    return groups.make_world(len(groups.everyone), tensor=parallel, mesh=mesh)


def on_mesh(
    replicas: Any, replica: Any, device: torch.device, timeout: float, call: str = "attach()"
) -> ProcessWorld:
    """Make a world with a worker for each replica of a divided model. All processes must create it.

    Args:
        replicas: the process group of those processes, one of each replica, that hold the same
            rows.
        replica: the process group of the processes that hold one replica together.
    """
    across = dist.get_process_group_ranks(replicas)
    within = dist.get_process_group_ranks(replica)
    ranks = _all_ranks(across, within, timeout, call)
    groups = _Groups(replicas, ranks, device, timeout, call)
    return groups.make_world(
        len(across), across=groups.add_group(across), within=groups.add_group(within)
    )


def on_nodes(
    group: Any,
    nodes: Sequence[Sequence[int]],
    device: torch.device,
    timeout: float,
    call: str = "attach()",
) -> ProcessWorld:
    """Make a world with a worker for each node, whose processes have whole layers each. All
    processes must create it.

    Args:
        nodes: the ranks of each, in their order equally many.
    """
    groups = _Groups(group, [rank for node in nodes for rank in node], device, timeout, call)
    own = next(node for node in nodes if dist.get_rank() in node)
    place = own.index(dist.get_rank())
    across = groups.add_group([node[place] for node in nodes])
    return groups.make_world(len(nodes), across=across, within=groups.add_group(own), node=True)


class _Groups:
    """The own groups of a world. They end when the user destroys the default group, with ``close``,
    or when Python ends."""

    # Own groups, not the user's: a thread issues the world's collectives. On a shared communicator
    # they would mix with DDP's and the user's in another order on each process, and deadlock.

    def __init__(
        self, group: Any, ranks: Sequence[int], device: torch.device, timeout: float, call: str
    ) -> None:
        """``group``: the user's, which has the backend."""
        rank, count, self.device, self.timeout = dist.get_rank(), len(ranks), device, timeout
        self.call = call
        place = ranks.index(rank)
        # the first rank: groups of a mesh that exist side by side have the same count
        self.store = job_store(f"hook/{next(_groups)}/{ranks[0]}")
        self.guard = CallGuard(self.store, place, count, timeout)
        devices.post_kind(self.store, place, device)
        # Before a group is made: making one waits for all processes, and would say nothing about a
        # process that never calls this.
        self.guard.enter_call(call)
        devices.check_kinds(self.store, place, count)
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.backend, self.made = backends[device.type], list[Group]()
        self.everyone = self.add_group(ranks)
        if self.guard.others:
            self.guard.use_group(self.add_group(ranks, "gloo"))

    def add_group(self, ranks: Sequence[int], backend: str | None = None) -> Group:
        """A new group of some processes, which all call this."""
        limit = timedelta(seconds=self.timeout)
        try:
            group = Group.of_some(ranks, backend or self.backend, self.device, limit)
        except RuntimeError as error:
            who = f"process {self.guard.rank} of {len(self.guard.others) + 1}"
            silent = "one of them has died or hangs"
            # without a traceback, whose frames would keep the group and its threads
            raise describe_loss(who, f"in {self.call}", silent, error) from error.with_traceback(
                None
            )
        self.made.append(group)
        return group

    def make_world(self, workers: int, **parts: Any) -> ProcessWorld:
        """The world; no group may be added to it."""
        faults = Faults(self.everyone.index, len(self.everyone), guard=self.guard)
        if self.backend == "nccl":
            faults.watch_streams(self.store, self.timeout, self.device, self.made)
        return ProcessWorld(workers, self.device, self.everyone, **parts, faults=faults, owner=self)

    def abort(self) -> None:
        abort_nccl(self.made)

    def close(self) -> None:
        for group in self.made:
            group.destroy()


def exchange_posts(
    name: str, ranks: Sequence[int], value: Any, timeout: float, call: str
) -> list[Any]:
    """Return what each of some processes posts, plain JSON, in the order of these processes. All of
    them call this. A process that waits for others warns after a while, and raises TrainingError
    after the timeout.

    Args:
        name: the same on all of them, and of no other call.
    """
    store: Any = job_store(name)
    keys = [str(rank) for rank in ranks]
    rank = dist.get_rank()
    store.set(str(rank), json.dumps(value))
    patience = min(call_guard.PATIENCE, timeout)
    try:
        store.wait(keys, timedelta(seconds=patience))
    except RuntimeError:
        missing = [other for other in ranks if not store.check([str(other)])]
        said = call_guard.describe_absent(rank, call, missing, patience)
        warnings.warn(said, stacklevel=2)
        try:
            store.wait(keys, timedelta(seconds=max(timeout - patience, 0.1)))
        except RuntimeError as error:
            missing = [other for other in ranks if not store.check([str(other)])]
            said = call_guard.describe_absent(rank, call, missing, timeout)
            raise TrainingError(said) from error.with_traceback(None)
    posts = store.multi_get(keys) if store.has_extended_api() else [store.get(x) for x in keys]
    return [json.loads(post) for post in posts]


def _all_ranks(
    across: Sequence[int], within: Sequence[int], timeout: float, call: str
) -> list[int]:
    """The ranks of all replicas, one replica after the other. Each process posts the ranks that
    hold the same rows as it, and reads the posts of the other processes of its replica."""
    name = f"islands/{next(_meshes)}/{'-'.join(map(str, within))}"
    columns = exchange_posts(name, within, list(across), timeout, call)
    ranks = [rank for replica in zip(*columns, strict=False) for rank in replica]
    alike = len({*map(len, columns)}) == 1
    if not alike or len({*ranks}) < len(ranks) or set(within) - set(ranks):
        raise ConfigError(
            f"replicas: the processes {sorted({*across})} hold the same rows as process "
            f"{dist.get_rank()}, and {sorted({*within})} are in its replica: `replicas` "
            'must be the mesh\'s other dimension, replicas=mesh["replicate"] of a model sharded '
            'over mesh["shard"]'
        )
    return ranks


def nodes_between(
    replicas: Any, ranks: Sequence[int], timeout: float, call: str
) -> list[list[int]]:
    """Return the ranks of each node, in the order of the processes, which all call this.

    Args:
        replicas: the process group of those processes, one of each node, that exchange between
            nodes.
    """
    own = dist.get_process_group_ranks(replicas)
    name = f"nodes/{next(_meshes)}/{ranks[0]}"
    columns = [
        *map(list, dict.fromkeys(map(tuple, exchange_posts(name, ranks, own, timeout, call))))
    ]
    nodes = [list(node) for node in zip(*columns, strict=False)]
    if sorted(rank for node in nodes for rank in node) != sorted(ranks):
        raise ConfigError(
            f"nodes: its groups do not have each of the {len(ranks)} processes of the model once: "
            'it must be the dimension between nodes of a mesh of these processes, mesh["node"]'
        )
    return nodes


def nodes_by_name(node: str, ranks: Sequence[int], timeout: float, call: str) -> list[list[int]]:
    """Return the ranks of each node like ``nodes_between``, from the name of each process's
    node."""
    found: dict[str, list[int]] = {}
    posts = exchange_posts(f"nodes/{next(_meshes)}/{ranks[0]}", ranks, node, timeout, call)
    for rank, name in zip(ranks, posts, strict=True):
        found.setdefault(name, []).append(rank)
    return [*found.values()]
