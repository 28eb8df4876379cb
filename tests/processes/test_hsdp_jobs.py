"""Sharded replicas in jobs as they are: a frozen layer with one of low rank beside it, in torch's
checkpoint wrapper, trained by Muon and AdamW. Oracle: torch's own HSDP, where nothing is
compressed. And today's ``replicate``, whose oracle is DDP with the hook."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ddp_scripts import group, hsdp
from ddp_scripts.hsdp import BATCH, Case
from tensors import near
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import regimes


class Low(nn.Module):
    """A frozen linear layer, and a trained one of rank 2 in parallel (LoRA)."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.down, self.up = nn.Linear(n, 2, bias=False), nn.Linear(2, m, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def built(mesh: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Low(8, 7), nn.Tanh(), nn.Linear(7, 5))
    model[2] = checkpoint_wrapper(model[2])
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(rank: int) -> list[Any]:
    """On two replicas of two without compression, and the same by torch's HSDP."""
    mesh, found = hsdp.two_dimensions(2, 2), list[Any]()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for ours in (True, False):
        model = built(mesh["shard"] if ours else mesh)
        free = [p for p in model.parameters() if p.requires_grad]
        flat, matrices = ([p for p in free if p.ndim == n] for n in (1, 2))
        both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(flat, lr=0.01)]
        if ours:
            dense = {"compressor": "dense", "levels": {"low": "dense", "high": "dense"}}
            hook = regimes.attach_replicas(model, mesh["replicate"], both[0], every=2, **dense)
            found.append(list(hook.levels))
        for step in range(4):
            x = torch.randn(4, BATCH, 6, generator=torch.Generator().manual_seed(step))[rank]
            F.cross_entropy(model(x), x.argmax(1) % 5).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        found.append(list(hsdp.weights(model).values()))
    return found


@pytest.mark.slow
def test_wrapped_layers_of_low_rank_with_muon_equal_torchs_hsdp() -> None:
    for layers, ours, theirs in group.run(trained, 4):
        assert "2.down.weight" in layers
        assert "2.base.weight" not in layers
        for mine, tensor in zip(ours, theirs, strict=True):
            # Muon's iteration runs in bfloat16 and magnifies small singular values
            assert torch.allclose(mine, tensor, rtol=0, atol=5e-3)


def replicated(rank: int) -> list[dict[str, Any]]:
    mesh, found = hsdp.two_dimensions(2, 1), []
    for own in (True, False):
        model: Any = hsdp.build(Case(side=True))
        options: dict[str, Any] = {"compressor": regimes.PowerSGD(rank={"low": 2, "high": 1})}
        if own:
            model = replicate(model, mesh=mesh["shard"])
            options["replicas"] = mesh["replicate"]
        else:
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = hsdp.optimiser(model, Case())
        hook = regimes.attach(model, optimizer, every=3, policy=hsdp.RULE, seed=7, **options)
        hsdp.train(model, optimizer, Case(side=True), rank, slice(0, BATCH))
        hook.close()
        found.append(hsdp.weights(getattr(model, "module", model)))
    return found


def test_todays_replicate_is_a_replica_of_one() -> None:
    for ours, ddp in group.run(replicated, 2):
        near(ours, ddp, 1e-12)
