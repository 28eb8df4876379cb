"""Runs of a grid that share one group of processes (oracles: simulated workers, counts of meetings
with real gloo groups over loopback)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives.connect import connect_world, shared_group
from regimes.records import load
from regimes.search import sweep


def config(**changes: Any) -> RunConfig:
    short = [
        "data.train_size=64",
        "data.test_size=32",
        "epochs=2",
        "optimizer.decay_epochs=[]",
        "optimizer.warmup_from=none",
    ]
    return replace(override(regimes.get_preset("smoke/low"), short), **changes)


def count_meetings() -> list[str]:
    """Names of the groups that this process makes from here on."""
    made: list[str] = []
    init = dist.init_process_group

    def counted(backend: str, *args: Any, **kwargs: Any) -> None:
        made.append(backend)
        init(backend, *args, **kwargs)

    dist.init_process_group = counted  # type: ignore[assignment]
    return made


def a_grid(rank: int, out: str) -> tuple[list[str], list[str], bool]:
    """Three cells, the second of which diverges: messages, meetings, is a group left?"""
    made = count_meetings()
    wild = config(optimizer=replace(config().optimizer, lr=1e30))
    todo = [
        (Path(out, name), cell)
        for name, cell in (
            ("a", config(seed=1)),
            ("b", config(seed=2)),
            ("wild", wild),
            ("c", config(seed=3)),
            ("d", config(seed=4)),
        )
    ]
    failures = sweep.ablate(todo, 1, lambda *_: None)
    return failures, made, dist.is_initialized()


def test_a_grid_meets_once_and_again_after_a_failure(tmp_path: Path) -> None:
    answers = group.run(a_grid, 2, str(tmp_path), timeout=None)
    for failures, made, left in answers:
        assert len(failures) == 1
        assert "wild" in failures[0]
        assert made == ["gloo", "gloo"]  # for a, b and wild; for c and d
        assert not left
    for name, seed in (("b", 2), ("d", 4)):  # which find a group
        alone = regimes.run(config(seed=seed), tmp_path / f"{name}-simulated")
        both = load(tmp_path / name).epochs["train_loss"].to_numpy()
        assert both == pytest.approx(alone.epochs["train_loss"].to_numpy(), rel=1e-4)


def apart(rank: int) -> tuple[list[str], list[float]]:
    """Worlds one after the other: kept, of another patience, of one whose end was not seen here."""
    made, means = count_meetings(), []
    with shared_group():
        for run, timeout in enumerate((60, 60, 50, 50, 50)):
            world = connect_world(2, torch.device("cpu"), timeout)
            means.append(world.mean_over_workers([torch.tensor([[float(rank + run)]])])[0].item())
            if not (run == 3 and rank == 1):
                world.close()
        with pytest.raises(ConfigError, match="multiple of the number of processes"):
            connect_world(3, torch.device("cpu"), 50)
        world = connect_world(2, torch.device("cpu"), 50)
        world.close()
    return made, means


def test_who_wants_another_group_or_lacks_it_makes_all_meet_anew() -> None:
    for made, means in group.run(apart, 2, timeout=None):
        assert made == ["gloo"] * 3
        assert means == [0.5, 1.5, 2.5, 3.5, 4.5]


def lonely(rank: int) -> str:
    """Process 1 goes away after the first run."""
    with shared_group():
        connect_world(2, torch.device("cpu"), 2).close()
        if rank == 1:
            return ""
        with pytest.raises(TrainingError) as missed:
            connect_world(2, torch.device("cpu"), 2)
    return str(missed.value)


def test_who_has_gone_is_named() -> None:
    said, _ = group.run(lonely, 2, timeout=None)
    assert "lost contact with the others at the start (no sign of process 1" in said


def test_several_jobs_under_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"--jobs = 2.*launcher has started several processes"):
        sweep.ablate([(tmp_path / "run", config())], 2, lambda *_: None)
