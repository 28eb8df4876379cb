"""No thread of gloo outlives its group: one that is there when Python ends may abort the process.

Every process writes down, as the last thing it does, which of gloo's threads are still there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import wait

from regimes.base.errors import TrainingError
from regimes.collectives.process_group import Group
from regimes.collectives.processes import ProcessWorld
from regimes.records import read_lines

SHARED = Path(__file__).parents[1] / "shared"
ENDING = SHARED / "ddp_scripts/ending.py"
SLOW = pytest.mark.slow
BUCKETS = "bucket_mb=0.02"  # several: they are reduced in a thread
ERRORS = {
    "before the first step": ("data.train_size=4", "training samples are too few"),
    "a loss that is not finite": ("optimizer.lr=1e30", "is not finite in epoch"),
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(words: list[str | Path], folder: Path, **settings: str) -> subprocess.Popen[str]:
    """A process whose end, and that of its children, is written down in the folder."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(SHARED / "at_exit"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *words],
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "AT_EXIT": str(folder), **settings},
    )


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


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [pytest.param("bucket_mb=25", marks=SLOW), BUCKETS])
def test_a_run_leaves_no_thread(buckets: str, tmp_path: Path) -> None:
    run = trainer(tmp_path / "end", "epochs=1", "data.train_size=600", buckets)
    _, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (0, "")
    assert left(tmp_path / "end") == {"launcher": [], "0": [], "1": []}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=SLOW) for x in ("before the first step", "a loss that is not finite")],
)
def test_a_run_that_fails_leaves_no_thread(name: str, tmp_path: Path) -> None:
    setting, message = ERRORS[name]
    run = trainer(tmp_path / "end", "epochs=9", setting, BUCKETS)
    _, errors = run.communicate(timeout=120)
    assert message in errors
    assert left(tmp_path / "end") == {"launcher": [], "0": [], "1": []}


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [pytest.param("bucket_mb=25", marks=SLOW), BUCKETS])
def test_a_run_that_loses_a_process_leaves_no_thread(buckets: str, tmp_path: Path) -> None:
    run = trainer(tmp_path / "end", "epochs=500", "data.train_size=600", buckets)
    wait(lambda: len(read_lines(tmp_path / "run/epochs.jsonl")) >= 2)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert "process 1 of 2 was killed by SIGKILL" in errors
    assert left(tmp_path / "end") == {"launcher": [], "0": []}


def test_an_error_of_a_lost_process_does_not_hold_the_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed work holds the group, and the error may live until Python ends."""

    class Work:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    made: list[weakref.ref[Work]] = []

    def all_reduce(**_: object) -> Work:
        work = Work()
        made.append(weakref.ref(work))
        return work

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    world = ProcessWorld(2, torch.device("cpu"), Group((0, 1)))
    with pytest.raises(TrainingError, match="lost contact") as held:
        world._wait_for(all_reduce)
    assert held.value.__traceback__ is not None
    assert made[0]() is None


# -- the hook --------------------------------------------------------------------------------


def script(how: str, folder: Path) -> list[tuple[int, str]]:
    """The exit code and the messages of a user's script with the hook on two processes."""
    meet = (folder.parent / "rendezvous").as_uri()
    group = [
        start([ENDING, how, meet], folder, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in group]
    return [(process.returncode, text) for process, text in zip(group, errors, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "groups"),
    [
        ("left in a function", 0),
        # In these the model or torch holds the user's group, with the hook or without it.
        pytest.param("kept to the end", 1, marks=SLOW),
        pytest.param("destroyed by nobody", 1, marks=SLOW),
        pytest.param("an error", 1, marks=SLOW),
        pytest.param("a lost process", 1, marks=SLOW),
    ],
)
def test_the_hook_leaves_no_thread(how: str, groups: int, tmp_path: Path) -> None:
    results = script(how, tmp_path / "end")
    for rank, threads in left(tmp_path / "end").items():
        assert threads.count("gloo_tcp_loop") == groups, (rank, results)
    ended = {"an error": "of the user's own", "a lost process": "lost contact"}.get(how, "")
    assert ended in results[0][1]
    assert results[0][0] == bool(ended)


@pytest.mark.slow
def test_a_hook_says_that_its_group_has_ended(tmp_path: Path) -> None:
    for code, text in script("used after its end", tmp_path / "end"):
        assert code == 1
        assert "train before dist.destroy_process_group()" in text
