"""Gradients of a model that FSDP2 divides, with torch's own exchange and with a hook's, where the
user has set what their sum is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from leveled import leveled
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import regimes
from regimes.base.errors import ConfigError

STEPS = 2
WIDTH = 8


@dataclass(frozen=True)
class Case:
    """``way``: "replicas", "both" (with FSDP2's collectives), or "torch"; ``late``: the factor is
    set once the hook is attached; ``passes``: backward passes of a step, each exchanged."""

    way: str
    factor: float | None
    compressor: Any = "dense"
    level: Any = "dense"
    late: bool = False
    passes: int = 1
    kind: torch.dtype = torch.float64
    before: bool = False  # the user has an all-reduce hook of FSDP2 of his own


def make_net(kind: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(kind)


def set_factor(net: nn.Module, factor: float | None) -> None:
    for module in net.modules():
        if factor is not None and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def attach(net: nn.Module, case: Case, mesh: DeviceMesh) -> None:
    inside: dict[str, Any] = {}
    if case.way == "both":
        inside = {"scatter": {"level": 8, "block": 1}}
    if case.way != "torch":
        regimes.attach_replicas(
            net,
            mesh["replicate"],
            compressor=leveled(case.compressor, case.level),
            record=regimes.RecordOptions(summary=False),
            **inside,
        )


def gradients(case: Case, mesh: DeviceMesh, rank: int) -> list[Tensor]:
    """The whole gradient of each step, all layers end to end."""
    net = make_net(case.kind)
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh if case.way == "torch" else mesh["shard"])
    if case.before:
        for module in (net[0], net[2]):
            module.set_all_reduce_hook(lambda output: output.mul_(3))
    for setting in (attach, set_factor) if case.late else (set_factor, attach):
        setting(net, *((case.factor,) if setting is set_factor else (case, mesh)))
    found, generator = [], torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(case.passes):
            x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(case.kind)
            net(x).square().sum().backward()
        parts: list[Any] = [p.grad for p in net.parameters()]
        found.append(torch.cat([part.full_tensor().flatten() for part in parts]).double())
    return found


def reduced(rank: int, shape: tuple[int, int], cases: list[Case]) -> list[Tensor]:
    """The gradients of each case, ``[steps, numbers]``."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return [torch.stack(gradients(case, mesh, rank)) for case in cases]


def refused(rank: int) -> str:
    """What a pass says whose factor is set after its forward pass."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(make_net(torch.float64), mesh=mesh["shard"])
    attach(net, Case("replicas", None), mesh)
    loss = net(torch.ones(1, WIDTH, dtype=torch.float64)).sum()
    set_factor(net, 1.0)
    try:
        loss.backward()
    except ConfigError as error:
        return str(error)
    return ""
