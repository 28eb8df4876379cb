"""`examples/gpt_hsdp.py` under torchrun on two replicas of two: a process is killed, torchrun
starts the job again from its last checkpoint, and the record is that of a job left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import read

import regimes

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_hsdp.py"
STEPS = ("--islands", "2", "--steps", "30", "--every", "5", "--save", "8")
PATIENCE = 300  # seconds


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", *options, str(EXAMPLE), *STEPS, "--out", "run"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        # else torch's store has the addresses of the dead when the job starts again
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / "said").open("w") as said:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)


def workers(torchrun: int) -> list[int]:
    """The processes that torchrun has started, by rank."""
    found = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    scripts = {int(p): Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in found}
    return sorted(pid for pid, words in scripts.items() if str(EXAMPLE).encode() in words)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; runs on Linux")
def test_a_killed_job_restarts_and_its_record_is_whole(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    alone = start(whole)
    with alone:
        assert alone.wait(PATIENCE) == 0, (whole / "said").read_text()
    killed = start(cut, "--max-restarts", "1")
    until = time.monotonic() + PATIENCE
    while not (cut / "run/checkpoints/8/.metadata").exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(workers(killed.pid)[3], signal.SIGKILL)
    with killed:
        assert killed.wait(PATIENCE) == 0, (cut / "said").read_text()
    assert "exitcode: -9" in (cut / "said").read_text()
    ours, theirs = ((folder / "run" / "epochs.jsonl").read_bytes() for folder in (cut, whole))
    assert ours == theirs
    record = regimes.load(cut / "run")
    assert record.finished
    assert [row["steps"] for row in record.rows] == [5] * 6
    world = {"workers": 2, "processes": 4, "shards": 2}
    assert record.header["world"].items() >= world.items()
    assert "accordion" in read(cut, "watch", "run", "--once")
    assert read(cut, "report", "run")
    assert "accordion" in read(cut, "detect", "run")
    assert "dense" in read(cut, "cost", "run", "--network", "1Gbit/s,50us")
