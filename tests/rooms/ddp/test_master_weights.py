"""A model in bfloat16 whose optimiser steps copies of its weights in float32.

Oracle: plain DDP and the same loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_process")

UNITS, STEPS = 3, 4
WAY = r"leave out optimizer= and every=, and call hook.epoch_end\(lr=\.\.\.\)"


def made() -> tuple[Any, list[Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 16).bfloat16())
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    return model, masters, torch.optim.SGD(masters, lr=0.1)


@pytest.mark.parametrize("kept", [{"every": 5}, {}])
def test_what_refuses_it_names_the_way_that_works(kept: dict[str, Any]) -> None:
    model, _, optimizer = made()
    with pytest.raises(ConfigError, match=f"none of the model's parameters.* {WAY}"):
        regimes.attach(model, optimizer, compressor=regimes.PowerSGD(rank=1), **kept)
    with pytest.raises(ConfigError, match=rf"every = 5.* {WAY}"):
        regimes.attach(model, every=5, compressor=regimes.PowerSGD(rank=1))


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("compressor", ["dense", "powersgd"])
def test_it_works(compressor: str, through_data: bool) -> None:
    """Without a warning (they are errors here), however the masters are copied back."""

    def trained(hooked: bool) -> tuple[Tensor, Any]:
        model, masters, optimizer = made()
        rule = {"name": "accordion", "interval": 1}
        hook = regimes.attach(model, compressor=compressor, policy=rule) if hooked else None
        for unit in range(UNITS):
            for step in range(STEPS):
                seed = torch.Generator().manual_seed(10 * unit + step)
                x = torch.randn(4, 8, generator=seed).bfloat16()
                model(x).square().mean().backward()
                for master, p in zip(masters, model.parameters(), strict=True):
                    master.grad, p.grad = p.grad.float(), None
                optimizer.step()
                for master, p in zip(masters, model.parameters(), strict=True):
                    with torch.no_grad():
                        (p.data if through_data else p).copy_(master)
            optimizer.param_groups[0]["lr"] /= 2
            if hook is not None:
                hook.epoch_end(lr=optimizer.param_groups[0]["lr"])
        return torch.cat([master.detach().flatten() for master in masters]), hook

    (ours, hook), (right, _) = trained(True), trained(False)
    assert [row["lr"] for row in hook.rows] == [0.05, 0.05, 0.025]
    assert all(row["steps"] == STEPS for row in hook.rows)
    assert torch.equal(ours, right) == (compressor == "dense")
    assert torch.allclose(ours, right, atol=0.1)
    hook.close()
