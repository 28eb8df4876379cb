"""A process for each worker of a configuration, in somebody's own loop: trials of levels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import regimes
from regimes.config import RunConfig

Batches = list[tuple[Tensor, Tensor]]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over tokens."""
    x, y = batch
    return nn.functional.cross_entropy(model(x)[0].flatten(0, -2), y.flatten())


def trained(
    rank: int, c: RunConfig, start: nn.Module, batches: list[Batches], probes: Batches, stop: int
) -> list[Any]:
    """The parameters and rows after some steps of each process's batches; from ``stop`` on by other
    objects, whose state is that of a trial's middle."""
    o = c.optimizer

    def job() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = copy.deepcopy(start)
        own = torch.optim.SGD(
            model.parameters(), o.lr, o.momentum, nesterov=o.nesterov, weight_decay=o.weight_decay
        )
        local = regimes.local_steps(
            model,
            own,
            policy=2,
            outer={key: getattr(c.outer, key) for key in ("lr", "momentum", "nesterov")},
            compressor=c.compressor,
            levels=c.levels,
            level_policy=c.policy,
            probe=(loss, probes),
            every=c.unit_steps or 1,
            seed=c.seed,
        )
        return model, own, local

    model, own, local = job()
    for done, batch in enumerate(batches[rank], start=1):
        model.train()
        own.zero_grad()
        loss(model, batch).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for g in gradients:
            g *= min(1.0, (o.clip or torch.inf) / float(norm))
        own.step()
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
    """The error where processes have different batches; levels and floats of each unit of a policy
    that makes no trials."""
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
