"""Several parameter groups, each with a rate, a weight decay and a schedule of its own. Oracle: a
plain loop of torch over the mean gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_scripts import cases, group
from ddp_scripts.cases import Case
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes

CASE, UNIT, UNITS = Case(ddp={"bucket_cap_mb": 0.002}), 2, 4
RATES = ((0.05, 0.5), (0.2, 0.9), (0.01, 2.0))  # of a group: the first, and its factor per unit


def optimizer(net: nn.Module, turn: int) -> tuple[torch.optim.Optimizer, Any]:
    """SGD over three groups, of which another one is first at each turn, and its scheduler."""
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    members = [[p for i, (_, p) in enumerate(named) if i % 3 == kind] for kind in range(3)]
    order = [(kind + turn) % 3 for kind in range(3)]
    sgd = torch.optim.SGD(
        [{"params": members[k], "lr": RATES[k][0], "weight_decay": 0.02 * k} for k in order],
        momentum=0.9,
    )
    factors = [RATES[k][1] for k in order]
    rules = [lambda step, by=by: by ** (step // UNIT) for by in factors]
    return sgd, torch.optim.lr_scheduler.LambdaLR(sgd, rules)


def hooked(rank: int, turn: int) -> dict[str, Any]:
    model = DistributedDataParallel(cases.build(CASE), **CASE.ddp)
    sgd, scheduler = optimizer(model.module, turn)
    hook = regimes.attach(
        model,
        sgd,
        policy={"name": "rate-ladder", "levels": ["high", "low"], "shares": [0.6]},
        every=UNIT,
        compressor=regimes.PowerSGD(rank={"low": "dense", "high": "dense"}),
    )
    for step in range(UNIT * UNITS):
        cases.step_of(model, sgd, CASE, step, rank)
        scheduler.step()
    hook.close()
    return {"weights": cases.weights(model.module), "rows": hook.rows}


def plain(turn: int) -> dict[str, Tensor]:
    """The weights after as many steps along the mean gradient of two workers."""
    net = cases.build(CASE)
    sgd, scheduler = optimizer(net, turn)
    for step in range(UNIT * UNITS):
        sgd.zero_grad()
        sum(cases.loss_of(net, CASE, step, 0, worker) / 2 for worker in range(2)).backward()
        sgd.step()
        scheduler.step()
    return cases.weights(net)


def test_each_group_keeps_its_rate_and_the_first_ones_is_recorded() -> None:
    """Levels follow the recorded rate: they fall with the first group's, whatever the others do."""
    answers = group.run_in_turn(2, *((hooked, turn) for turn in range(3)))
    for turn, (first, second) in enumerate(answers):
        check(turn, first, second)


def check(turn: int, first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, tensor in plain(turn).items():
        torch.testing.assert_close(first["weights"][name], tensor, rtol=1e-11, atol=1e-11)
        assert torch.equal(first["weights"][name], second["weights"][name])
    start, by = RATES[turn]
    rows = first["rows"]
    assert rows == second["rows"]
    assert [row["lr"] for row in rows] == pytest.approx([start * by**u for u in range(UNITS)])
    assert [row["next_lr"] for row in rows] == pytest.approx(
        [start * by ** (u + 1) for u in range(UNITS)]
    )
    levels = [set(row["layers"]["level"]) - {"dense"} for row in rows]
    peak = [by**u / max(by**v for v in range(u + 1)) for u in range(UNITS)]
    assert levels == [{"low"} if share > 0.6 else {"high"} for share in peak]
