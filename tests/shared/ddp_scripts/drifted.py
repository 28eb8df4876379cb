"""Jobs of each kind whose weights a script changes: what processes end with, and what is said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from ddp_scripts.fsdp import flat_mesh, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import RegimesError

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


def job(rank: int, kind: str, what: str, compare: bool = True) -> tuple[str, float, int]:
    """What was raised, how far the processes' weights are apart, and the number of units."""
    net = network(frozen=what == "unfrozen")
    model, optimizer, attachment = attached(
        kind, net, **({} if compare else {"compare_weights": False})
    )

    def before_step(step: int, optimizer: Any) -> Any:
        return spoil(net, optimizer, what, rank) if step == 2 else optimizer

    return train(rank, net, model, optimizer, attachment, before_step)


def train(
    rank: int,
    net: nn.Module,
    model: Any,
    optimizer: Any,
    attachment: Any,
    before_step: Callable[[int, Any], Any],
) -> tuple[str, float, int]:
    """Train to the end, or to an error. Returns what was raised, how far the processes' weights are
    apart, and the number of units.

    Args:
        before_step: called with the step and the optimiser, returns the one that goes on.
    """
    torch.manual_seed(10 + rank)
    said = ""
    try:
        for step in range(STEPS):
            optimizer = before_step(step, optimizer)
            optimizer.zero_grad()
            model(torch.randn(8, 6).double() + rank).square().mean().backward()
            optimizer.step()
            if isinstance(attachment, regimes.LocalSteps):
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


def reloaded(rank: int, way: str, chosen: dict[str, Any], assign: bool) -> tuple[Any, list[int]]:
    """The weights of a job that loads other ones on its way, twice, and the steps of its units;
    each optimiser is a new one."""
    net: Any = network()
    shape = (1, 2) if way == "both" else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    place: dict[str, Any] = {"replicas": mesh["replicate"]}
    inside = mesh["shard"]
    if way == "shards":
        inside = init_device_mesh("cpu", (2,))
        place = {"shards": inside}
    if way == "both":
        place |= {"shards": mesh["shard"], "scatter": {"level": 8}}
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=inside)
    optimizer = torch.optim.SGD(trained(net), lr=0.1)
    if "compressor" in chosen:
        chosen = {**chosen, "level": 1 if chosen["compressor"] == "powersgd" else 4}
    hook = regimes.attach(net, optimizer, every=UNIT, **place, **chosen, **QUIET)
    torch.manual_seed(10 + rank)
    for step in range(2 * UNIT):
        if step in (0, 3, UNIT):
            values = {k: v.clone() * 0.9 for k, v in net.state_dict().items()}
            net.load_state_dict(values, assign=assign)
            optimizer = torch.optim.SGD(trained(net), lr=0.1)
        optimizer.zero_grad()
        net(torch.randn(8, 6).double() + rank).square().mean().backward()
        optimizer.step()
    hook.close()
    own = torch.cat([whole(p).detach().flatten() for p in net.parameters()])
    return own, [row["steps"] for row in hook.rows]


# -- ways that follow one another ----------------------------------------------------------------


class Wide(nn.Module):
    """A network with a side that a pass may leave out, a BatchNorm and a Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.takes_side = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(torch.tanh(self.first(x))))
        return self.last(x + self.side(x) if self.takes_side else x)


def _write(net: Any, factor: float) -> None:
    with torch.no_grad():
        for p in trained(net):
            p.mul_(factor)


def _rebind(net: Any, names: tuple[str, ...]) -> None:
    for name in names:
        p = net.get_parameter(name)
        p.data = p.data.clone()


def _add_group(net: Any, optimizer: Any, part: str) -> None:
    part = getattr(net, part)
    part.requires_grad_(True)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if more := [p for p in part.parameters() if id(p) not in held]:
        optimizer.add_param_group({"params": more})


def _step_inside(net: Any, optimizer: Any) -> None:
    def step(parameter: Any) -> None:
        local = getattr(parameter, "_local_tensor", parameter)
        grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
        local.detach().sub_(0.05 * grad)

    for parameter in trained(net):
        parameter.register_post_accumulate_grad_hook(step)


WAYS: dict[str, Any] = {  # what a script does between two steps, on this rank
    "rebound": lambda net, optimizer, rank: _rebind(net, ("first.weight", "last.bias")),
    "rebound on one": lambda net, optimizer, rank: _rebind(net, ("last.weight",) * rank),
    "scaled": lambda net, optimizer, rank: _write(net, 0.9),
    "scaled apart": lambda net, optimizer, rank: _write(net, 1 - 0.1 * rank),
    "frozen": lambda net, optimizer, rank: net.last.requires_grad_(False),
    "frozen on one": lambda net, optimizer, rank: net.last.requires_grad_(not rank),
    "unfrozen": lambda net, optimizer, rank: _add_group(net, optimizer, "first"),
    "unused": lambda net, optimizer, rank: setattr(net, "takes_side", False),
    "unused on one": lambda net, optimizer, rank: setattr(net, "takes_side", not rank),
    "used again": lambda net, optimizer, rank: setattr(net, "takes_side", True),
    "in evaluation": lambda net, optimizer, rank: net.eval(),
    "in evaluation on one": lambda net, optimizer, rank: net.train(not rank),
    "stepped inside": lambda net, optimizer, rank: _step_inside(net, optimizer),
    "another rate on one": lambda net, optimizer, rank: _set_rate(optimizer, 0.1 + 0.05 * rank),
    "zeroed": lambda net, optimizer, rank: optimizer.zero_grad(set_to_none=False),
}


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def wide_job(rank: int, kind: str, ways: tuple[str, ...]) -> tuple[str, float, int]:
    """A job in which the script does one of the ways after the other, two steps apart: what was
    raised, how far the weights are apart after that or at the end, and the number of units."""
    torch.manual_seed(0)
    net: Any = Wide().double()
    if "unfrozen" in ways:
        net.first.requires_grad_(False)
    if kind == "replicas":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for part in (net.first, net.side, net.last, net):
            fully_shard(part, mesh=mesh["shard"])
    model = DistributedDataParallel(net, find_unused_parameters=True) if kind == "DDP" else net
    optimizer = torch.optim.SGD(trained(net), lr=0.1, momentum=0.9, weight_decay=0.1)
    options = {**QUIET, "every": UNIT}
    attachment: Any
    if kind == "local":
        attachment = regimes.local_steps(net, optimizer, policy=2, **options)
    else:
        place = {"replicas": mesh["replicate"]} if kind == "replicas" else {}
        pressed = {"compressor": "powersgd", "level": 1, "optimizer": optimizer}
        attachment = regimes.attach(model, **place, **pressed, **options)

    def before_step(step: int, optimizer: Any) -> Any:
        if step % 2 and step // 2 < len(ways):
            WAYS[ways[step // 2]](net, optimizer, rank)
        return optimizer

    return train(rank, net, model, optimizer, attachment, before_step)


def wide_jobs(rank: int, cases: list[tuple[str, tuple[str, ...]]]) -> list[Any]:
    """Several, in the same processes."""
    return [wide_job(rank, kind, ways) for kind, ways in cases]


def stepped_inside(rank: int, inside: bool, scatter: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """FSDP2's own collectives under optimisers that step within backward, or after it: weights and
    units."""
    net, mesh = network(), flat_mesh(2)
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    each = {p: torch.optim.SGD([p], lr=0.05) for p in net.parameters()}
    hook = regimes.attach_shards(net, mesh, [*each.values()], scatter=scatter, every=5, **QUIET)

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
