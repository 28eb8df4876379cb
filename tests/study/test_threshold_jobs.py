"""A constant threshold in a hook and between local steps (oracle: what moves is at least the level,
and nothing that is owed is)."""

from __future__ import annotations

import pytest
import torch
from ddp_scripts import group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes

F64 = torch.float64
LEVEL, STEPS = 0.5, 6


class Straight(nn.Module):
    """Its gradient is what is given, wherever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 10, dtype=F64))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope).sum()


def job(rank: int, hooked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, movements without compression, this worker's movements that are owed)."""
    net, moved, rate = Straight(), torch.zeros(9, 10, dtype=F64), 1.0
    sgd = torch.optim.SGD(net.parameters(), lr=rate)
    if hooked:
        model: nn.Module = DistributedDataParallel(net)
        levels, policy = {"high": LEVEL}, {"name": "static", "level": "high"}
        hook = regimes.attach(
            model, sgd, policy=policy, compressor={"name": "threshold", "levels": levels}, every=3
        )
    else:
        model = net
        hook = regimes.local_steps(
            net, sgd, policy=2, compressor={"name": "threshold", "level": LEVEL}
        )
    for t in range(STEPS):
        rate = sgd.param_groups[0]["lr"] = 1.0 if t < STEPS // 2 else 0.25
        generator = torch.Generator().manual_seed(10 * t + rank)
        slope = torch.randn(9, 10, generator=generator, dtype=F64)
        sgd.zero_grad()
        model(slope).backward()
        sgd.step()
        moved -= rate * slope
        if not hooked:
            hook.step()
    hook.close()
    reducer = hook.reducer if hooked else hook.sync.reducer
    (residual,) = reducer.residuals()
    return net.weight.detach().clone(), moved, residual[0] * (rate if hooked else 1)


@pytest.mark.parametrize("hooked", [True, False])
def test_a_job_owes_less_than_the_threshold(hooked: bool) -> None:
    (one, moved, owed), (two, others, theirs) = group.run(job, 2, hooked)
    assert torch.equal(one, two)
    debt = (owed + theirs) / 2
    torch.testing.assert_close(one - debt, (moved + others) / 2, rtol=1e-9, atol=1e-9)
    assert 0.4 * LEVEL < float(owed.abs().max()) < LEVEL
