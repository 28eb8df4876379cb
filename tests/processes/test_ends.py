"""How many runs in one go end: what counts as finished, and who may be killed at the end.

Oracles: the weights of a run that was not broken off; a process that is killed for real.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from configs import smoke_constant_rate as config
from runs import same_bits

import regimes
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.cli.machine import judge_record
from regimes.cli.monitor import describe_state as state_of
from regimes.records import load, read_lines
from regimes.search import cluster, sweep, tune
from regimes.training import checkpoint, loop

SHORT = [
    "epochs=2",
    "data.train_size=80",
    "data.test_size=20",
    "data.validation_size=20",
    "optimizer.warmup_from=0",
]


class Killed(BaseException):
    """Nothing is tidied up: as kill -9."""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was killed between its last row and its last checkpoint."""
    folder, last = tmp_path / "runs/low/seed-0", checkpoint.save_checkpoint

    def save(folder: Path, epochs: int, *rest: Any) -> None:
        if epochs == 2:
            shutil.copytree(folder, folder.with_name("as-killed"))
            raise Killed
        last(folder, epochs, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(loop.save_run.__globals__["checkpoint"], "save_checkpoint", save)
        with pytest.raises(Killed):
            regimes.run(config(*SHORT), folder)
    shutil.rmtree(folder)
    folder.with_name("as-killed").rename(folder)
    assert len(read_lines(folder / "epochs.jsonl")) == 2
    assert read_lines(folder / "events.jsonl")[-1]["event"] == "start"
    return folder


def test_without_its_last_checkpoint_a_run_is_not_finished(broken: Path, tmp_path: Path) -> None:
    record = load(broken)
    assert state_of(broken, record.header, record.rows)[0] == "broken off"
    assert judge_record(broken)[0] == "broken off"
    cell = (broken, config(*SHORT))
    assert not sweep.is_finished(*cell)
    assert sweep.run_cell(*cell) is None
    assert sweep.is_finished(*cell)
    assert judge_record(broken) == ("whole", "")
    regimes.run(config(*SHORT), tmp_path / "whole")
    same_bits(broken, tmp_path / "whole")


def test_tune_goes_on_with_it(broken: Path, tmp_path: Path) -> None:
    place = tmp_path / "tuned/low/as it is/seed-0"
    place.parent.mkdir(parents=True)
    broken.rename(place)
    tune.tune({"low": config(*SHORT)}, {}, [0], tmp_path / "tuned")
    found = checkpoint.load(place)
    assert found is not None
    assert found[0] == 2


def test_only_the_last_start_counts() -> None:
    from regimes.records import has_ended

    def events(*names: str) -> list[dict[str, Any]]:
        return [{"event": name} for name in names]

    assert has_ended(events("start", "end"))
    assert has_ended(events("start", "stopped", "resume", "end", "reporter failed"))
    assert not has_ended(events("start", "end", "resume"))
    assert not has_ended(events("start", "end", "resume", "stopped"))
    assert not has_ended(events("start"))
    assert not has_ended([])


# -- an idle process is killed ---------------------------------------------------------------


def short_or_long(folder: Path, config: RunConfig) -> str | None:
    """In place of a run: the long one goes on for as long as the short one's process lives."""
    folder.mkdir(parents=True)
    if folder.name == "short":
        (folder / "pid").write_text(str(os.getpid()))
        return None
    while not (folder.parent / "killed").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    return None


@pytest.mark.slow
def test_an_idle_process_that_is_killed_holds_up_no_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "run_cell", short_or_long)
    ended = []

    def progress(folder: Path, error: str | None) -> None:
        ended.append((folder.name, error))
        if folder.name == "short":
            time.sleep(0.5)  # until it waits for more
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
            (tmp_path / "killed").touch()

    todo = [(tmp_path / name, config()) for name in ("short", "long")]
    assert sweep.ablate(todo, 2, progress) == []
    assert ended == [("short", None), ("long", None)]


# -- Ctrl-C ----------------------------------------------------------------------------------


def test_ctrl_c_ends_no_child_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(folder: Path, error: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_outcomes", lambda *_: [(tmp_path, None)])
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as other, ProcessPoolExecutor(1, context) as pool:
        for each in (other, pool):
            each.submit(int).result()
        child, own = (next(iter(each._processes.values())) for each in (other, pool))
        with pytest.raises(KeyboardInterrupt):
            sweep._train_in_parallel([pool], None, [(tmp_path, config())], progress)
        own.join(60)
        assert (own.exitcode, child.exitcode) == (-signal.SIGTERM, None)


class Job:
    """A job of this machine whose process has ended, as submitit learns a little later."""

    def __init__(self, pid: int) -> None:
        self.job_id, self.asked = str(pid), 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1


def test_a_job_that_has_just_ended_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    ended = multiprocessing.get_context("spawn").Process(target=int)
    ended.start()
    ended.join()
    with subprocess.Popen(["sleep", "60"]) as other:
        jobs = {Job(ended.pid): tmp_path, Job(other.pid): tmp_path}  # type: ignore[arg-type]
        cluster._end_local(jobs, 60.0)
        assert other.wait() == -signal.SIGTERM


def test_no_number_of_jobs_below_one() -> None:
    for jobs in (0, -1):
        with pytest.raises(ConfigError, match=f"jobs = {jobs}: expected at least 1"):
            sweep.ablate([], jobs, lambda *_: None)


# -- the end of a parent ---------------------------------------------------------------------

WORKER = """
import ctypes, sys
from regimes.search import sweep

class Watch:  # what the kernel sends when the parent ends, before torch is imported
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            number = ctypes.c_int()
            ctypes.CDLL(None).prctl(2, ctypes.byref(number))
            print(f"signal {number.value}", flush=True)
            raise SystemExit

sys.meta_path.insert(0, Watch())
sys.stdin.readline()
sweep._start_worker(1, None, int(sys.argv[1]))
"""
SHELL = '"$0" -c "$1" $$ <&0 & echo started; wait'


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_ends_with_a_parent_that_was_killed_before_it_could_ask(killed: bool) -> None:
    """The worker waits for a line, in place of a slow start; then its parent is there, or gone."""
    words = ["bash", "-c", SHELL, sys.executable, WORKER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as parent:  # type: ignore[call-overload]
        assert parent.stdout.readline() == "started\n"
        if killed:
            parent.kill()
            parent.wait()
        parent.stdin.write("\n")
        parent.stdin.close()
        assert parent.stdout.read() == ("" if killed else "signal 9\n")
