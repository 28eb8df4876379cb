"""Models whose hook was closed, beside the same models that never had one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes

STEPS = 4  # of each hook, two units


@dataclass(frozen=True)
class Case:
    """``way``: "ddp", "replicas", "both" (with FSDP2's collectives) or "shards"."""

    way: str
    chosen: dict[str, Any]
    ddp: dict[str, Any] = field(default_factory=dict)
    half: bool = False
    factor: float | None = None

    @property
    def processes(self) -> int:
        return 4 if self.way == "both" else 2

    def __str__(self) -> str:
        more = [*self.ddp, *["half"] * self.half, *[f"over {self.factor}"] * bool(self.factor)]
        return "-".join([self.way, str(self.chosen.get("compressor", "bits")), *more])


def build(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    return net.to(torch.bfloat16 if case.half else torch.float64)


def wrap(case: Case, hooked: bool) -> tuple[Any, dict[str, Any]]:
    """A model, and arguments of ``attach``; without a hook it is torch's own."""
    net: Any = build(case)
    if case.way == "ddp":
        return DistributedDataParallel(net, **case.ddp), {}
    if case.way == "shards":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        arguments = {"shards": mesh}
    else:
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        arguments = {"replicas": mesh["replicate"]}
        if case.way == "both":
            arguments["shards"] = mesh["shard"]
    for module in (net[0], net):
        fully_shard(module, mesh=mesh["shard"] if hooked and case.way != "shards" else mesh)
        if case.factor is not None:
            module.set_gradient_divide_factor(case.factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return net, arguments


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """The gradients of a step, this process's part."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    kind = next(model.parameters()).dtype
    model(x.to(kind)).square().mean().backward()
    parts = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    found = torch.cat([part.flatten().double() for part in parts])
    optimizer.step()
    return found


def twice(rank: int, case: Case) -> dict[str, Any]:
    """The largest relative errors of gradients after ``close``, of the first hook and the second;
    with the one while it is attached."""
    model, arguments = wrap(case, hooked=True)
    plain, _ = wrap(case, hooked=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    theirs = torch.optim.SGD(plain.parameters(), 0.05)
    if "compressor" in case.chosen:
        arguments["policy"] = {"name": "static", "level": "high"}
    result: dict[str, Any] = {"off": {}, "rows": [], "counted": 0, "compressed": 0.0}
    result["tolerance"] = 0.02 if case.half else 1e-12

    def compare(number: int) -> float:
        with torch.no_grad():  # from the same weights
            for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
                source = getattr(ours, "_local_tensor", ours)
                getattr(other, "_local_tensor", other).copy_(source)
        found, right = step(model, optimizer, number), step(plain, theirs, number)
        return float((found - right).norm() / right.norm())

    for name in ("first", "second"):
        hook = regimes.attach(
            model,
            optimizer,
            every=2,
            record=regimes.RecordOptions(summary=False),
            **arguments,
            **case.chosen,
        )
        for number in range(STEPS):
            result["compressed"] = max(result["compressed"], compare(number))
        hook.close()
        before = hook.traffic.bytes
        for number in range(3):
            off = compare(number)
            result["off"][f"{name} {number}"] = off
        result["counted"] += hook.traffic.bytes - before
        result["rows"].append(len(hook.rows))
    return result


def local_after(rank: int, first: str) -> dict[str, Any]:
    case = Case("replicas", {"compressor": "powersgd"})
    model, arguments = wrap(case, hooked=True)
    plain, _ = wrap(case, hooked=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    theirs = torch.optim.SGD(plain.parameters(), 0.05)
    result: dict[str, Any] = {}

    def local() -> None:
        job = regimes.local_steps(
            model, optimizer, policy=4, record=regimes.RecordOptions(summary=False), **arguments
        )
        found = step(model, optimizer, 0)
        everyone = [torch.zeros_like(found) for _ in range(2)]
        dist.all_gather(everyone, found)
        result["apart"] = float((everyone[0] - everyone[1]).norm())
        job.step()
        job.close()

    if first == "local":
        local()
    hook = regimes.attach(
        model,
        optimizer,
        every=2,
        record=regimes.RecordOptions(summary=False),
        **arguments,
        **case.chosen,
    )
    step(model, optimizer, 1)
    hook.close()
    with torch.no_grad():
        for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
            other._local_tensor.copy_(ours._local_tensor)
    found, right = step(model, optimizer, 2), step(plain, theirs, 2)
    result["off"] = float((found - right).norm() / right.norm())
    if first == "hook":
        local()
    return result
