"""A GradScaler changes nothing, whether ``attach`` is told of it or not: its scales are powers of
two, so weights, norms and traffic have the bits of the same training without one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddp_scripts import group as processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.compression import REGISTRY

pytestmark = pytest.mark.usefixtures("one_process")

STEPS = 9
RULE = {"name": "accordion", "interval": 1, "eta": 0.2}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8)).double()


def batch(step: int, rank: int = 0) -> Tensor:
    seed = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 10, generator=seed, dtype=torch.float64)


def scaler_of(kind: str) -> Any:
    start = {"init_scale": 2.0**10, "growth_interval": 2}
    return torch.amp.GradScaler("cpu", enabled=kind != "none", **start)


def weights(net: nn.Module) -> Tensor:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


Step = Callable[[Any, torch.optim.Optimizer, nn.Module], None]


def plain(scaler: Any, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    scaler.step(optimizer)
    scaler.update()


def clipped(scaler: Any, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    plain(scaler, optimizer, net)


def by_itself(scaler: Any, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    """Without the scaler's own ``step``, as scripts do that never skip one."""
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()


def looped(
    model: nn.Module,
    hook: Any,
    kind: str,
    *,
    step_once: Step = plain,
    rank: int = 0,
    made: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    passes: int = 1,
) -> dict[str, Any]:
    """Train; ``hook`` attaches, with the optimiser and the scaler that it may be told."""
    optimizer = made(model.parameters(), 0.05)
    scaler = scaler_of(kind)
    job = hook(model, optimizer, scaler if kind == "told" else None)
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(passes):
            scaler.scale(model(batch(step, rank + 2 * one)).square().mean()).backward()
        step_once(scaler, optimizer, model)
    job.close()
    return {"weights": weights(model), "rows": repr(job.rows)}


def attached(**chosen: Any) -> Callable[..., Any]:
    def hook(model: nn.Module, optimizer: Any, scaler: Any) -> Any:
        return regimes.attach(
            model,
            optimizer,
            every=2,
            scaler=scaler,
            record=regimes.RecordOptions(summary=False),
            **chosen,
        )

    return hook


def used_scalers(count: int) -> list[Any]:
    made = [scaler_of("found") for _ in range(count)]
    for one in made:
        one.scale(torch.ones(1))
    return made


def check_same(found: dict[str, Any], clean: dict[str, Any]) -> None:
    assert torch.equal(found["weights"], clean["weights"])
    assert found["rows"] == clean["rows"]


@pytest.fixture(autouse=True)
def no_other_scaler() -> None:
    gc.collect()


HOLD_BACK: list[Any] = [name for name in REGISTRY if name not in ("dense", "cast")]
THRESHOLD = {"name": "threshold", "levels": {"low": 0.001, "high": 0.01}}  # of what is unscaled


@pytest.mark.parametrize("kind", ["told", "found"])
@pytest.mark.parametrize("chosen", [*HOLD_BACK, THRESHOLD], ids=str)
def test_compressors_of_ddp(chosen: Any, kind: str) -> None:
    hook = attached(compressor=chosen, policy=RULE)
    found = looped(DistributedDataParallel(network()), hook, kind)
    gc.collect()  # its scaler could be the next model's in the first pass
    check_same(found, looped(DistributedDataParallel(network()), hook, "none"))


@pytest.mark.parametrize(
    "more",
    [
        {"step_once": clipped},
        {"step_once": by_itself},
        {"passes": 2},
        {"made": torch.optim.AdamW},
        {"made": lambda p, lr: torch.optim.SGD(p, lr, fused=True)},
    ],
    ids=["clipped", "by itself", "two exchanges", "adamw", "fused"],
)
@pytest.mark.parametrize(("signal", "others"), [("update", 0), ("global", 2)])
def test_ways_to_step(more: dict[str, Any], signal: str, others: int) -> None:
    there = used_scalers(others)
    hook = attached(compressor="powersgd", policy=RULE, signal=signal)
    model = DistributedDataParallel(network())
    found = looped(model, hook, "found", **more)
    del there
    if more.get("step_once") in (clipped, by_itself):
        more = {**more, "step_once": _clipped_alone if more["step_once"] is clipped else plain}
    check_same(found, looped(DistributedDataParallel(network()), hook, "none", **more))


