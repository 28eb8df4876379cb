"""Notices failed collectives of NCCL, for which the host does not wait.

NCCL runs a collective in the order of a stream: the call returns at once, and so does its ``wait``.
If a process dies, the others' streams stand still without an error, and any later wait of a host
does not end. A thread therefore asks in the background: is the oldest collective done, has it
failed, is its time over, and does every process still live? What it finds is kept for the next
``raise_failure``; then it aborts the communicator, so that the streams, and a host that waits for
one, go on with results that ``raise_failure`` keeps from being used.

That a process lives is posted in the group's store: on one machine its number and start, which
``/proc`` confirms or refutes at once; from other machines a count that grows each ``BEAT`` seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import torch

from regimes.base.errors import RegimesError, TrainingError

_POLL = 0.1  # seconds between two looks at the oldest collective
DOUBT = 1.0  # seconds that it may take before the processes are looked at
BEAT = 2.0  # seconds between two signs of life in the store
SILENCE = 30.0  # seconds without a sign after which a process on another machine is missing
_AT_ONCE = timedelta(milliseconds=1)  # to wait for a finished collective, which raises its error


class Place(TypedDict):
    """Says where a process runs: ``machine`` is from ``_machine_identity``, ``started`` from
    ``_process_start``."""

    machine: str | None
    pid: int
    started: str | None


class Presence:
    """Tells which processes of a group are still alive.

    Args:
        store: the group's; an own connection to it is made, because a call that waits in a store
            holds up all others of the same connection.
    """

    def __init__(self, store: Any, rank: int, processes: int) -> None:
        self.store, self.rank = store.clone(), rank
        self.others = [other for other in range(processes) if other != rank]
        self.machine = _machine_identity()
        self.beats = 0
        self.known: dict[int, Place] = {}
        self.seen: dict[int, tuple[bytes, float]] = {}  # the last count, and when it was new
        self.asked = 0.0  # when counts were read
        pid = os.getpid()
        own = Place(machine=self.machine, pid=pid, started=_process_start(pid))
        self.store.set(f"process/{rank}", json.dumps(own))
        self.post_beat()

    def post_beat(self) -> None:
        """Post a sign of life."""
        self.beats += 1
        self.store.set(f"beat/{self.rank}", str(self.beats))

    def find_missing(self) -> list[int]:
        """List the processes that have died, or give no sign of life."""
        fresh = time.monotonic() - self.asked > BEAT
        if fresh:
            self.asked = time.monotonic()
        return [other for other in self.others if not self._is_alive(other, fresh)]

    def _is_alive(self, other: int, fresh: bool) -> bool:
        """``fresh``: read the count of a process on another machine anew."""
        if other not in self.known:
            if not self.store.check([f"process/{other}"]):
                return True  # not there yet
            self.known[other] = json.loads(self.store.get(f"process/{other}"))
        its = self.known[other]
        if its["machine"] == self.machine is not None:
            return its["started"] == _process_start(its["pid"])
        now = time.monotonic()
        if fresh or other not in self.seen:
            count = self.store.get(f"beat/{other}")
            if self.seen.get(other, (b"", 0.0))[0] != count:
                self.seen[other] = count, now
        return now - self.seen[other][1] < SILENCE


class Watcher:
    """Watches the collectives of one process.

    Args:
        label: names this process in errors.
        abort: aborts the communicators, which ends what hangs in a stream.
        limit: seconds that a collective may take once it is the oldest.
        suspect: called each ``_POLL`` while the oldest collective takes longer than ``patience``
            seconds; raises what it finds.
        settled: called when a collective has ended that had taken longer.
    """

    def __init__(
        self,
        presence: Presence,
        label: str,
        abort: Callable[[], object],
        limit: float,
        *,
        device: torch.device,
        patience: float = 5.0,
        suspect: Callable[[], object] = lambda: None,
        settled: Callable[[], object] = lambda: None,
    ) -> None:
        self.presence, self.label, self.abort, self.limit = presence, label, abort, limit
        self.device, self.patience = device, patience
        self.suspect, self.settled = suspect, settled
        self.error: RegimesError | None = None
        # An event after each collective; of works the last alone, because a work holds its tensors.
        self.pending: deque[tuple[Any, str]] = deque()
        self.last: dict[int, tuple[Any, str]] = {}  # by communicator
        self.since = time.monotonic()  # when the oldest pending one became that
        self.lock = threading.Lock()  # of the three above
        self.closed = threading.Event()
        # Weak, so that the thread ends when the last reference to the watcher is gone.
        self.thread = threading.Thread(
            target=_watch_loop, args=(weakref.ref(self), self.closed), daemon=True, name="watcher"
        )
        self.thread.start()

    def follow_collective(self, work: Any, event: Any, name: str, communicator: int = 0) -> None:
        """Watch a collective until the event that was recorded after it has come."""
        with self.lock:
            if not self.pending:
                self.since = time.monotonic()
            self.pending.append((event, name))
            self.last[communicator] = work, name

    def raise_failure(self) -> None:
        """Raise what the thread has found, if it has found something.

        Raises:
            TrainingError: a collective has failed, or a process of one is missing.
            ConfigError: a process makes other calls than this one.
        """
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread, and drop all that it holds."""
        self.closed.set()
        if self.thread is not threading.current_thread():
            self.thread.join()
        self._clear_pending()

    def examine_collectives(self) -> None:
        """Look once at the oldest collective; the thread calls this."""
        if self.error is not None:
            return
        name = ""
        try:
            if self._has_failed():
                return
            name, waited = self._oldest_pending(), time.monotonic() - self.since
            if not name or waited < min(DOUBT, self.limit):
                return
            if missing := self.presence.find_missing():
                numbers = ", ".join(map(str, missing))
                self._stop_as_lost(name, f"no sign of process {numbers}, which has died")
            elif waited > self.limit:
                self._stop_as_lost(name, f"it has taken longer than {self.limit:g} s")
            elif waited > self.patience:
                self.suspect()
        except RegimesError as error:
            self._stop_with(error)
        except RuntimeError as error:  # of a store that has ended
            self._stop_as_lost(name, str(error).splitlines()[0])

    def _oldest_pending(self) -> str:
        """Forget the collectives that have ended; the name of the oldest other one, or ""."""
        with self.lock:
            count, waited = len(self.pending), time.monotonic() - self.since
            while self.pending and self.pending[0][0].query():
                self.pending.popleft()
            progress = len(self.pending) < count
            if progress:
                self.since = time.monotonic()
            name = self.pending[0][1] if self.pending else ""
        if progress and waited > self.patience:
            self.settled()
        return name

    def _has_failed(self) -> bool:
        """Has a communicator failed? Each of its works knows, so the last one is asked."""
        with self.lock:
            last = list(self.last.items())
        for communicator, (work, name) in last:
            if not work.is_completed():  # True of a failed one
                continue
            try:
                work.wait(_AT_ONCE)
            except RuntimeError as error:
                self._stop_as_lost(name, str(error).splitlines()[0])
                return True
            with self.lock:
                if self.last.get(communicator) == (work, name):
                    del self.last[communicator]
        return False

    def _stop_as_lost(self, name: str, reason: str) -> None:
        self._stop_with(
            TrainingError(f"{self.label} lost contact with the others in {name} ({reason})")
        )

    def _stop_with(self, error: RegimesError) -> None:
        # in this order: a thread that goes on after the abort must find the error
        self.error = error.with_traceback(None)  # its frames hold the collective, and so the group
        self._clear_pending()
        self.abort()

    def _clear_pending(self) -> None:
        with self.lock:
            self.pending.clear()
            self.last.clear()


def _watch_loop(reference: weakref.ref[Watcher], closed: threading.Event) -> None:
    """The thread's loop."""
    beaten = time.monotonic()
    if (watcher := reference()) is not None and watcher.device.type == "cuda":
        torch.cuda.set_device(watcher.device)  # or it would have a context on GPU 0
    del watcher
    while not closed.wait(_POLL):
        if (watcher := reference()) is None:
            return
        if time.monotonic() - beaten > BEAT:
            beaten = time.monotonic()
            with contextlib.suppress(RuntimeError):  # of a store that has ended
                watcher.presence.post_beat()
        watcher.examine_collectives()
        del watcher


def _machine_identity() -> str | None:
    """An identity of the machine, equal for processes that see each other in ``/proc``; None where
    there is no ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _process_start(pid: int) -> str | None:
    """When a process was started, in ticks of the kernel; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else fields[19]
