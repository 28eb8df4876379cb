"""Jobs of each kind whose weights a script changes: what processes end with, and what is said."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from ddp_scripts.fsdp import flat_mesh, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.errors import RegimesError

STEPS, UNIT = 12, 4
QUIET = {"summary": False, "timeout": 30.0}


def network(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    net[0].requires_grad_(not frozen)
    return net


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def attached(kind: str, net: Any, **more: Any) -> tuple[Any, Any, Any]:
    """The model to call, its optimiser, and its hook or local steps."""
    if kind == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=mesh["shard"])
    model = DistributedDataParallel(net) if kind == "DDP" else net
    optimizer = torch.optim.SGD(trained(net), lr=0.1)
    options = {**QUIET, "every": UNIT, **more}
    if kind == "local":
        return model, optimizer, regimes.local_steps(net, optimizer, policy=2, **options)
    place = {"replicas": mesh["replicate"]} if kind == "replicas" else {}
    pressed = {"compressor": "powersgd", "level": 1, "optimizer": optimizer}
    return model, optimizer, regimes.attach(model, **place, **pressed, **options)


def spoil(net: Any, optimizer: Any, what: str, rank: int) -> Any:
    """Change the model in the middle of a job; returns the optimiser that goes on."""
    if what == "assign":
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
        return torch.optim.SGD(trained(net), lr=0.1)
    if what == "unfrozen":
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": [*net[0].parameters()]})
    if what == "written" and rank == 1:
        with torch.no_grad():
            net[2].bias.add_(1.0)
    if what == "rebound":
        for p in trained(net):
            p.data = p.data.clone()
    return optimizer


def job(rank: int, kind: str, what: str, **more: Any) -> tuple[str, float, int]:
    """What was raised, how far the processes' weights are apart, and the number of units."""
    net = network(frozen=what == "unfrozen")
    model, optimizer, attachment = attached(kind, net, **more)
    torch.manual_seed(10 + rank)
    said = ""
    try:
        for step in range(STEPS):
            if step == 2:
                optimizer = spoil(net, optimizer, what, rank)
            optimizer.zero_grad()
            model(torch.randn(8, 6).double() + rank).square().mean().backward()
            optimizer.step()
            if kind == "local":
                attachment.step()
        attachment.close()
    except RegimesError as error:
        said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RegimesError):
            attachment.close()
    own = torch.cat([whole(p).detach().flatten() for p in net.parameters()])
    both = [torch.zeros_like(own) for _ in range(2)]
    torch.distributed.all_gather(both, own)
    return said, float((both[0] - both[1]).abs().max()), len(attachment.rows)


def stepped_inside(rank: int, inside: bool, scatter: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """FSDP2's own collectives under optimisers that step within backward, or after it: weights and
    units."""
    net, mesh = network(), flat_mesh(2)
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    each = {p: torch.optim.SGD([p], lr=0.05) for p in net.parameters()}
    hook = regimes.attach(
        net, shards=mesh, scatter=scatter, optimizer=[*each.values()], every=5, **QUIET
    )

    def step(parameter: Any) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    if inside:
        for parameter in each:
            parameter.register_post_accumulate_grad_hook(step)
    torch.manual_seed(3 + rank)
    for _ in range(STEPS):
        net(torch.randn(8, 6).double()).square().mean().backward()
        if not inside:
            for parameter in each:
                step(parameter)
    return torch.cat([whole(p).detach().flatten() for p in net.parameters()]), len(hook.rows)
