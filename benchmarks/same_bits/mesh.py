"""Two replicas of two processes, among which FSDP2 divides the network of a loop."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.same_bits.loop import BATCH


@functools.cache
def two_by_two() -> Any:
    """The mesh; its dimension "replicate" is between replicas."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shard(net: Any) -> Any:
    """The network, divided block by block within its replica."""
    mesh = two_by_two()["shard"]
    for module in (net.conv, net.inner, net.frozen, net.side):
        if module is not None:
            fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def part(rank: int) -> tuple[int, slice]:
    """The replica of a process, and the samples of its batch that are this process's."""
    replica, shard = divmod(rank, 2)
    return replica, slice(shard * BATCH // 2, (shard + 1) * BATCH // 2)
