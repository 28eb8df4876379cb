"""A user's script with the hook, and the ways in which it can end; see ``test_threads.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes


def train() -> Any:
    """Two epochs; what a script has in its hands afterwards."""
    dist.init_process_group(
        "gloo",
        sys.argv[2] if len(sys.argv) > 2 else None,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = regimes.attach(model, compressor=regimes.PowerSGD(rank={"low": 2, "high": 1}))
    for _ in range(2):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().sum().backward()
            optimizer.step()
        hook.epoch_end(lr=0.1)
    return model, optimizer, hook


def step(model: nn.Module) -> None:
    model(torch.randn(4, 20)).square().sum().backward()


how = sys.argv[1]
if how == "kept to the end":
    kept = train()
    dist.destroy_process_group()
elif how == "left in a function":
    train()
    dist.destroy_process_group()
elif how == "destroyed by nobody":
    train()
elif how == "an error":
    kept = train()
    raise ValueError("of the user's own")
elif how == "a lost process":
    kept = train()
    if dist.get_rank() == 1:
        os._exit(0)
    step(kept[0])
elif how == "used after its end":
    kept = train()
    dist.destroy_process_group()
    kept[-1].world.barrier()
