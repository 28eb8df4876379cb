"""Which process is missing in a call that all must make. Oracle: three processes in one store,
whose clock moves only while one of them waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from regimes.base.errors import TrainingError
from regimes.collectives import call_guard, lost_processes
from regimes.collectives.call_guard import CallGuard


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both modules: nothing waits, and a busy machine changes nothing."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(call_guard, "time", fake)
    monkeypatch.setattr(lost_processes, "time", fake)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_who_has_come_is_not_missing(absent: int) -> None:
    """Two wait for the third until their time is over; each names that one, and no other."""
    store = HashStore()
    guards = {rank: CallGuard(store, rank, 3, timeout=1.0) for rank in range(3) if rank != absent}
    for guard in guards.values():  # as each does when it comes
        guard.count = 1
        guard._post_position("attach()")
        guard.count = 0
    for rank, guard in guards.items():
        with pytest.raises(TrainingError) as ended:
            guard.enter_call("attach()", patience=60.0)
        said = str(ended.value)
        assert said.startswith(f"process {rank} has waited 1 s in attach() for process")
        assert f"for process {absent}: all processes must call it" in said


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        (2, "no sign of process 2, which has died or hangs"),
        (None, "all of them still answer: the network, or another collective"),
    ],
)
def test_a_roll_call_names_who_does_not_answer(absent: int | None, said: str) -> None:
    store = HashStore()
    there = [rank for rank in range(3) if rank != absent]
    for rank in there:
        lost_processes.name_silent(store, rank, 3)  # each answers for itself, whoever is missing
    for rank in there:
        assert lost_processes.name_silent(store, rank, 3) == said
