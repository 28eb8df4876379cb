"""Meshes of processes, among which FSDP2 divides the network of a loop."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.same_bits.case import BATCH


@functools.cache
def two_by_two() -> Any:
    """Two replicas of two processes; the dimension "replicate" is between replicas."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@functools.cache
def line() -> Any:
    """All processes in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(net: Any, mesh: Any) -> Any:
    """The network, divided block by block over a mesh of one dimension."""
    for module in (net.conv, net.inner, net.frozen, net.side):
        if module is not None:
            fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def part(rank: int) -> tuple[int, slice]:
    """The replica of a process, and the samples of its batch that are this process's."""
    replica, shard = divmod(rank, 2)
    return replica, slice(shard * BATCH // 2, (shard + 1) * BATCH // 2)
