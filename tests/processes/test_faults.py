"""Hard conditions: what is killed, hangs, is full, torn or poisoned. Nothing recorded is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from configs import smoke_constant_rate as config
from runs import break_off, rows, same_bits, wait

import regimes
from regimes.base.config import RunConfig, override, to_toml
from regimes.base.errors import ConfigError, RecordError
from regimes.job import termination
from regimes.records import read_lines
from regimes.search import sweep
from regimes.search.processes import spawn_processes
from regimes.training import checkpoint, loop, state

ONE = {**os.environ, "OMP_NUM_THREADS": "1"}
BUCKETS = "bucket_mb=0.02"  # several: gradients leave during backward
BATCHES = (
    "batch_levels={low=8, high=24}",
    "batch_policy={name='windows', windows=[[0, 3]], inside='low', outside='high'}",
)


def start(c: RunConfig, out: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    toml = out.with_suffix(".toml")
    toml.write_text(to_toml(c))
    return python(f"-m regimes run {toml} --out {out} --quiet {' '.join(words)}", **env)


def python(words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ONE, **env},
    )


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- killed ----------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="one batch size"),
        pytest.param(BATCHES, id="two batch sizes", marks=SLOW),
    ],
)
def test_kill_9_again_and_again(settings: tuple[str, ...], tmp_path: Path) -> None:
    """Killed at random moments until it gets through; the same run as one left alone."""
    c, out, draw, kills = config("epochs=8", *settings), tmp_path / "run", random.Random(0), 0
    regimes.run(c, tmp_path / "whole")
    for _ in range(30):
        before = len(rows(out))
        process = start(c, out, *(["--resume"] if (out / "run.json").exists() else []))
        moment = draw.randrange(1, 4)
        wait(lambda: process.poll() is not None or len(rows(out)) >= before + moment)  # noqa: B023
        time.sleep(draw.uniform(0, 0.05))
        if process.poll() is not None:
            _, stderr = process.communicate()
            assert process.returncode == 0, stderr
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
    assert kills >= 2
    same_bits(out, tmp_path / "whole")
    assert len({row["batch_size"] for row in rows(out)}) == (2 if settings else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "buckets"), [pytest.param(0, "bucket_mb=25", marks=SLOW), (3, BUCKETS)]
)
def test_one_of_four_processes_killed_and_the_run_resumed(
    victim: int, buckets: str, tmp_path: Path
) -> None:
    c, out = config("epochs=30", buckets), tmp_path / "run"
    process = start(c, out, "--processes", "4")
    wait(lambda: len(rows(out)) >= 2)
    os.kill(children(process.pid)[victim], signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 3
    assert f"process {victim} of 4 was killed by SIGKILL" in stderr
    done = len(rows(out))
    resumed = start(c, out, "--processes", "4", "--resume")
    wait(lambda: len(rows(out)) >= done + 2)
    resumed.terminate()
    resumed.communicate(timeout=60)
    seen = rows(out)
    assert [row["epoch"] for row in seen] == list(range(len(seen)))


@pytest.mark.slow
def test_the_launcher_killed_leaves_no_orphans(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(config("epochs=500"), out, "--processes", "2")
    wait(lambda: len(rows(out)) >= 1)
    orphans = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait(lambda: not any(_alive(pid) for pid in orphans), 10)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_torchrun_restarts_a_killed_worker(tmp_path: Path) -> None:
    """torchrun's elastic restart goes on from the last checkpoint, and ends in the same bits."""
    c, out = config("epochs=12"), tmp_path / "run"
    whole = start(c, tmp_path / "whole", "--processes", "2")
    _, stderr = whole.communicate(timeout=120)
    assert whole.returncode == 0, stderr
    (tmp_path / "c.toml").write_text(to_toml(c))
    process = python(
        "-m torch.distributed.run --nproc-per-node 2 --max-restarts 2 --rdzv-backend c10d"
        " --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
        f" -m regimes run {tmp_path}/c.toml --out {out} --quiet",
        GLOO_SOCKET_IFNAME="lo",
    )
    wait(lambda: len(rows(out)) >= 3, 90)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr[-3000:]
    events = [line["event"] for line in read_lines(out / "events.jsonl")]
    assert events[-1] == "end"
    assert "resume" in events
    same_bits(out, tmp_path / "whole")


