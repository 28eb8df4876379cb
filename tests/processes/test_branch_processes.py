"""Branches on several processes, and branches that are killed (oracle: the run that was not)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from configs import smoke
from runs import same_bits, same_run, wait

import regimes
from regimes.base.config import BranchConfig, override, to_toml
from regimes.search.processes import spawn_processes
from regimes.training.phases import branch_config


@pytest.mark.slow
def test_two_processes_end_in_their_trunks_bits(tmp_path: Path) -> None:
    trunk, out = tmp_path / "trunk", tmp_path / "branch"
    config = smoke("compressor=topk", "levels={low=20, high=5}", "checkpoint_keep=[1]", epochs=3)
    spawn_processes(config, trunk, 2)
    for at, length in ((1, None), (1, 1)):
        folder = out.with_name(f"{at}-{length}")
        spawn_processes(
            branch_config(trunk, BranchConfig(at=at, length=length), [], folder), folder, 2
        )
        own = (folder / "epochs.jsonl").read_bytes().splitlines()
        assert own == (trunk / "epochs.jsonl").read_bytes().splitlines()[at:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        ["compressor=topk", "levels.low=20", "levels.high=5"],
        pytest.param(
            ["optimizer.weight_decay=0.01", "policy={name='static', level='high'}"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["sync_policy={name='static', level='5'}"], marks=pytest.mark.slow),
    ],
)
def test_processes_only_divide_the_work_of_a_pulse(changed: list[str], tmp_path: Path) -> None:
    """The trunk's residuals are one mean on one process, and one of each process on two."""
    trunk = tmp_path / "trunk"
    regimes.run(smoke("policy=static", "checkpoint_keep=[1]", epochs=3), trunk)
    alone, two = tmp_path / "alone", tmp_path / "two"
    regimes.branch(trunk, at=1, length=1, set=changed, out=alone)
    spawn_processes(branch_config(trunk, BranchConfig(at=1, length=1), changed, two), two, 2)
    same_run(alone, two, tolerance=1e-9)
    spawn_processes(
        smoke("policy=static", "checkpoint_keep=[1]", epochs=3), tmp_path / "trunk of two", 2
    )
    other = tmp_path / "other"
    regimes.branch(tmp_path / "trunk of two", at=1, length=1, set=changed, out=other)
    same_run(alone, other, tolerance=1e-9)


SCRIPT = """
import os, signal, sys
import regimes
from regimes.records import writer
from regimes.training import checkpoint, loop, state

trunk, out, moment = sys.argv[1:]
where, _, count = moment.partition(" ")
calls = 0

def killed_at(function):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped

if where == "line":
    writer.append = killed_at(writer.append)
elif where == "file":
    checkpoint.write_atomically = killed_at(checkpoint.write_atomically)
elif where == "rename":
    checkpoint.os.replace = killed_at(checkpoint.os.replace)
elif where == "state":
    state._restore = killed_at(state._restore)
change = {"compressor": "topk", "levels.low": 20, "levels.high": 5}
regimes.branch(trunk, at=1, length=1, set=change, out=out)
"""
QUICK = ["never", "line 6", "rename 3"]
MOMENTS = ["never", "state 1", "line 1", "line 2", "line 3", "line 9", "file 1", "file 2"]
MOMENTS += ["rename 5", "state 2", "line 12", "line 14", "file 4"]


@pytest.mark.slow
@pytest.mark.parametrize("moments", [QUICK, pytest.param(MOMENTS, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_started_again_it_ends_the_same(
    tmp_path: Path, moments: list[str]
) -> None:
    trunk, whole = tmp_path / "trunk", tmp_path / "never"
    regimes.run(smoke("policy=static", "checkpoint_keep=[1]"), trunk)
    ended = []
    for moment in moments:
        out = tmp_path / moment
        words = [sys.executable, "-c", SCRIPT, str(trunk), str(out)]
        first = subprocess.run([*words, moment], check=False, capture_output=True, text=True)
        ended.append(first.returncode)
        again = subprocess.run([*words, "never"], check=False, capture_output=True, text=True)
        assert again.returncode == 0, (moment, again.stderr[-800:])
        same_bits(out, whole)
        assert regimes.load(out).finished
    assert ended[0] == 0
    missing = 1 if moments is QUICK else 2  # "never", and a moment that may not come
    assert ended.count(-signal.SIGKILL) >= len(moments) - missing


@pytest.mark.slow
def test_sigterm_ends_a_pulse_with_its_unit(tmp_path: Path) -> None:
    trunk, out = tmp_path / "trunk", tmp_path / "branch"
    regimes.run(smoke("policy=static", "checkpoint_keep=[1]"), trunk)
    config = branch_config(trunk, BranchConfig(at=1, length=2), ["policy.level=high"], out)
    (tmp_path / "branch.toml").write_text(to_toml(override(config, [])))
    words = ["run", str(tmp_path / "branch.toml"), "--out", str(out), "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "regimes", *words])
    wait(lambda: (out / "epochs.jsonl").exists() and (out / "epochs.jsonl").stat().st_size > 0)
    os.kill(process.pid, signal.SIGTERM)
    process.wait()
    assert len(regimes.load(out).rows) in (2, 3, 4)
    record = regimes.branch(trunk, at=1, length=2, set={"policy.level": "high"}, out=out)
    assert record.finished
    whole = regimes.branch(
        trunk, at=1, length=2, set={"policy.level": "high"}, out=tmp_path / "whole"
    )
    assert record.rows == whole.rows
