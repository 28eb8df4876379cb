"""Jobs of a script whose layers are so small that a rank would send more of them than they have."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes

SIZES = [5, 64, 8, 160]  # of the parameters: 1 x 5, 8 x 8, its bias, and 20 x 8
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 20, bias=False)
        self.row = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).sum() + self.row.square().sum()


def train(rank: int, local: bool, level: Any) -> dict[str, Any]:
    """Steps of DDP, or local ones; the record's numbers, what was said, and the weights."""
    network, said = Net(), io.StringIO()
    model = network if local else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    pressed = {"compressor": "powersgd", "level": level}
    job: Any
    if local:
        job = regimes.local_steps(model, optimizer, policy=1, every=1, **pressed)
    else:
        job = regimes.attach(model, optimizer, every=1, **pressed)
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).backward()
        optimizer.step()
        if local:
            job.step()
    with contextlib.redirect_stderr(said):
        job.close()
    return {
        "floats": [row["layers"]["floats"] for row in job.rows],
        "per_step": job.header["per_step"],
        "said": said.getvalue(),
        "weights": [p.detach().clone() for p in network.parameters()],
    }


def both(rank: int, local: bool) -> list[dict[str, Any]]:
    return [train(rank, local, level) for level in (64, "dense")]
