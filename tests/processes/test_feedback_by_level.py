"""Error feedback as part of a level, in jobs: the trainer, the hook and a simulation are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from configs import smoke
from ddp_scripts import feedback, group
from runs import resumed_alike, same_run, weights

import regimes
from regimes.base.config import RunConfig, to_dict
from regimes.records import load

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
    found = group.run(feedback.everything, 2, ours, tmp_path / "real")
    same_run(tmp_path / "whole", tmp_path / "real")
    whole = weights(tmp_path / "whole")
    for name, tensor in whole.items():
        assert torch.allclose(found[0]["weights"][name], tensor, rtol=0, atol=1e-12), name
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
