"""Compressors of whole gradients behind FSDP2's reduce-scatter, beside the same job of DDP."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from ddp_scripts import fsdp
from ddp_scripts.fsdp import EVERY, STEPS, Case
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import regimes


def beside_ddp(
    rank: int, ranks: int, cases: Sequence[Case]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What one process has in the end, case by case: of FSDP2, and of DDP."""
    mesh, found = fsdp.flat_mesh(ranks), []
    for case in cases:
        measured: dict[str, Any] = {"instruments": {"residual", "cosine"}} if case.measured else {}
        net = fsdp.shard(fsdp.build(case), case, mesh)
        optimizer = fsdp.optimiser(net, case)
        hook = fsdp.attach(net, case, mesh, optimizer, **measured)
        fsdp.train(net, optimizer, case, rank)
        ours = outcome(hook, net)
        plain = fsdp.build(case)
        wrapped = DistributedDataParallel(plain, find_unused_parameters=True)
        optimizer = fsdp.optimiser(plain, case)
        words = {"optimizer": optimizer, "every": EVERY, "seed": 7, "policy": case.policy}
        hook = regimes.attach(wrapped, **words, **case.exchange, **measured)
        train_ddp(wrapped, optimizer, case, rank, ranks)
        found.append((ours, outcome(hook, plain)))
    return found


def train_ddp(wrapped: Any, optimizer: Any, case: Case, rank: int, ranks: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.accumulate):
            last = part == case.accumulate - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                fsdp.loss_of(wrapped, case, step, part, rank).backward()
        for p in wrapped.parameters():
            if case.factor is not None and p.grad is not None:
                p.grad.mul_(ranks / case.factor)  # a sum over the factor, not a mean
        if case.clip is not None:
            nn.utils.clip_grad_norm_(wrapped.parameters(), case.clip)
        optimizer.step()


def outcome(hook: Any, net: nn.Module) -> dict[str, Any]:
    owed = fsdp.residuals(hook)
    hook.close()
    names = [layer.name for layer in hook.layers]
    return {
        "weights": fsdp.weights(net),
        "owed": owed,
        "levels": hook.levels,
        "rows": [
            {
                "floats": dict(zip(names, row["layers"]["floats"], strict=True)),
                "levels": dict(zip(names, row["layers"]["level"], strict=True)),
                "statistics": {
                    kind: dict(zip(names, values, strict=True))
                    for kind, values in row["statistics"].items()
                },
                "calls": row["collectives"]["calls"],
                "bytes": row["collectives"]["bytes"],
                "steps": row["steps"],
            }
            for row in hook.rows
        ],
        "per_step": hook.header["per_step"],
    }


# -- gradients that are known ----------------------------------------------------------------------


class Products(nn.Module):
    """The gradient of each parameter is its input; the last ones may have none."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, inputs, strict=False)
        return torch.stack([(weight * x).sum() for weight, x in pairs]).sum()


def given(step: int, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def known(
    rank: int, ranks: int, shapes: Sequence[tuple[int, ...]], steps: int, half: bool, words: Any
) -> list[dict[str, Any]]:
    """By step: what the processes have reduced, and what this one owes afterwards."""
    mesh, found = fsdp.flat_mesh(ranks), list[dict[str, Any]]()
    kind = torch.bfloat16
    policy = MixedPrecisionPolicy(kind, reduce_dtype=kind) if half else MixedPrecisionPolicy()
    net: Any = fully_shard(
        Products(shapes),
        mesh=mesh,
        mp_policy=policy,
        shard_placement_fn=lambda p: Shard(int(p.shape == (8, 8))),  # its columns
    )
    hook = regimes.attach_shards(
        net, mesh, seed=7, record=regimes.RecordOptions(summary=False), **words
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        net(given(step, rank, shapes)).backward()
        optimizer.step()
        reduced = [fsdp.whole(p.grad).clone() for p in net.parameters()]
        found.append({"reduced": reduced, "owed": fsdp.residuals(hook)})
    hook.close()
    return found


def partly_used(
    rank: int, ranks: int, shapes: Sequence[tuple[int, ...]], ways: Sequence[dict[str, Any]]
) -> list[list[torch.Tensor]]:
    """What the processes have reduced where the first alone uses the last parameter: by torch
    alone, and then in each of some ways."""
    mesh, found = fsdp.flat_mesh(ranks), list[list[torch.Tensor]]()
    for words in [None, *ways]:
        net: Any = fully_shard(Products(shapes), mesh=mesh)
        net.set_reduce_scatter_unused_params(True)
        hook = None
        if words is not None:
            options = regimes.RecordOptions(summary=False)
            hook = regimes.attach_shards(net, mesh, seed=7, record=options, **words)
        inputs = given(0, rank, shapes)
        net(inputs if rank == 0 else inputs[:-1]).backward()
        found.append([fsdp.whole(p.grad).clone() for p in net.parameters()])
        if hook is not None:
            hook.close()
    return found


def said(rank: int, ranks: int, words: dict[str, Any]) -> str:
    """What a process says as the hook is attached."""
    net: Any = fully_shard(Products([(8, 8), (9,)]), mesh=fsdp.flat_mesh(ranks))
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        hook = regimes.attach_shards(net, fsdp.flat_mesh(ranks), **words)
    hook.close()
    return heard.getvalue()
