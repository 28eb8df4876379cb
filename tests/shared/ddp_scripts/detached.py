"""What a model has of a hook: everything before `attach`, nothing after `detach`."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim

import regimes

STEPS = 4


@dataclass(frozen=True)
class Case:
    """``way``: "ddp", "replicas" or "shards"."""

    way: str
    given: dict[str, Any]
    ddp: dict[str, Any] = field(default_factory=dict)


def build(case: Case) -> tuple[Any, Any]:
    """A model, and the mesh that its function takes."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    if case.way == "ddp":
        return DistributedDataParallel(net, **case.ddp), None
    if case.way == "shards":
        inside = mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        inside, mesh = both["shard"], both["replicate"]
    fully_shard(net[0], mesh=inside)
    return fully_shard(net, mesh=inside), mesh


def attach(case: Case, model: Any, mesh: Any, optimizer: Any) -> regimes.Hook:
    given = {"record": regimes.RecordOptions(summary=False), "every": 2, **case.given}
    if case.way == "ddp":
        return regimes.attach(model, optimizer, **given)
    if case.way == "shards":
        return regimes.attach_shards(model, mesh, optimizer, **given)
    return regimes.attach_replicas(model, mesh, optimizer, **given)


def hooks_of(thing: Any, depth: int = 0) -> Any:
    """The functions and classes in an object's attributes, down to lists, tables and the state of
    ``fully_shard``."""
    if isinstance(thing, dict):
        return {str(key): hooks_of(one, depth) for key, one in thing.items()}
    if isinstance(thing, list | tuple):
        return [hooks_of(one, depth) for one in thing]
    if isinstance(thing, Tensor | str | int | float | torch.dtype | type(None)):
        return type(thing).__name__
    if callable(thing) and not isinstance(thing, nn.Module):
        kind = type(thing)
        return f"{kind.__module__}:{getattr(thing, '__qualname__', kind.__qualname__)}"
    if depth < 3 and "fsdp" in type(thing).__module__:
        return hooks_of(vars(thing), depth + 1)
    return type(thing).__qualname__


def describe(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a hook could have left on a model, its parameters, its optimiser, and in torch."""
    gc.collect()
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = hooks_of({k: v for k, v in vars(module).items() if k not in ("_modules",)})
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]:
            values = vars(group) if group is not None else {}
            kept = ("hook", "comm", "post_backward", "factor")
            found[f"{name}: group"] = hooks_of(
                {k: v for k, v in values.items() if any(word in k for word in kept)}
            )
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        found[f"{name}: hooks"] = len(parameter._backward_hooks or ()), len(after or ())
    found["optimiser"] = hooks_of(vars(optimizer))
    found["all optimisers"] = (
        len(optim._global_optimizer_pre_hooks),
        len(optim._global_optimizer_post_hooks),
    )
    return found


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """This process's part of the weights after a step."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(6, 8, generator=generator)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    parts = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


def given_back(rank: int, case: Case) -> dict[str, Any]:
    """What differs after `detach`, of the first hook and of the second; whether the steps that
    follow have the bits of a model that never had one; and whether those before had others."""
    model, mesh = build(case)
    plain, _ = build(case)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    theirs = torch.optim.SGD(plain.parameters(), 0.05)
    step(model, optimizer, 0), step(plain, theirs, 0)  # FSDP2 makes its state in the first one
    result: dict[str, Any] = {"left": {}, "same": [], "compressed": False}
    for turn in range(2):
        before = describe(model, optimizer)
        hook = attach(case, model, mesh, optimizer)
        for number in range(STEPS):
            step(model, optimizer, number)
        attached = describe(model, optimizer)
        result["compressed"] |= attached != before
        hook.detach()
        hook.detach()  # a second time is nothing
        after = describe(model, optimizer)
        for name, value in before.items():
            if after[name] != value:
                result["left"][f"{turn}: {name}"] = (value, after[name])
        with torch.no_grad():  # from the same weights
            for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
                source = getattr(ours, "_local_tensor", ours)
                getattr(other, "_local_tensor", other).copy_(source)
        for number in range(STEPS):
            ours, right = step(model, optimizer, number), step(plain, theirs, number)
            result["same"].append(torch.equal(ours, right))
    return result
