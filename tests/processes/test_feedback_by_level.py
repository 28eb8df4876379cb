"""Error feedback as part of a level, in jobs: the trainer, the hook and a simulation are one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from configs import smoke
from ddp_scripts import cases, group, jobs
from runs import resumed_alike, same_run, weights
from tensors import near
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes import attach
from regimes.base.config import RunConfig, to_dict
from regimes.records import load

LEVELS: dict[str, Any] = {"drops": {"level": 10, "error_feedback": False}, "keeps": 5}
RULE = {"name": "windows", "windows": [[1, 2]], "inside": "drops", "outside": "keeps"}


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
            policy=RULE,
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


DROPS = "levels={drops={level=1, error_feedback=false}, keeps=1}"
POLICY = "policy={name='windows', windows=[[0, 1], [2, 3]], inside='drops', outside='keeps'}"


def config(*settings: str) -> RunConfig:
    """Worker by worker: what one pass rounds otherwise, rank 1 without feedback magnifies."""
    small = ("workers=2", "data.train_size=60", "data.test_size=50", "union_pass=false")
    return smoke("device=cpu", *small, *settings)


def run(at: RunConfig, folder: Path) -> dict[str, Any]:
    regimes.run(at, folder)
    return weights(folder)


def test_trainer_hook_simulation_and_a_resumed_run_are_one(tmp_path: Path) -> None:
    ours = config(DROPS, POLICY)
    resumed_alike(ours, tmp_path, 2)  # residuals are kept in unit 1, dropped in 2
    found = group.run(everything, 2, ours, tmp_path / "real")
    same_run(tmp_path / "whole", tmp_path / "real")
    whole = weights(tmp_path / "whole")
    near(found[0]["weights"], whole, 1e-12)
    assert [one["resumed"] for one in found] == [True, True]
    record = load(tmp_path / "whole")
    levels = [row["layers"]["level"][0] for row in record.rows]
    assert levels == ["drops", "keeps", "drops", "keeps"]
    assert record.config["levels"] == to_dict(ours)["levels"]
    assert record.config["levels"]["drops"] == {"level": 1, "error_feedback": False}


LOCAL = ("sync_levels={high=3}", "sync_policy={name='static', level='high'}")


def test_one_of_both_throughout_is_that_compressor(tmp_path: Path) -> None:
    """A reduction: the levels alone, and the compressor's own field, say the same; of movements
    after local steps, too."""
    for name, own, more in (("drops", "false", LOCAL), ("keeps", "true", ())):
        by_level = config(DROPS, f"policy={{name='static', level='{name}'}}", "epochs=2", *more)
        throughout = ("levels={keeps=1}", "policy={name='static', level='keeps'}", "epochs=2")
        by_field = config(*throughout, f"compressor.error_feedback={own}", *more)
        mine, theirs = run(by_level, tmp_path / name), run(by_field, tmp_path / f"{name} field")
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
