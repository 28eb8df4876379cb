"""Levels with error feedback of their own, in the hook and in the trainer on processes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from ddp_scripts import cases, jobs
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes import attach
from regimes.base.config import RunConfig

LEVELS: dict[str, Any] = {"drops": {"level": 10, "error_feedback": False}, "keeps": 5}
POLICY = {"name": "windows", "windows": [[1, 2]], "inside": "drops", "outside": "keeps"}


def everything(rank: int, config: RunConfig, out: Path) -> dict[str, Any]:
    """The trainer's run by a hook; does a hook go on in the same bits from its saved state?"""
    hooked = jobs.smoke(rank, config)
    resumed = goes_on(rank)
    jobs.trainer(rank, config, config.workers, out)  # the last: it makes a group of its own
    return {"weights": hooked["weights"], "resumed": resumed}


def goes_on(rank: int) -> bool:
    """Three units of two steps with TopK, saved after the first, whose residual is added in the
    second and dropped there."""
    case, saved = cases.Case(compressor="topk"), io.BytesIO()
    ends = []
    for resumed in (False, True):
        model = DistributedDataParallel(cases.build(case))
        optimizer = cases.sgd(model)
        hook = attach(
            model,
            optimizer,
            policy=POLICY,
            compressor=regimes.TopK(percent=LEVELS),
            every=2,
            seed=7,
        )
        parts = {"model": model, "optimizer": optimizer, "hook": hook}
        if resumed:
            saved.seek(0)
            state = torch.load(saved, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])
        for step in range(2 if resumed else 0, 6):
            cases.step_of(model, optimizer, case, step, rank)
            if step == 1:
                torch.save({name: part.state_dict() for name, part in parts.items()}, saved)
        ends.append(cases.weights(model.module))
        owed = [state.residual for state in hook.reducer.states]
        ends[-1] |= {str(i): r for i, r in enumerate(owed) if r is not None}
        hook.close()
    first, second = ends
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
