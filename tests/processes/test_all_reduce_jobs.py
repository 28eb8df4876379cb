"""Quantised all-reduce in a user's job (oracle: the simulated reduction of the same gradients, or
of the same movements)."""

from __future__ import annotations

import torch
from ddp_scripts import group
from leveled import leveled
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer

F64 = torch.float64
SHAPE, STEPS, PERIOD, RATE = (9, 10), 6, 2, 0.25
TABLES = [
    {"name": "quantised-all-reduce", "block": 16},
    {"name": "quantised-all-reduce", "block": 16, "stochastic": False, "error_feedback": True},
]


def slopes(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, *SHAPE, generator=generator, dtype=F64)


class Straight(nn.Module):
    """Its gradient is what is given, wherever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=F64))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope).sum()


def train(model: nn.Module, sgd: torch.optim.Optimizer, step: int, rank: int) -> None:
    sgd.zero_grad()
    model(slopes(step)[rank]).backward()
    sgd.step()


def hooked(rank: int, turn: int) -> Tensor:
    model = DistributedDataParallel(Straight())
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    policy, levels = {"name": "static", "level": "high"}, {"low": 8, "high": 4}
    hook = regimes.attach(model, policy=policy, compressor=leveled(TABLES[turn], levels))
    for step in range(STEPS):
        train(model, sgd, step, rank)
    hook.close()
    return model.module.weight.detach().clone()


def local(rank: int, turn: int) -> Tensor:
    model = Straight()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    job = regimes.local_steps(model, sgd, policy=PERIOD, compressor=leveled(TABLES[turn], 4))
    for step in range(STEPS):
        train(model, sgd, step, rank)
        job.step()
    job.close()
    return model.weight.detach().clone()


def simulated(turn: int, period: int) -> Tensor:
    world = World(2)
    world.meter.dtype = F64
    to, weight = Reducer(make_compressor(TABLES[turn]), [Layer("weight", SHAPE)], world, 0), 0
    for first in range(0, STEPS, period):
        grad = sum(RATE * slopes(step) for step in range(first, first + period))
        assert isinstance(grad, Tensor)
        weight = (
            weight
            - Exchange(to).exchange_step([grad], [4], torch.zeros(2, dtype=F64), grad.flatten(1))[
                0
            ][0]
        )
    assert isinstance(weight, Tensor)
    return weight


def test_a_job_is_the_simulation() -> None:
    ways = [
        (job, period, turn) for job, period in ((hooked, 1), (local, PERIOD)) for turn in (0, 1)
    ]
    answers = group.run_in_turn(2, *((job, turn) for job, _, turn in ways))
    for (_, period, turn), (first, second) in zip(ways, answers, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, simulated(turn, period), rtol=1e-9, atol=1e-9)
