"""What jobs do with replicas: torch's optimisers, precision, wrappers, and layers of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from ddp_scripts import hsdp
from ddp_scripts.hsdp import BATCH, Case
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import regimes

STEPS = 4


class Low(nn.Module):
    """A frozen linear layer, and a trained one of rank 2 in parallel (LoRA)."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.down, self.up = nn.Linear(n, 2, bias=False), nn.Linear(2, m, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Low(8, 7), nn.Tanh(), nn.Linear(7, 5))


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    flat, matrices = ([p for p in trained if p.ndim == n] for n in (1, 2))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(flat, lr=0.01)]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)]


def one_by_one(mesh: Any, **options: Any) -> nn.Module:
    model = net()
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def wrapped(mesh: Any) -> nn.Module:
    model = net()
    model[2] = checkpoint_wrapper(model[2])
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled(mesh: Any) -> nn.Module:
    model = net()
    model[2].compile(backend="eager")
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, tuple[Callable[[Any], nn.Module], Callable[..., Any]]] = {
    "block by block": (one_by_one, adamw),
    "kept after forward": (lambda mesh: one_by_one(mesh, reshard_after_forward=False), adamw),
    "a checkpoint wrapper": (wrapped, adamw),
    "compiled": (compiled, adamw),
    "Muon": (one_by_one, muon),
}


def steps(model: nn.Module, build: Any, rank: int, hooked: Any = None) -> dict[str, Any]:
    optimizers = build(model)
    hook = hooked and hooked(optimizers[0])
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(4, BATCH, 6, generator=draw)[rank]
        loss = F.cross_entropy(model(x), x.argmax(1) % 5)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "weights": {
            k.replace("_checkpoint_wrapped_module.", ""): v for k, v in hsdp.weights(model).items()
        },
        "layers": [] if hook is None else list(hook.levels),
    }


def trained(rank: int) -> dict[str, Any]:
    """Each way on two replicas of two without compression, and the same by torch's HSDP."""
    mesh = hsdp.two_dimensions(2, 2)
    dense = {"compressor": "dense", "levels": {"low": "dense", "high": "dense"}}
    found: dict[str, Any] = {}
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for name, (build, optimizer) in WAYS.items():
        model = build(mesh["shard"])
        attach = lambda own, model=model: regimes.attach_replicas(  # noqa: E731
            model, mesh["replicate"], own, every=2, **dense
        )
        found[name] = {
            "ours": steps(model, optimizer, rank, attach),
            "theirs": steps(build(mesh), optimizer, rank),
        }
    return found


def replicated(rank: int) -> list[dict[str, Any]]:
    """Today's ``replicate`` over replicas of one process; and DDP with the hook."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = []
    for own in (True, False):
        model: Any = hsdp.build(Case(side=True))
        if own:
            model = replicate(model, mesh=mesh["shard"])
            options: dict[str, Any] = {"replicas": mesh["replicate"]}
        else:
            model, options = (
                nn.parallel.DistributedDataParallel(model, find_unused_parameters=True),
                {},
            )
        optimizer = hsdp.optimiser(model, Case())
        hook = regimes.attach(
            model,
            optimizer,
            every=3,
            policy=hsdp.RULE,
            seed=7,
            compressor=regimes.PowerSGD(rank={"low": 2, "high": 1}),
            **options,
        )
        hsdp.train(model, optimizer, Case(side=True), rank, slice(0, BATCH))
        hook.close()
        found.append(hsdp.weights(getattr(model, "module", model)))
    return found


def precisions(rank: int) -> dict[str, float]:
    """The largest difference of a weight from float32, by policy of mixed precision."""
    mesh, found = hsdp.two_dimensions(2, 2), {}
    half, full = torch.bfloat16, torch.float32
    low_rank = regimes.PowerSGD(rank={"low": 2, "high": 1})
    for name, policy in {
        "full": MixedPrecisionPolicy(),
        "reduced in float32": MixedPrecisionPolicy(half, reduce_dtype=full),
        "reduced in bfloat16": MixedPrecisionPolicy(half, reduce_dtype=half),
        "reduced as computed": MixedPrecisionPolicy(half),
    }.items():
        model = one_by_one(mesh["shard"], mp_policy=policy)
        attach = lambda own, model=model: regimes.attach_replicas(  # noqa: E731
            model, mesh["replicate"], own, every=2, compressor=low_rank
        )
        found[name] = steps(model, adamw, rank, attach)["weights"]
    whole = found.pop("full")
    return {
        name: max(float((weights[k] - whole[k]).abs().max()) for k in whole)
        for name, weights in found.items()
    }
