"""DiLoCo with Muon for matrices and AdamW for all else, in an own loop; and the same by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regimes

PERIOD, ROUNDS = 3, 3
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)).double()
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    return net, [muon, torch.optim.AdamW(others, lr=0.01)]


def take(net: nn.Module, optimizers: Any, step: int, rank: int) -> None:
    draw = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    net.zero_grad()
    net(x).square().mean().backward()
    for one in optimizers:
        one.step()


def ours(rank: int, several: bool) -> tuple[list[Tensor], list[Any]]:
    net, optimizers = build()
    given: Any = optimizers if several else tuple(optimizers)
    local = regimes.local_steps(net, given, policy=PERIOD, outer=OUTER, every=PERIOD)
    for step in range(PERIOD * ROUNDS):
        take(net, optimizers, step, rank)
        local.step()
    local.close()
    return [p.detach() for p in net.parameters()], [row["lr"] for row in local.rows]


def by_hand(rank: int) -> list[Tensor]:
    net, optimizers = build()
    shared = [p.detach().clone() for p in net.parameters()]
    outer = torch.optim.SGD(shared, **OUTER)  # type: ignore[arg-type]
    for step in range(PERIOD * ROUNDS):
        take(net, optimizers, step, rank)
        if (step + 1) % PERIOD:
            continue
        for start, p in zip(shared, net.parameters(), strict=True):
            start.grad = start - p.detach()
            dist.all_reduce(start.grad)
            start.grad /= dist.get_world_size()
        outer.step()
        with torch.no_grad():
            for start, p in zip(shared, net.parameters(), strict=True):
                p.copy_(start)
    return shared


def both(rank: int) -> list[list[Tensor]]:
    torch.set_default_dtype(torch.float32)
    listed, rates = ours(rank, True)
    assert rates == [0.02] * ROUNDS
    return [listed, ours(rank, False)[0], by_hand(rank)]
