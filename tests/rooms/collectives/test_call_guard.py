"""Which process is missing in a call that all must make. Oracle: three processes in one store."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from regimes.collectives import call_guard, processes
from regimes.collectives.call_guard import CallGuard
from regimes.errors import TrainingError


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_who_has_come_is_not_missing(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wait for the third until their time is over; each names that one, and no other."""
    monkeypatch.setattr(call_guard, "SOON", 0.05)
    store, said = HashStore(), dict[int, str]()

    def come(rank: int) -> None:
        with pytest.raises(TrainingError) as ended:
            CallGuard(store, rank, 3, timeout=1.0).enter("attach()", patience=60.0)
        said[rank] = str(ended.value)

    there = [rank for rank in range(3) if rank != absent]
    threads = [threading.Thread(target=come, args=(rank,)) for rank in there]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in there:
        assert said[rank].startswith(f"process {rank} has waited 1 s in attach() for process")
        assert f"for process {absent}: all processes must call it" in said[rank]


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        (2, "no sign of process 2, which has died or hangs"),
        (None, "all of them still answer: the network, or another collective"),
    ],
)
def test_a_roll_call_names_who_does_not_answer(
    absent: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ROLL_CALL", 0.5)
    store, heard = HashStore(), dict[int, str]()

    def ask(rank: int) -> None:
        heard[rank] = processes._name_silent(store, rank, 3)

    there = [rank for rank in range(3) if rank != absent]
    threads = [threading.Thread(target=ask, args=(rank,)) for rank in there]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == dict.fromkeys(there, said)
