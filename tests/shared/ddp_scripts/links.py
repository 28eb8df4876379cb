"""Jobs whose level, or period, follows the measured link."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ddp_scripts import cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.job.clock import Clock

RANKS = {"high": 1, "mid": 2, "low": 4}


def clock(seconds: dict[str, float]) -> Clock:
    """One that has measured these."""
    made = Clock(torch.device("cpu"))
    made.seconds |= seconds
    return made


def jobs(rank: int) -> dict[str, Any]:
    """What a hook, and local steps, have decided and recorded in five units and a half; each is
    loaded from its own state in the middle of the fifth."""
    return {"hook": _hook(rank), "local": _local(rank)}


def _hook(rank: int) -> dict[str, Any]:
    case = cases.Case()
    model = DistributedDataParallel(cases.build(case))
    optimizer = cases.sgd(model)
    rule = {"name": "link", "exposed": 0.5}
    hook = regimes.attach(model, policy=rule, levels=RANKS, optimizer=optimizer, every=2)
    levels = []
    for step in range(11):
        if step == 9:
            hook.load_state_dict(hook.state_dict())
        cases.step_of(model, optimizer, case, step, rank)
        levels.append(next(name for name in hook.decided.names if name != "dense"))
    return _found(hook, levels)


def _local(rank: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rule = {"name": "link", "levels": ["8", "2"]}
    local = regimes.local_steps(model, optimizer, policy=rule, every=2)
    levels = []
    for step in range(11):
        if step == 9:
            local.load_state_dict(local.state_dict())
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        local.step()
        levels.append(local.decided["level"])
    return _found(local, levels)


def _found(job: Any, levels: list[str]) -> dict[str, Any]:
    job.close()
    links = [copy.copy(row["link"]) for row in job.rows]
    return {"links": links, "levels": levels, "loaded": [False] * 4 + [True, False]}