# -- asked to end ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=SLOW)])
def test_sigterm_ends_with_the_epoch_and_resumes_exactly(processes: str, tmp_path: Path) -> None:
    c, out = config("epochs=40", "checkpoint_every=50"), tmp_path / "run"
    process = start(c, out, "--processes", processes)
    wait(lambda: len(rows(out)) >= 2)
    process.terminate()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    done = len(rows(out))
    found = checkpoint.load(out)
    assert found is not None
    assert found[0] == done  # saved though checkpoint_every is far away
    if processes == "1":
        assert "ended by SIGTERM after epoch" in stderr
        short = override(c, [f"epochs={done + 2}"])
        header = (out / "run.json").read_text().replace('"epochs": 40', f'"epochs": {done + 2}')
        (out / "run.json").write_text(header)
        regimes.run(short, out, resume=True)
        regimes.run(short, tmp_path / "whole")
        same_bits(out, tmp_path / "whole")


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(config("epochs=9", "batch_size=1"), out, REGIMES_GRACE="0.01")
    wait(lambda: len(rows(out)) >= 1)
    process.terminate()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in stderr


@pytest.mark.parametrize("text", ["abc", "nan", "inf", "-1", "", "1e9"])
def test_a_grace_that_is_no_time_is_refused_before_the_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGIMES_GRACE", text)
    expected = f"REGIMES_GRACE = '{text}': expected a number of seconds"
    for begin in (
        lambda: regimes.run(config(), tmp_path / "run"),
        lambda: spawn_processes(config(), tmp_path / "run", 2),
        lambda: sweep.ablate([(tmp_path / "run", config())], 2, lambda folder, error: None),
    ):
        with pytest.raises(ConfigError, match=expected):
            begin()
    assert not (tmp_path / "run").exists()


def test_signals_within_a_second_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(termination.time, "monotonic", lambda: now[0])
    with termination.GracefulShutdown() as grace:
        for later in (0.0, 0.5, 0.4):
            now[0] += later
            signal.raise_signal(signal.SIGTERM)
        assert grace.asked
        now[0] += 0.2
        with pytest.raises(termination.Terminated, match="within an epoch"):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # or it would end what comes next


def test_a_grace_of_nothing_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGIMES_GRACE", "0")

    def ended() -> None:
        with termination.GracefulShutdown():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(termination.Terminated, match="within an epoch"):
        ended()


