"""A process for each worker of a configuration, in somebody's own loop: trials of levels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from copied_models import step_one

import regimes
from regimes import policies
from regimes.config import RunConfig
from regimes.data import load
from regimes.seeding import derive


def trained(rank: int, c: RunConfig, stop: int, folder: str | None = None) -> list[Any]:
    """The parameters and rows after an epoch; by other objects after ``stop`` steps, whose state is
    that of another trial's middle."""
    task = load(c)
    probes = [
        task.samples(
            task.batches(c, torch.device("cpu"), torch.float64),
            *(derive(c.seed, "trial", number), 0, 1, c.policy["samples"]),
        )[0]
        for number in range(9)
    ]

    def job() -> tuple[Any, torch.optim.Optimizer, Any]:
        model, o = task.build(c).double(), c.optimizer
        own = torch.optim.SGD(
            model.parameters(), o.lr, o.momentum, nesterov=o.nesterov, weight_decay=o.weight_decay
        )
        outer = {key: getattr(c.outer, key) for key in ("lr", "momentum", "nesterov")}
        local = regimes.local_steps(
            model,
            own,
            policy=2,
            outer=outer,
            compressor=c.compressor,
            levels=c.levels,
            level_policy=policies.policy(c.policy),
            probe=(lambda of, batch: task.loss(of, *batch), probes),
            every=c.unit_steps or 1,
            seed=c.seed,
            record=folder,
        )
        return model, own, local

    model, own, local = job()
    batches = task.batches(c, torch.device("cpu"), torch.float64).epoch(0, [rank])
    for done, (x, y) in enumerate(batches, start=1):
        step_one(c, model, own, task.loss, x[0], y[0])
        local.step()
        if done == stop:
            saved = copy.deepcopy([part.state_dict() for part in (model, own, local)])
            local.close()
            model, own, local = job()
            for part, state in zip((model, own, local), saved, strict=True):
                part.load_state_dict(state)
    local.close()
    return [{name: p.detach() for name, p in model.named_parameters()}, local.rows]


def other_policies(rank: int) -> list[Any]:
    """What one is told whose processes have other batches; the levels and floats of units of a
    policy that makes no trials."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)).double()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"policy": 2, "compressor": "topk", "every": 4}
    options["levels"] = {"low": 50, "high": 10}
    said = ""
    try:
        probe = (lambda of, batch: of(batch).square().mean(), torch.full((4, 6), float(rank)))
        regimes.local_steps(model, own, level_policy={"name": "trial"}, probe=probe, **options)
    except regimes.ConfigError as error:
        said = str(error)
    table = {"name": "windows", "windows": [[1, 2]]}
    local = regimes.local_steps(model, own, level_policy=table, **options)
    for _ in range(12):
        own.zero_grad()
        model(torch.ones(5, 6, dtype=torch.float64) * (rank + 1)).square().mean().backward()
        own.step()
        local.step()
    local.close()
    return [said, local.rows]
