"""What a job of FSDP2 says at the step in which something has no effect, or goes wrong."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

import regimes
from regimes.base.errors import ConfigError


def job(way: str, prepare: Any = lambda net: None) -> tuple[Any, Any, Any]:
    """``prepare``: called with the divided model, before the hook is attached."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    options: dict[str, Any] = {"summary": False, "timeout": 20}
    if way == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh["shard"])
        prepare(net)
        options |= {"compressor": "powersgd", "level": 1}
        hook = regimes.attach_replicas(net, mesh["replicate"], **options)
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(net, mesh=mesh)
        hook = regimes.attach_shards(net, mesh, scatter={"level": 8}, **options)
    return net, hook, mesh


def logged(rank: int) -> list[str]:
    """Of values of which each process has a part; every process logs, with and without a record."""
    _, hook, mesh = job("shards")
    said = []
    for placement in (Partial(), Partial("avg"), Shard(0)):
        value = DTensor.from_local(torch.ones(1), mesh, [placement])
        try:
            hook.log(norm=value)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    hook.log(norm=DTensor.from_local(torch.ones(()), mesh), loss=torch.ones(()), lr=0.1)
    return said


def stepped(rank: int) -> list[str]:
    """Optimisers that step a parameter as soon as its gradient is there, and may clear it; that do
    so before or after the hook has seen it."""
    said = []
    for clears in (False, True):
        for early in (False, True):
            said.append("")
            try:
                net, _, _ = job("replicas", lambda net, c=clears, e=early: step_at_once(net, c, e))
                if not early:
                    step_at_once(net, clears, True)
                net(torch.ones(2, 8)).sum().backward()
            except ConfigError as error:
                said[-1] = str(error)
    return said


def step_at_once(net: nn.Module, clears: bool, registers: bool) -> None:
    def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if clears:
            optimizer.zero_grad()

    for parameter in net.parameters() if registers else ():
        one = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, one=one: step(p, one))


def without_effect(rank: int) -> list[list[str]]:
    """The warnings of three passes with each of torch's options."""
    found = []
    for way, option in (
        ("shards", "set_separate_reduce_scatter_group"),
        ("replicas", ""),
        ("shards", ""),
    ):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            net, _, _ = job(way)
            if option and hasattr(net, option):
                getattr(net, option)(way == "shards")
            for _ in range(3):
                net(torch.ones(2, 8)).sum().backward()
        found.append([str(one.message) for one in heard if "has no effect" in str(one.message)])
    return found
