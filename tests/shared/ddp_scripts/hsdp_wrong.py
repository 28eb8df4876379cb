"""Sharded replicas used wrongly: the error of each of four processes, case by case."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from ddp_scripts import hsdp
from ddp_scripts.hsdp import Case
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import RegimesError

Mesh = Any
CASE = Case()


def sharded(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Any:
    return hsdp.shard(hsdp.build(CASE).to(dtype), CASE, mesh["shard"])


def hook(net: Any, mesh: Mesh, **options: Any) -> Any:
    return regimes.attach_replicas(net, mesh["replicate"], timeout=20.0, **options)


def two_meshes(mesh: Mesh) -> None:
    net = hsdp.build(CASE)
    fully_shard(net.conv, mesh=mesh["replicate"])
    hook(fully_shard(net, mesh=mesh["shard"]), mesh)


def local(net: Any, mesh: Mesh) -> None:
    regimes.local_steps(
        net, torch.optim.SGD(net.parameters(), 0.1), replicas=mesh["replicate"], policy=2
    )


def columns(mesh: Mesh) -> None:
    net = nn.Linear(4, 6, bias=False)
    local(fully_shard(net, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1)), mesh)


def blocks_only(mesh: Mesh) -> None:
    net = hsdp.build(CASE)
    fully_shard(net.inner, mesh=mesh["shard"])
    hook(net, mesh)


def twice(mesh: Mesh) -> None:
    net = sharded(mesh)
    kept = hook(net, mesh)
    assert kept is not None
    hook(net, mesh)


def frozen(mesh: Mesh) -> None:
    hook(sharded(mesh).requires_grad_(False), mesh)


def on_meta(mesh: Mesh) -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 6)
    hook(fully_shard(net, mesh=mesh["shard"]), mesh)


def saved_whole(mesh: Mesh) -> None:
    hook(sharded(mesh), mesh).full_state_dict()


def fsdp1(mesh: Mesh) -> None:
    net = hsdp.build(CASE)
    hook(FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True), mesh)


WAYS: dict[str, Callable[[Mesh], Any]] = {
    "no replicas": lambda mesh: regimes.attach(sharded(mesh), policy="accordion"),
    "shards of a native mesh": lambda mesh: regimes.attach_replicas(
        hsdp.shard(hsdp.build(CASE), CASE, mesh), mesh["shard"], policy="accordion"
    ),
    "the whole mesh": lambda mesh: regimes.attach_replicas(sharded(mesh), mesh, policy="accordion"),
    "a name": lambda mesh: regimes.attach_replicas(sharded(mesh), "replicate", policy="accordion"),
    "the mesh of the shards": lambda mesh: regimes.attach_replicas(
        sharded(mesh), mesh["shard"], policy="accordion", timeout=20.0
    ),
    "a plain model": lambda mesh: hook(hsdp.build(CASE), mesh),
    "a DDP model": lambda mesh: hook(DistributedDataParallel(hsdp.build(CASE)), mesh),
    "FSDP1": fsdp1,
    "blocks only": blocks_only,
    "two meshes": two_meshes,
    "columns": columns,
    "twice": twice,
    "frozen": frozen,
    "half": lambda mesh: hook(sharded(mesh, torch.float16), mesh),
    "meta": on_meta,
    "seeds": lambda mesh: hook(sharded(mesh), mesh, seed=mesh["replicate"].get_local_rank()),
    "a whole state": saved_whole,
    "local steps of a native mesh": lambda mesh: local(
        hsdp.shard(hsdp.build(CASE), CASE, mesh), mesh
    ),
}


def heard(rank: int) -> dict[str, str]:
    """The sentence of each way; nothing of one that raises none."""
    mesh, said = hsdp.two_dimensions(2, 2), {}
    warnings.simplefilter("ignore")
    for name, way in WAYS.items():
        try:
            said[name] = ""
            way(mesh)
        except RegimesError as error:
            said[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            said[name] = f"unforeseen {type(error).__name__}: {error}"
    return said
