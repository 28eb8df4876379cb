"""Jobs with the hook whose compressor and policy are a user's own file, ``parts.py``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from ddp_scripts.released import RATE, batch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import regimes

UNIT, UNITS = 2, 3  # steps, units


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 5)).double()


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trained(rank: int, folder: str, rule: str) -> dict[str, Any]:
    """A DDP script with ``RowMean``, and a policy: ``Alternate``, or one that follows ``Falls``."""
    sys.path.insert(0, folder)
    parts = importlib.import_module("parts")
    net = DistributedDataParallel(build())
    follows = {"name": "detected", "detector": {"name": "parts:Falls"}}
    policy = parts.Alternate() if rule == "Alternate" else follows
    levels = {"low": 1, "high": 2}
    hook = regimes.attach(net, policy=policy, compressor=parts.RowMean(), levels=levels)
    own = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(UNITS * UNIT):
        own.zero_grad()
        x, y = batch(step, dist.get_rank())
        cross_entropy(net(x), y).backward()
        own.step()
        if step % UNIT == UNIT - 1:
            hook.epoch_end(lr=RATE)
    return {"weights": weights(net.module), "rows": hook.rows}


def naive(batches: list[list[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    """The same weights by a plain loop: every worker sends the mean of each row of its gradient
    and of what it owes, and owes the rest.

    Args:
        batches: those of each worker, by step.
    """
    net = build()
    owed = [[torch.zeros_like(p) for p in net.parameters()] for _ in batches[0]]
    for step in batches:
        updates = [torch.zeros_like(p) for p in net.parameters()]
        for worker, (x, y) in enumerate(step):
            gradients = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
            for i, gradient in enumerate(gradients):
                if gradient.dim() == 1:
                    updates[i] += gradient / len(step)
                    continue
                owes = gradient + owed[worker][i]
                sent = owes.mean(1, keepdim=True).expand_as(owes)
                owed[worker][i] = owes - sent
                updates[i] += sent / len(step)
        with torch.no_grad():
            for parameter, update in zip(net.parameters(), updates, strict=True):
                parameter -= RATE * update
    return weights(net)