def _clipped_alone(scaler: Any, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()


@dataclass(frozen=True)
class Reads:
    """A constant level, and statistics that are measured for it."""

    needs: tuple[str, ...] = ("norm", "msdr", "error:high")
    names: tuple[str, ...] = ("high",)

    def decide(self, history: Any, layers: Any) -> list[Any]:
        return [regimes.policies.Decision("high", {"rule": "constant"}) for _ in layers]


@pytest.mark.parametrize("ours", ["found", "none"])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_scalers_of_other_models(ours: str, others: int) -> None:
    """They have scaled losses before; the first step of the optimiser shows whose scaler it is."""
    there = used_scalers(others)
    hook = attached(compressor="powersgd", policy=Reads(), levels={"high": 1})
    found = looped(DistributedDataParallel(network()), hook, ours)
    del there
    check_same(found, looped(DistributedDataParallel(network()), hook, "none"))


@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_a_resumed_job_finds_it_before_its_first_step(name: str) -> None:
    """The residuals that it has loaded are in units of the unscaled loss."""

    def whole(kind: str, stop: int | None) -> Tensor:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scaler, hook = scaler_of(kind), None
        for step in range(STEPS):
            if step in (0, stop):
                saved = (hook.state_dict(), scaler.state_dict()) if hook else None
                copied = copy.deepcopy(model.module.state_dict())
                hook = scaler = None
                gc.collect()
                model = DistributedDataParallel(network())
                model.module.load_state_dict(copied)
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                scaler = scaler_of(kind)
                hook = attached(compressor=name, policy=RULE)(model, optimizer, None)
                if saved:
                    hook.load_state_dict(saved[0])
                    if saved[1]:
                        scaler.load_state_dict(saved[1])
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            plain(scaler, optimizer, model)
        return weights(model)

    assert torch.equal(whole("found", 5), whole("none", None))


def test_scalers_that_no_step_tells_apart() -> None:
    """Masters of the weights are stepped, which no hook sees, and two scalers have scaled."""
    there = used_scalers(1)
    model, scaler = DistributedDataParallel(network()), scaler_of("found")
    regimes.attach(
        model, compressor=regimes.PowerSGD(rank=1), record=regimes.RecordOptions(summary=False)
    )
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.05)

    def step_once(step: int) -> None:
        scaler.scale(model(batch(step)).square().mean()).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.clone(), None
        plain(scaler, optimizer, model)
        with torch.no_grad():
            torch._foreach_copy_([*model.parameters()], masters)

    for step in range(63):
        step_once(step)
    with pytest.warns(UserWarning, match=r"a GradScaler .* attach\(\.\.\., scaler=scaler\)"):
        step_once(63)
    step_once(64)
    del there


# -- models that FSDP2 divides ---------------------------------------------------------------------


def divided(rank: int, way: str, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    runs = []
    for kind in ("told", "found", "none"):
        net: Any = network()
        if way == "islands":
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            fully_shard(net, mesh=mesh["shard"])
            hook = attached(replicas=mesh["replicate"], **chosen)
        elif way == "islands within":
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(net, mesh=mesh["shard"])
            hook = attached(replicas=mesh["replicate"], shards=mesh["shard"], **chosen)
        else:
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(net, mesh=mesh)
            hook = attached(shards=mesh, **chosen)
        runs.append(looped(net, hook, kind, rank=rank))
        gc.collect()
    return runs


FEEDBACK = {"levels": {"low": 8, "high": 4}, "error_feedback": True, "stochastic": False}


def test_models_that_are_divided() -> None:
    ways: list[tuple[str, dict[str, Any]]] = [
        ("islands", {"compressor": "powersgd", "policy": RULE}),
        ("islands", {"compressor": "topk", "policy": RULE}),
        ("islands within", {"compressor": "powersgd", "policy": RULE, "scatter": {"level": 8}}),
        ("shards", {"policy": RULE, "scatter": FEEDBACK}),
        ("shards", {"policy": RULE, "scatter": {**FEEDBACK, "residual_bits": 8}}),
    ]
    for answers in processes.run_in_turn(2, *((divided, *way) for way in ways)):
        for told, found, clean in answers:
            check_same(told, clean)
            check_same(found, clean)
