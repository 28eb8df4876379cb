"""No thread of gloo outlives its group: one that is there when Python ends may abort the process.

Every process writes down, as the last thing it does, which of gloo's threads are still there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regimes.records import read_lines

TESTS = Path(__file__).parent
PARCELS = "parcel_mb=0.02"  # several: they are reduced in a thread
ERRORS = {
    "before the first step": ("data.train_size=4", "training samples are too few"),
    "a loss that is not finite": ("optimizer.lr=1e30", "is not finite in epoch"),
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(words: list[str | Path], folder: Path, **settings: str) -> subprocess.Popen[str]:
    """A process whose end, and that of its children, is written down in the folder."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(TESTS / "at_exit"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *words], text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "AT_EXIT": str(folder), **settings},
    )  # fmt: skip


def left(folder: Path) -> dict[str, list[str]]:
    """Gloo's threads at the end of each process that came to its end."""
    return {file.name: file.read_text().split() for file in folder.iterdir()}


# -- the trainer -----------------------------------------------------------------------------


def trainer(folder: Path, *settings: str) -> subprocess.Popen[str]:
    """The smoke preset on two processes."""
    words: list[str | Path] = ["-m", "regimes", "run", "smoke", "--processes", "2", "--quiet"]
    words += ["--out", folder.parent / "run"]
    for setting in ("device=cpu", *settings):
        words += ["--set", setting]
    return start(words, folder)


@pytest.mark.parametrize("parcels", ["parcel_mb=25", PARCELS])
def test_a_run_leaves_no_thread(parcels: str, tmp_path: Path) -> None:
    run = trainer(tmp_path / "end", "epochs=1", "data.train_size=600", parcels)
    _, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (0, "")
    assert left(tmp_path / "end") == {"launcher": [], "0": [], "1": []}


@pytest.mark.parametrize("name", ERRORS)
def test_a_run_that_fails_leaves_no_thread(name: str, tmp_path: Path) -> None:
    setting, message = ERRORS[name]
    run = trainer(tmp_path / "end", "epochs=9", setting, PARCELS)
    _, errors = run.communicate(timeout=120)
    assert message in errors
    assert left(tmp_path / "end") == {"launcher": [], "0": [], "1": []}


@pytest.mark.parametrize("parcels", ["parcel_mb=25", PARCELS])
def test_a_run_that_loses_a_process_leaves_no_thread(parcels: str, tmp_path: Path) -> None:
    run = trainer(tmp_path / "end", "epochs=500", "data.train_size=600", parcels)
    deadline = time.monotonic() + 90
    while len(read_lines(tmp_path / "run/epochs.jsonl")) < 2:
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert "process 1 of 2 was killed by SIGKILL" in errors
    assert left(tmp_path / "end") == {"launcher": [], "0": []}
