"""Once a hook is closed, its model is torch's own again; `detach` gives it back as it was.

Oracles: the same model that never had a hook, step by step: DDP, FSDP2, and for replicas torch's
HSDP; the attributes of the model before `attach`."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim

import regimes
from regimes.compression import REGISTRY

STEPS = 4  # of each hook, two units
QUIET = {"every": 2, "record": regimes.RecordOptions(summary=False)}


@dataclass(frozen=True)
class Case:
    """``way``: "ddp", "replicas", "both" (with FSDP2's collectives) or "shards"."""

    way: str
    chosen: dict[str, Any]
    ddp: dict[str, Any] = field(default_factory=dict)
    half: bool = False
    factor: float | None = None
    detaches: bool = False

    @property
    def processes(self) -> int:
        return 4 if self.way == "both" else 2

    @property
    def tolerance(self) -> float:
        return 0.0 if self.detaches else 0.02 if self.half else 1e-12


HOLD_BACK = [name for name in REGISTRY if name not in ("dense", "cast")]
BITS = {"scatter": {"level": 4}, "gather": {"level": 8}}
RANK_1 = {"compressor": regimes.PowerSGD(rank=1)}
CASES = [
    *(Case("ddp", {"compressor": name}) for name in HOLD_BACK),
    Case("ddp", {"compressor": "powersgd"}, {"find_unused_parameters": True}),
    Case("ddp", {"compressor": "topk"}, {"gradient_as_bucket_view": True}),
    Case("ddp", {"compressor": "topk"}, {"static_graph": True}),
    Case("ddp", {"compressor": "powersgd"}, half=True),
    *(Case("replicas", {"compressor": name}) for name in ("powersgd", "topk")),
    Case("replicas", {"compressor": "powersgd"}, factor=1.0),
    Case("replicas", {"compressor": "powersgd"}, half=True),
    Case("both", {"compressor": "powersgd", "scatter": {"level": 4}}),
    Case("both", {"compressor": "topk", **BITS}, factor=2.0),
    Case("shards", BITS),
    Case("ddp", RANK_1, detaches=True),
    Case("ddp", {"policy": "accordion"}, {"find_unused_parameters": True}, detaches=True),
    Case("ddp", {"compressor": "topk"}, {"gradient_as_bucket_view": True}, detaches=True),
    *(Case("shards", chosen, detaches=True) for chosen in (BITS, RANK_1)),
    Case("replicas", RANK_1, detaches=True),
    Case("both", {**RANK_1, "scatter": {"level": 8}}, detaches=True),
]


def wrap(case: Case, hooked: bool) -> tuple[Any, dict[str, Any]]:
    """A model, and arguments of ``attach``; without a hook it is torch's own."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    net = net.to(torch.bfloat16 if case.half else torch.float64)
    if case.way == "ddp":
        return DistributedDataParallel(net, **case.ddp), {}
    if case.way == "shards":
        inside = mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        arguments = {"shards": mesh}
    else:
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        inside, arguments = mesh["shard"], {"replicas": mesh["replicate"]}
        if case.way == "both":
            arguments["shards"] = inside
    for module in (net[0], net):
        fully_shard(module, mesh=inside if hooked else mesh)
        if case.factor is not None:
            module.set_gradient_divide_factor(case.factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return net, arguments


def local_part(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """The gradients of a step, this process's part."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()
    found = torch.cat([local_part(p.grad).flatten().double() for p in model.parameters()])
    optimizer.step()
    return found


class Pair:
    """A model that has hooks, and the same that never had one."""

    def __init__(self, case: Case) -> None:
        self.model, self.arguments = wrap(case, hooked=True)
        self.plain, _ = wrap(case, hooked=case.detaches)
        self.optimizer, self.theirs = (
            torch.optim.SGD(net.parameters(), 0.05) for net in (self.model, self.plain)
        )

    def attach(self, **chosen: Any) -> regimes.Hook:
        return regimes.attach(self.model, self.optimizer, **QUIET, **self.arguments, **chosen)

    def apart(self, number: int) -> float:
        """How far the gradients of a step from the same weights are apart."""
        with torch.no_grad():
            for ours, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
                local_part(other).copy_(local_part(ours))
        found = step(self.model, self.optimizer, number)
        right = step(self.plain, self.theirs, number)
        return float((found - right).norm() / right.norm())


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
        for one in getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]:
            values = vars(one) if one is not None else {}
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


def twice(rank: int, case: Case) -> dict[str, Any]:
    """Of the first hook and the second: the largest relative errors of gradients after its end,
    beside the one while it is attached; what is counted and left of it."""
    pair = Pair(case)
    pair.apart(0)  # FSDP2 makes its state in the first step
    result: dict[str, Any] = {"off": [], "rows": [], "counted": 0, "compressed": 0.0, "left": []}
    for _ in range(2):
        before = describe(pair.model, pair.optimizer)
        named = isinstance(case.chosen.get("compressor"), str)
        more = {"policy": {"name": "static", "level": "high"}} if named else {}
        hook = pair.attach(**more, **case.chosen)
        for number in range(STEPS):
            result["compressed"] = max(result["compressed"], pair.apart(number))
        if case.detaches:
            hook.detach()
            hook.detach()  # a second time is nothing
            after = describe(pair.model, pair.optimizer)
            result["left"] += [name for name, value in before.items() if after[name] != value]
        else:
            hook.close()
        sent = hook.traffic.bytes
        result["off"] += [pair.apart(number) for number in range(3)]
        result["counted"] += hook.traffic.bytes - sent
        result["rows"].append(len(hook.rows))
    return result


@pytest.mark.parametrize("processes", [2, 4])
def test_a_hook_that_has_ended_leaves_the_model_to_torch(processes: int) -> None:
    """Its gradients at once, nothing counted, after a second hook as after the first one."""
    cases = [case for case in CASES if case.processes == processes]
    found = group.run_in_turn(processes, *((twice, case) for case in cases))
    for case, result in ((case, x) for case, xs in zip(cases, found, strict=True) for x in xs):
        assert max(result["off"]) <= case.tolerance, case
        assert result["compressed"] > 10 * case.tolerance, case  # or the test shows nothing
        assert result["counted"] == 0, case
        assert result["rows"] == [2, 2], case
        assert result["left"] == [], case


def local_after(rank: int, first: str) -> dict[str, Any]:
    pair, result = Pair(Case("replicas", {})), {}

    def local() -> None:
        job = regimes.local_steps(
            pair.model, pair.optimizer, policy=4, record=QUIET["record"], **pair.arguments
        )
        found = step(pair.model, pair.optimizer, 0)
        everyone = [torch.zeros_like(found) for _ in range(2)]
        dist.all_gather(everyone, found)
        result["apart"] = float((everyone[0] - everyone[1]).norm())
        job.step()
        job.close()

    if first == "local":
        local()
    hook = pair.attach(compressor="powersgd")
    step(pair.model, pair.optimizer, 1)
    hook.close()
    result["off"] = pair.apart(2)
    if first == "hook":
        local()
    return result


def test_replicas_take_local_steps_after_a_hook() -> None:
    """And a hook after local steps."""
    ways = [(local_after, first) for first in ("hook", "local")]
    for result in itertools.chain(*group.run_in_turn(2, *ways)):
        assert result["apart"] > 0  # local steps exchange no gradients
        assert result["off"] < 1e-12
