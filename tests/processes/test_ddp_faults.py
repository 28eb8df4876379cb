"""A stock DistributedDataParallel script with the hook: changes its ranks, is killed, continues."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ddp_scripts import group, jobs
from tensors import alike

import regimes
from regimes.records import read_lines

SLOW = pytest.mark.slow
EPOCHS = 6


def words(out: Path) -> list[str]:
    return ["--epochs", str(EPOCHS), "--batch-size", "16", "--out", str(out)]


def same_end(a: Path, b: Path, processes: int = 4) -> None:
    """Weights, momentum, residuals, memories and history of every process, bit for bit; not how
    long that took, nor where the record is."""
    for rank in range(processes):
        files = (folder / f"{EPOCHS:03d}" / f"process-{rank}.pt" for folder in (a, b))
        ours, theirs = (torch.load(file, weights_only=True) for file in files)
        for saved in (ours, theirs):
            del saved["hook"]["seconds"], saved["hook"]["logged"]
            saved["hook"]["recorded"].pop("folder", None)  # process 0 names it
        assert alike(ours, theirs)
    assert read_lines(a / "record" / "epochs.jsonl") == read_lines(b / "record" / "epochs.jsonl")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("undisturbed")
    return out, group.run(jobs.stock, 4, words(out), None)[0]


@pytest.mark.slow
def test_the_ranks_change_and_it_learns(undisturbed: tuple[Path, str]) -> None:
    out, printed = undisturbed
    levels = [row["layers"]["level"] for row in regimes.load(out / "record").rows]
    assert {x for row in levels for x in row} == {"low", "high", "dense"}
    assert len(re.findall(r"^epoch", printed, re.M)) == EPOCHS
    assert float(re.findall(r"accuracy ([\d.]+)%", printed)[-1]) > 80


@pytest.mark.slow
@pytest.mark.parametrize(
    "die",
    [
        (2, "step", 40),
        pytest.param((0, "step", 100), marks=SLOW),
        pytest.param((3, "save", 3), marks=SLOW),
        pytest.param((1, "save", 1), marks=SLOW),
    ],
    ids=str,
)
def test_killed_and_started_again_it_ends_the_same(
    die: tuple[int, str, int], undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    heard = group.run(jobs.stock, 4, words(tmp_path), die)
    assert heard[die[0]] is None
    for rank, sentence in enumerate(heard):
        assert rank == die[0] or "lost contact with the others" in sentence
    assert not (tmp_path / f"{EPOCHS:03d}").exists()
    group.run(jobs.stock, 4, words(tmp_path), None)
    same_end(undisturbed[0], tmp_path)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_worker(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """The same script under torchrun's elastic agent: nobody starts it again by hand."""
    torchrun = Path(sys.executable).with_name("torchrun")
    given = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]
    command = [torchrun, *given, jobs.EXAMPLE, *words(tmp_path)]
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    agent = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (tmp_path / "002").exists() and agent.poll() is None:
        time.sleep(0.01)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = agent.communicate(timeout=240)
    assert agent.returncode == 0, errors
    assert b"Signal 9 (SIGKILL)" in errors or b"exitcode: -9" in errors
    same_end(undisturbed[0], tmp_path)