def test_an_ablation_that_is_asked_to_end_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two runs, or before the first one."""
    monkeypatch.setattr(sweep, "run_cell", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(termination.Terminated, match="start the same command again to go on"):
        sweep.ablate([(tmp_path / "run", config())], 1, lambda folder, error: None)
    assert signal.getsignal(signal.SIGTERM) is before
    assert termination.Terminated.exit_code == 143


def test_a_signal_in_the_last_epoch_of_a_run_ends_the_ablation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(run: Any, out: Path) -> None:
        state.save_run(run, out)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "save_run", save)
    todo = [(tmp_path / name, config("epochs=1")) for name in ("first", "second")]
    with pytest.raises(termination.Terminated, match="start the same command again to go on"):
        sweep.ablate(todo, 1, lambda folder, error: None)
    assert read_lines(tmp_path / "first/events.jsonl")[-1]["event"] == "end"
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("within", [True, False])
def test_a_process_of_many_runs_ends_all_of_them(
    within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination, "_remembered", [])
    before = signal.getsignal(signal.SIGTERM)
    try:
        termination.remember_sigterm()
        if within:
            with termination.GracefulShutdown() as grace:
                signal.raise_signal(signal.SIGTERM)
            assert grace.asked
        else:
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(termination.Terminated, match="before its next epoch"):
            regimes.run(config(), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    finally:
        signal.signal(signal.SIGTERM, before)


# -- hangs -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("buckets", ["bucket_mb=25", pytest.param(BUCKETS, marks=SLOW)])
def test_a_process_that_hangs_is_named(buckets: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    c = config("epochs=500", "timeout=5", "workers=3", buckets)
    process = start(c, out, "--processes", "3")
    wait(lambda: len(rows(out)) >= 1)
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGSTOP)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "no sign of process 1, which has died or hangs" in stderr
    assert len(rows(out)) >= 1
    assert not _alive(victim)


# -- disks -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skipped where it cannot be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "regimes-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_the_run_and_loses_nothing(small_disk: Path, tmp_path: Path) -> None:
    c, out = config(), small_disk / "run"
    with pytest.raises(RecordError, match="No space left on device"):
        regimes.run(c, out)
    done = len(rows(out))
    assert [row["epoch"] for row in rows(out)] == list(range(done))
    (tmp_path / "room").mkdir()
    shutil.copytree(out, tmp_path / "room" / "run")
    regimes.run(c, tmp_path / "room" / "run", resume=True)
    regimes.run(c, tmp_path / "whole")
    same_bits(tmp_path / "room" / "run", tmp_path / "whole")


@pytest.mark.parametrize("left", [0, 2000])
def test_a_disk_that_fills_up_within_a_line(left: int, small_disk: Path) -> None:
    """However few bytes are left, the record reads to its last whole line."""
    out = small_disk / "run"
    regimes.run(config("epochs=1", "model.width=2"), out)
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(b"x" * max(0, free - left))
    header = (out / "run.json").read_text()
    with pytest.raises(RecordError, match="cannot write"):
        regimes.run(config("epochs=1", "model.width=2"), small_disk / "other")
    assert (out / "run.json").read_text() == header
    assert len(rows(out)) == 1


# -- poisoned --------------------------------------------------------------------------------


def test_no_pickle_of_a_users_folder_is_run(tmp_path: Path) -> None:
    """A checkpoint with code in it, its checksum in order, is refused."""
    import hashlib
    import json
    import pickle

    c, out = config("epochs=3"), tmp_path / "run"
    break_off(c, out, 2)

    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {tmp_path}/owned",)

    for folder in (out / "checkpoints").glob("epoch-*"):
        (folder / "process-0.pt").write_bytes(pickle.dumps(Evil(), protocol=2))
        manifest = json.loads((folder / "manifest.json").read_text())
        content = (folder / "process-0.pt").read_bytes()
        manifest["files"]["process-0.pt"] = hashlib.sha256(content).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordError, match="no checkpoint of"):
        regimes.run(c, out, resume=True)
    assert not (tmp_path / "owned").exists()


# -- a cluster -------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_ablation_through_submitit(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs the extra cluster")
    words = "-m regimes ablate smoke --seeds 1 --schedules low --schedules high --executor local"
    words += " --option timeout_min=5 --set epochs=2 --set data.train_size=100 --out "
    done = python(f"{words}{tmp_path}/runs")
    said, errors = done.communicate()
    assert done.returncode == 0, errors
    assert "[2/2]" in said
    assert {r.name for r in regimes.load_all(tmp_path / "runs")} == {"low", "high"}
    again, _ = python(f"{words}{tmp_path}/runs").communicate()
    assert "2 already finished" in " ".join(again.split())
    refused = python(f"{words}{tmp_path}/other --option nonsense_min=5")
    _, errors = refused.communicate()
    assert refused.returncode == 2
    assert "--executor local cannot be used" in errors


@pytest.mark.slow
def test_sigterm_ends_a_whole_ablation(tmp_path: Path) -> None:
    """Not only the cell that is being trained."""
    process = python(f"-m regimes ablate smoke --seeds 2 --schedules low --out {tmp_path}/runs")
    wait(lambda: rows(tmp_path / "runs/low/seed-0"))
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert not (tmp_path / "runs/low/seed-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "ablate smoke --seeds 3 --schedules low --schedules high --jobs 2",
        "tune smoke --seeds 2 --schedules low --values optimizer.lr=0.1,0.2 --jobs 2"
        " --set data.validation_size=50",
        "ablate smoke --seeds 2 --schedules low --executor local --option timeout_min=5",
    ],
    ids=["ablate", "tune", "executor"],
)
def test_sigterm_lets_runs_under_way_finish_their_epochs(words: str, tmp_path: Path) -> None:
    """No other run begins, no process is left, and the same command goes on."""
    if "--executor" in words:
        pytest.importorskip("submitit", reason="needs the extra cluster")
    sizes = "--set data.train_size=100 --set data.test_size=50 --set epochs=2000"
    command = f"-m regimes {words} {sizes} --out {tmp_path}"
    process = python(command)
    wait(lambda: len([f for f in tmp_path.rglob("epochs.jsonl") if rows(f.parent)]) == 2)
    ours = _family(process.pid)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    begun = [file.parent for file in tmp_path.rglob("run.json")]
    assert len(begun) == 2
    for folder in begun:
        last = read_lines(folder / "events.jsonl")[-1]
        assert last["why"].startswith("ended by SIGTERM after epoch")
        found = checkpoint.load(folder)
        assert found is not None
        assert found[0] == len(rows(folder))
    wait(lambda: not any(map(_alive, ours)), 20)
    again = python(command)
    done = {folder: len(rows(folder)) for folder in begun}
    wait(lambda: all(len(rows(folder)) > done[folder] for folder in begun))
    again.terminate()
    again.communicate(timeout=60)
    assert again.returncode == 128 + signal.SIGTERM


def _family(pid: int) -> set[int]:
    """A process and all that it has started."""
    return {pid}.union(*map(_family, children(pid)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes outlive their parent elsewhere")
def test_the_runs_of_a_killed_ablation_end_with_it(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    parent = python(f"-m regimes ablate smoke --jobs 2 --out {out}")
    wait(lambda: bool(list(out.rglob("epochs.jsonl"))), 120)
    below = [Path(f"/proc/{pid}/cmdline") for pid in children(parent.pid)]
    trained = [place for place in below if b"spawn_main" in place.read_bytes()]
    parent.kill()
    parent.communicate()
    wait(lambda: not any(place.exists() for place in trained), 10)
    assert trained
