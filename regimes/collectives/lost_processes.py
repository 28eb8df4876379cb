"""Lost processes: how a world waits for the others in a collective, and what it says where one of
them is lost.

Over gloo the host waits for each collective, and meanwhile posts where it waits (``call_guard``).
NCCL runs collectives in a stream, which ``nccl_watcher`` watches.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from regimes.base.errors import ConfigError, RegimesError, TrainingError
from regimes.collectives import call_guard
from regimes.collectives.call_guard import CallGuard, done_within
from regimes.collectives.launcher import on_one_node
from regimes.collectives.nccl_watcher import Presence, Watcher
from regimes.collectives.process_group import Group, abort_nccl

# in gloo's errors: processes do not connect; and the address that one of them has announced
_CONNECTING = re.compile(r"timed out connecting|connect timeout", re.I)
_OWN_ADDRESS = re.compile(r"remote=\[(127\.[\d.]+|::1)\]")
_LAST_WORDS = 3.0  # seconds in which a process that leaves says so: it leaves its groups first
_ROLL_CALL = 3.0  # seconds in which a living process answers when contact is lost


class Faults:
    """Handles the faults of one world: how a process waits for the others, and what it raises if
    one of them is lost.

    Attributes:
        guard: of the calls that all processes make.
        watcher: of collectives in streams; None: the host waits for each.
    """

    watcher: Watcher | None = None

    def __init__(
        self,
        rank: int,
        processes: int,
        store: dist.Store | None = None,
        guard: CallGuard | None = None,
    ) -> None:
        """
        Args:
            store: for a roll call of the processes, where nothing else may tell who is missing.
            guard: None: calls are not compared.
        """
        self.rank, self.processes, self.store = rank, processes, store
        self.label = f"process {rank} of {processes}"
        self.guard = guard or CallGuard(dist.HashStore(), 0, 1, 0.0)

    def watch_streams(
        self, store: dist.Store, limit: float, device: torch.device, groups: Sequence[Group]
    ) -> None:
        """Watch collectives on a GPU from now on, which run in the order of streams.

        Args:
            limit: seconds that one may take.
            groups: which to abort after an error.
        """
        self.watcher = Watcher(
            Presence(store, self.rank, self.processes),
            self.label,
            partial(abort_nccl, groups),
            limit,
            device=device,
            patience=call_guard.SOON,
            suspect=self.guard.report_wait,
            settled=self.guard.stop_waiting,
        )

    def raise_failure(self) -> None:
        """Raise what the watcher has found."""
        if self.watcher is not None:
            self.watcher.raise_failure()

    def wait_for_work(self, work: Any) -> None:
        """Wait for a collective of gloo. Raise RuntimeError if it fails, and ConfigError if another
        process waits in a call that this process has not made."""
        if not self.guard.others:
            work.wait()
            return
        try:
            while not done_within(work, call_guard.SOON):
                self.guard.report_wait()
        except RuntimeError:
            self.guard.report_wait()  # a process that has left may have posted why
            raise
        self.guard.stop_waiting()

    def explain_loss(self, name: str, error: RuntimeError) -> RegimesError:
        """Return the exception to raise in place of the error of a collective."""
        silent = name_silent(self.store, self.rank, self.processes)
        deadline = time.monotonic() + _LAST_WORDS
        with contextlib.suppress(RuntimeError):  # the store may have ended, too
            while self.guard.others and time.monotonic() < deadline:
                try:
                    self.guard.report_wait()
                except ConfigError as cause:  # a process that has left has posted why
                    return cause
                time.sleep(0.05)
        return describe_loss(self.label, f"in {name}", silent, error)

    def close(self) -> None:
        """End all threads."""
        self.guard.close()
        if self.watcher is not None:
            self.watcher.close()


def describe_loss(who: str, where: str, silent: str, error: Exception) -> TrainingError:
    """Return the exception to raise in place of an error of torch's, with the cause if it can be
    told.

    Args:
        who, where: this process, and what it was doing.
        silent: the processes that do not answer.
    """
    reason = str(error).splitlines()[0]
    lost = f"{who} lost contact with the others {where} ({silent})"
    if _CONNECTING.search(reason) is None or on_one_node():
        return TrainingError(f"{lost}: {reason}")
    if (own := _OWN_ADDRESS.search(reason)) is not None:
        lost = (
            f"{who} does not reach another one {where}, because that one announces {own[1]}, where "
            "every node finds itself"
        )
    return TrainingError(
        f"{lost}: on several nodes set GLOO_SOCKET_IFNAME on each to its interface to the others, "
        f"say eth0 (`ip addr` lists them): {reason}"
    )


def name_silent(store: dist.Store | None, rank: int, processes: int) -> str:
    """Name the processes that do not answer a roll call in the store."""
    others = {other: f"roll call/{other}" for other in range(processes) if other != rank}
    unknown = "one of them has died or hangs"
    if store is None:
        return unknown
    try:
        store.set(f"roll call/{rank}", "here")
        deadline = time.monotonic() + _ROLL_CALL
        while others and time.monotonic() < deadline:
            others = {r: key for r, key in others.items() if not store.check([key])}
            time.sleep(0.05)
    except RuntimeError:  # the store has ended
        return unknown
    if not others:
        return "all of them still answer: the network, or another collective"
    return f"no sign of process {', '.join(map(str, others))}, which has died or hangs"
