"""A level that would send more of a layer than it has: the layer travels as without compression, in
each way to run, and the job says so. Torch's own numbers are the oracle, or those at "dense"."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from ddp_scripts import fsdp, group
from tensors import same
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


@pytest.mark.parametrize("local", [False, True], ids=["DDP", "local steps"])
def test_a_rank_above_all_is_dense_and_said(local: bool) -> None:
    for rank, (pressed, dense) in enumerate(group.run(both, 2, local)):
        for ours, theirs in zip(pressed["weights"], dense["weights"], strict=True):
            assert torch.equal(ours, theirs)
        assert pressed["floats"] == [SIZES] * STEPS
        (cost,) = (cost for level, cost in pressed["per_step"].items() if level != "dense")
        assert cost["layers"] == SIZES
        assert cost["whole"] == ["row", "first.weight", "second.weight"]
        sentence = "because 64 would not send less of them (row, first.weight, second.weight)"
        assert (sentence in pressed["said"]) == (rank == 0)
        assert "sent whole" not in dense["said"]


def test_collectives_of_fsdp2_with_a_scale_for_each_number_are_torchs() -> None:
    """8 bits and a scale are more than a number: such pieces travel as they are."""
    cases = [fsdp.Case({"level": 8, "block": 1}), fsdp.Case({"level": "dense"})]
    cases.append(fsdp.Case(attach=False))
    for ours, dense, torchs in group.run(fsdp.trained, 2, 2, cases):
        for row, plain in zip(ours["rows"], dense["rows"], strict=True):
            assert row["layers"]["bytes"] == plain["layers"]["bytes"]
            assert row["collectives"] == plain["collectives"]
        same(ours["weights"], torchs["weights"])
