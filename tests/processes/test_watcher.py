"""Collectives for which the host does not wait: what is noticed, and what is said."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import wait

from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives import nccl_watcher as module
from regimes.collectives.nccl_watcher import Presence, Watcher

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Work:
    """A collective, and the event after it, which are ``done`` when a test says so, with an
    ``error`` or without."""

    def __init__(self) -> None:
        self.done, self.error = False, ""

    def is_completed(self) -> bool:
        return self.done

    query = is_completed

    def wait(self, patience: timedelta | None = None) -> None:
        if self.error and patience is not None:
            raise dist.DistBackendError(self.error)


class Owner:
    """What has communicators."""

    aborted: RuntimeError | str | None = None
    watcher: Watcher

    def abort(self) -> None:
        self.aborted = str(self.watcher.error)


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), 2)


@pytest.fixture
def watched(store: dist.Store) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def make(limit: float = 60.0, **options: Any) -> Owner:
        owner = Owner()
        presence = Presence(store, 0, 2)
        owner.watcher = Watcher(
            presence, "process 0 of 2", owner.abort, limit, device=CPU, **options
        )
        owners.append(owner)
        return owner

    yield make
    for owner in owners:
        owner.watcher.close()


def follow(owner: Owner, work: Work, name: str) -> None:
    owner.watcher.follow_collective(work, work, name)


def heard(owner: Owner, kind: type[Exception] = TrainingError) -> str:
    wait(lambda: owner.aborted is not None, 10)
    with pytest.raises(kind) as error:
        owner.watcher.raise_failure()
    assert owner.aborted == str(error.value)  # known before the streams go on
    return str(error.value)


def test_collectives_that_end_leave_nothing_behind(watched: Callable[..., Owner]) -> None:
    owner, works = watched(), [Work() for _ in range(3)]
    gone = [weakref.ref(work) for work in works]
    for work in works:
        follow(owner, work, "all_reduce")
        work.done = True
    del work, works
    wait(lambda: not owner.watcher.pending, 10)
    wait(lambda: not any(reference() for reference in gone), 10)
    owner.watcher.raise_failure()
    assert owner.aborted is None


def test_a_failed_collective_is_named_with_its_reason(watched: Callable[..., Owner]) -> None:
    owner, work = watched(), Work()
    follow(owner, work, "all_reduce")
    work.error, work.done = "remote process exited\nand more", True
    assert heard(owner) == (
        "process 0 of 2 lost contact with the others in all_reduce (remote process exited)"
    )


def test_a_collective_that_does_not_end_is_ended(watched: Callable[..., Owner]) -> None:
    owner = watched(limit=0.3)
    follow(owner, Work(), "broadcast")
    assert "in broadcast (it has taken longer than 0.3 s)" in heard(owner)


def test_a_killed_process_is_named_within_seconds(
    watched: Callable[..., Owner], store: dist.Store, tmp_path: Path
) -> None:
    script = (
        "import sys, time, torch.distributed as dist\n"
        "from regimes.collectives.nccl_watcher import Presence\n"
        "Presence(dist.FileStore(sys.argv[1], 2), 1, 2)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "store")]) as peer:
        wait(lambda: bool(store.check(["beat/1"])))
        owner = watched()
        follow(owner, Work(), "all_reduce")
        time.sleep(1.5 * module.DOUBT)
        owner.watcher.raise_failure()  # it lives
        peer.kill()  # and is a zombie until its end is read
        killed = time.monotonic()
        assert "no sign of process 1, which has died" in heard(owner)
        assert time.monotonic() - killed < 5


@pytest.mark.parametrize("beating", [True, False])
def test_a_process_on_another_machine_is_missing_when_it_gives_no_sign(
    beating: bool, watched: Callable[..., Owner], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", 1.0)
    monkeypatch.setattr(module, "BEAT", 0.1)
    monkeypatch.setattr(module, "_machine_identity", lambda: "elsewhere")
    peer = Presence(store, 1, 2)
    monkeypatch.setattr(module, "_machine_identity", lambda: "here")
    owner = watched()
    follow(owner, Work(), "all_reduce")
    for _ in range(35):
        if beating:
            peer.post_beat()
        time.sleep(0.1)
    assert (owner.aborted is None) == beating
    if not beating:
        assert "no sign of process 1" in heard(owner)


def test_of_works_the_last_alone_is_held(watched: Callable[..., Owner]) -> None:
    """A work holds its tensors, which the allocator would give to later steps."""
    owner, first, second, other = watched(), Work(), Work(), Work()
    gone = weakref.ref(first)
    owner.watcher.follow_collective(first, Work(), "all_reduce", 1)
    owner.watcher.follow_collective(second, Work(), "all_reduce", 1)
    owner.watcher.follow_collective(other, Work(), "all_reduce", 2)
    del first
    assert gone() is None
    assert len(owner.watcher.pending) == 3


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)

    def clone(self) -> Counted:
        return self


@pytest.mark.parametrize("machine", ["here", "elsewhere"])
def test_looks_do_not_load_the_store(
    machine: str, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many processes look ten times a second; a job has one store."""
    monkeypatch.setattr(module, "_machine_identity", lambda: machine)
    Presence(store, 1, 2)
    monkeypatch.setattr(module, "_machine_identity", lambda: "here")
    counted = Counted(store)
    presence = Presence(counted, 0, 2)
    counted.asked = 0
    for _ in range(100):
        assert presence.find_missing() == []
    assert counted.asked <= 3  # where it is, and once its count


def test_another_call_of_a_process_is_its_own_error(watched: Callable[..., Owner]) -> None:
    def suspect() -> None:
        raise ConfigError("process 1 is in measure()")

    owner = watched(patience=0.2, suspect=suspect)
    follow(owner, Work(), "all_reduce")
    assert heard(owner, ConfigError) == "process 1 is in measure()"


def test_the_end_of_a_long_wait_is_reported(watched: Callable[..., Owner]) -> None:
    asked: list[str] = []
    owner, work = (
        watched(
            patience=0.2,
            suspect=lambda: asked.append("suspect"),
            settled=lambda: asked.append("settled"),
        ),
        Work(),
    )
    follow(owner, work, "all_reduce")
    wait(lambda: "suspect" in asked, 10)
    work.done = True
    wait(lambda: asked[-1] == "settled", 10)


def test_the_thread_ends_with_its_owner(watched: Callable[..., Owner]) -> None:
    owner = watched()
    thread: threading.Thread = owner.watcher.thread
    owner.watcher.close()
    assert not thread.is_alive()
    other = Owner()
    presence = owner.watcher.presence
    other.watcher = Watcher(presence, "", lambda: None, 1.0, device=CPU)
    thread = other.watcher.thread
    del other
    wait(lambda: not thread.is_alive(), 10)
