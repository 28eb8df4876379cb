"""A grid of branches is a tree (oracle: branches made one by one; the number of trained units)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from runs import same_bits

import regimes
from regimes.base.errors import ConfigError
from regimes.presets import get_grid
from regimes.records import load_all, read_lines
from regimes.search import sweep, trees
from regimes.training import loop

GRID = """
base = "smoke"
seeds = 1
set = ["epochs=4", "data.train_size=100", "data.test_size=50", "optimizer.decay_epochs=[3]",
       "policy={name='static', level='low'}"]

[schedules.pulse]
branch = { of = "low", at = [0, 2], length = 1 }
policy.level = "high"

[schedules.low]

[schedules.still]
branch = { of = "low", at = 1 }
"""
Command = Callable[..., object]


@pytest.fixture
def grid(tmp_path: Path) -> str:
    (tmp_path / "pulses.toml").write_text(GRID)
    return str(tmp_path / "pulses.toml")


def test_an_arm_for_each_intervention_and_onset(grid: str) -> None:
    cells = get_grid(grid)
    assert list(cells) == ["low", "pulse from 0", "pulse from 2", "still from 1"]
    assert cells["pulse from 2"].policy == {"name": "static", "level": "high"}
    assert cells["pulse from 2"].epochs == cells["low"].epochs == 4
    assert cells["still from 1"].policy == cells["low"].policy


def test_branches_are_taken_at_each_rate_of_their_trunk(tmp_path: Path) -> None:
    (tmp_path / "rates.toml").write_text("rates = [0.1, 0.2]\n" + GRID)
    cells = get_grid(str(tmp_path / "rates.toml"))
    assert "pulse from 2 at 0.2" in cells
    branch = cells["pulse from 2 at 0.2"]
    assert branch.branch is not None
    assert branch.branch.of == "low at 0.2"
    assert branch.optimizer.lr == 0.2


def test_a_trunk_keeps_what_its_branches_need(grid: str, tmp_path: Path) -> None:
    cells = dict(sweep.list_cells(get_grid(grid), [7], tmp_path))
    trunk = cells[tmp_path / "low/seed-7"]
    assert trunk.checkpoint_keep == (0, 1, 2)
    branch = cells[tmp_path / "pulse from 2/seed-7"]
    assert branch.branch is not None
    assert branch.branch.of == "../../low/seed-7"
    waves = trees.group_waves(sweep.list_cells(get_grid(grid), [7, 8], tmp_path))
    assert [len(wave) for wave in waves] == [2, 6]


def test_a_trunk_keeps_its_own_checkpoints_too(tmp_path: Path) -> None:
    own = GRID.replace("set = [", 'set = ["checkpoint_keep=[0, 3]", ')
    (tmp_path / "own.toml").write_text(own)
    cells = dict(sweep.list_cells(get_grid(str(tmp_path / "own.toml")), [7], tmp_path))
    assert cells[tmp_path / "low/seed-7"].checkpoint_keep == (0, 1, 2, 3)


def _locked(folder: Path) -> IO[bytes]:
    """The lock that a process has which trains a run there."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.mark.parametrize("name", ["pulse from 0", "low"])
def test_a_run_of_another_shell_has_not_failed(
    name: str, grid: str, command: Command, tmp_path: Path
) -> None:
    """Nor has a branch whose trunk is trained there."""
    with _locked(tmp_path / "tree" / name / "seed-0"):
        two = ("--schedules", "low", "--schedules", "pulse from 0")
        done = command("ablate", grid, "--out", "tree", *two)
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    said = done.stdout  # type: ignore[attr-defined]
    assert "failed" not in said
    count = 1 if name != "low" else 2
    assert said.count("left out: ") == count
    assert f"{count} runs are trained by another process" in said


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_tree_is_trained_once_and_resumed(
    grid: str, jobs: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, original = [0], loop._train_unit

    def counted(*words: object) -> object:
        units[0] += 1
        return original(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "_train_unit", counted)
    done = command("ablate", grid, "--out", "tree", "--jobs", jobs)
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    assert "4 runs in tree, 0 already finished" in done.stdout  # type: ignore[attr-defined]
    if jobs == "1":
        assert units[0] == 4 + 4 + 2 + 3  # of 16 in four whole runs
    runs = {run.config["name"]: run for run in load_all(tmp_path / "tree")}
    assert {name: len(run.rows) for name, run in runs.items()} == dict.fromkeys(runs, 4)
    trunk = tmp_path / "tree/low/seed-0"
    assert len(read_lines(tmp_path / "tree/pulse from 2/seed-0/epochs.jsonl")) == 2
    alone = regimes.branch(
        trunk, at=2, length=1, set={"policy.level": "high"}, out=tmp_path / "alone"
    )
    same_bits(alone.folder, tmp_path / "tree/pulse from 2/seed-0")
    assert runs["still from 1"].rows == runs["low"].rows
    again = command("ablate", grid, "--out", "tree", "--jobs", jobs)
    assert "4 runs in tree, 4 already finished" in again.stdout  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('branch = { of = "high", at = 1 }', "did you mean|Known: low"),
        ('branch = { of = "low", at = [1, 1] }', "a list of different ones"),
        ('branch = { of = "low", at = 1, long = 2 }', "unknown key 'long'"),
        ('branch = { of = "low", at = 1 }\nrate = 0.1', "no such key"),
        ("branch = 3", "a table like"),
    ],
)
def test_a_wrong_branch_is_one_sentence(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f'base = "smoke"\n[schedules.low]\n[schedules.pulse]\n{line}\n')
    with pytest.raises(ConfigError, match=words):
        get_grid(str(path))


def test_a_branch_without_its_trunk_is_refused(grid: str, command: Command) -> None:
    done = command("ablate", grid, "--schedules", "pulse from 2")
    assert done.returncode == 2  # type: ignore[attr-defined]
    assert "add --schedules 'low'" in done.stderr  # type: ignore[attr-defined]


def test_tune_leaves_branches_to_their_trunks(grid: str, command: Command) -> None:
    done = command("tune", grid, "--set", "data.validation_size=50", "--values", "optimizer.lr=0.1")
    assert "tune its trunk" in done.stderr  # type: ignore[attr-defined]
