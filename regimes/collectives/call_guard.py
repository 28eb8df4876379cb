"""Detects mismatched calls: each process posts its position in the store of its group.

A process that skips a call which all must make waits in one collective while the others wait in
another, for ten minutes and without a cause. Therefore each such call begins with ``enter_call``,
an all-gather on a communicator that nothing else uses, where the death of a process is noticed at
once. A process that has waited for ``SOON``, there or in a collective of a step, posts its call and
its number of steps. Two positions that cannot both be reached are the cause; both processes raise.

For example, process 1 waits in attach() after 3 steps, and process 0 in a collective of step 4.
Process 1 takes no step before process 0 has entered attach(), and process 0 cannot finish step 4
without process 1. Had process 1 waited in attach() after 4 steps, process 0 could still come.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist

from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives import outside
from regimes.collectives.process_group import Group

SOON = 5.0  # seconds after which a waiting process posts where it is, well before a warning
PATIENCE = 15.0  # seconds until a warning names who is missing; by then all have posted (SOON)
_CARD_BYTES = 64  # of a process's number and the name of its call, which are compared
_RULE = "every process makes the same calls and takes the same number of steps"


class Position(TypedDict):
    """Says where a process waits.

    A process that has entered one call so far may be in these states:

    ================================  =====  =====  ============================================
    call                              steps  count  meaning
    ================================  =====  =====  ============================================
    "attach()"                        3      1      it waits in attach(), after 3 steps
    None                              3      1      it waits in a collective of step 4
    "all_reduce() of the script"      3      1      it waits in a collective of the script, among
                                                    the ranks of ``outside``
    "exit()"                          3      2      its script has ended, which counts as a call
    None                              -1     1      it does not wait
    None                              -1     0      it has posted nothing yet
    ================================  =====  =====  ============================================

    Attributes:
        call: The call in which the process waits; None if it waits in a collective of a step, or
            not at all.
        steps: The steps that it has finished; -1 if it does not wait.
        count: The calls that it has entered so far.
        outside: The process waits in a collective of the script, among these ranks of the default
            group.
    """

    call: str | None
    steps: int
    count: int
    outside: NotRequired[list[int]]


class CallGuard:
    """Compares the calls of one process with those of the others, which must make the same calls.

    Attributes:
        others: the other processes; empty: nothing is compared.
        done: gives the steps that this process has finished.
        group: the guard's own communicator; None until there is one.
        closed: the thread that looks at the script ends.
        count: calls entered so far.
        posted: the store has the wait of this process, in a call or in a collective of a step.
        outside: this process waits in a collective of the script.
        seen_outside: by process, its position in a collective of its script when last read.
        entering: this process is in ``enter_call``: the thread that watches collectives must not
            post.
    """

    def __init__(self, store: dist.Store, rank: int, processes: int, timeout: float) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.others = [other for other in range(processes) if other != rank]
        self.done: Callable[[], int] = lambda: 0
        self.group: Group | None = None
        self.closed = threading.Event()
        self.count = 0
        self.posted = False
        self.outside = False
        self.seen_outside: dict[int, Position] = {}
        self.entering = False

    def use_group(self, group: Group) -> None:
        """Let processes meet over a communicator that nothing else uses, and begin to watch the
        script's own collectives."""
        self.group = group
        outside.watch_script(self, SOON / 2, self.closed)

    def close(self) -> None:
        """Stop watching the script's own collectives."""
        self.closed.set()

    def enter_call(self, call: str, patience: float | None = None) -> None:
        """Wait until all processes have entered the same call.

        Args:
            call: its name, e.g. "attach()".
            patience: seconds until a warning names the missing processes; None: ``PATIENCE``.

        Raises:
            ConfigError: another process is in another call, or in a step that comes after it.
            TrainingError: a process has died, or has not entered within the timeout.
        """
        if not self.others:
            return
        self.count += 1
        patience = PATIENCE if patience is None else patience
        self.entering = True
        try:
            if self.group is None:
                self._wait_for_all(call, patience, functools.partial(self._all_posted, call))
            else:
                self._compare_calls(call, patience, self.group)
        except RuntimeError as error:
            # without a traceback, whose frames would keep the group and its threads
            raise self._explain_error(call, error) from error.with_traceback(None)
        finally:
            self.entering = False
        self.stop_waiting()

    def report_wait(self) -> None:
        """Post that this process waits in a collective of the current step.

        Raises:
            ConfigError: another process waits in a call that this process has not made.
        """
        if self.entering or not self.others:
            return
        self._post_position(None)
        for other in self.others:
            position = self._read_position(other)
            self._check_outside(other, position)
            late = position["count"] > self.count and position["steps"] <= self.done()
            if position["call"] and late:
                raise ConfigError(_describe_mismatch(other, position, self.rank, self.done()))

    def post_outside(self, waits: tuple[str, list[int], int] | None) -> None:
        """Post the collective in which this process has waited for a while: one of the script's, or
        one of torch's own in a step. None says that it waits in no such collective. A thread of
        ``collectives.outside`` calls this."""
        if waits is not None and not self.outside and not self.posted:
            name, ranks, _ = waits
            here: Position = {"call": None, "steps": self.done(), "count": self.count}
            if name != outside.IN_STEP:
                here = {**here, "call": f"{name}() of the script", "outside": ranks}
            self._write_position(here)
        elif waits is None and self.outside and not self.posted:
            self._write_position({"call": None, "steps": -1, "count": self.count})
        self.outside = waits is not None

    def _check_outside(self, other: int, position: Position) -> None:
        """Raise ConfigError where another process waits for this one in a collective of the script,
        now as when this was last asked."""
        if "outside" not in position or dist.get_rank() not in position["outside"]:
            self.seen_outside.pop(other, None)
        elif self.seen_outside.get(other) == position:
            raise ConfigError(_describe_mismatch(other, position, self.rank, self.done()))
        else:
            self.seen_outside[other] = position

    def post_end(self) -> None:
        """Post that the script of this process has ended."""
        if self.others:
            end: Position = {"call": "exit()", "steps": self.done(), "count": self.count + 1}
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._write_position(end)

    def stop_waiting(self) -> None:
        """Post that this process no longer waits."""
        self.seen_outside.clear()
        if self.posted:
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._write_position({"call": None, "steps": -1, "count": self.count})
            self.posted = False

    def _wait_for_all(self, call: str, patience: float, arrived: Callable[[float], bool]) -> None:
        """Wait for all; ``arrived`` waits for so many seconds and returns whether all are there."""
        start, warned = time.monotonic(), False
        while not arrived(min(SOON, patience)):
            self._post_position(call)
            missing, waited = self._find_missing(call), time.monotonic() - start
            if waited > self.timeout:
                raise TrainingError(describe_absent(self.rank, call, missing, waited))
            if waited >= patience and missing and not warned:
                warnings.warn(describe_absent(self.rank, call, missing, waited), stacklevel=2)
                warned = True

    def _compare_calls(self, call: str, patience: float, group: Group) -> None:
        """Wait for all; ConfigError unless they have entered the same call."""
        everyone = [torch.empty(_CARD_BYTES, dtype=torch.uint8) for _ in group.ranks]
        # The work keeps the group: it stays in this frame, which no raised error keeps.
        work = gather_bytes(everyone, _encode_call(self.rank, call), group)
        self._wait_for_all(call, patience, functools.partial(done_within, work))
        for card in (bytes(row.tolist()) for row in everyone):
            other, _, name = card.decode(errors="ignore").rstrip().partition(" ")
            if card != _encode_call(int(other), call):
                raise ConfigError(
                    f"process {self.rank} is in {call}, process {other} in {name}: {_RULE}"
                )

    def _all_posted(self, call: str, seconds: float) -> bool:
        """Post that this process has entered, and wait for the posts of the others: where there is
        no communicator yet."""
        until, pause = time.monotonic() + min(seconds, self.timeout), 0.001
        self._post_position(call)
        while any(self._read_position(other)["count"] < self.count for other in self.others):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(0.1, 2 * pause)
        return True

    def _find_missing(self, call: str) -> list[int]:
        """Processes that have not posted this call; ConfigError if one can no longer reach it."""
        missing = []
        for other in self.others:
            position = self._read_position(other)
            self._check_outside(other, position)
            if position["count"] < self.count:
                missing.append(other)
                if "outside" not in position and position["steps"] >= self.done():
                    here = Position(call=call, steps=self.done(), count=self.count)
                    raise ConfigError(_describe_mismatch(self.rank, here, other, position["steps"]))
        return missing

    def _read_position(self, other: int) -> Position:
        key = f"place/{other}"
        if not self.store.check([key]):
            return Position(call=None, steps=-1, count=0)
        position: Position = json.loads(self.store.get(key))
        return position

    def _post_position(self, call: str | None) -> None:
        """Post where this process waits, once for each wait."""
        if not self.posted:
            self._write_position({"call": call, "steps": self.done(), "count": self.count})
        self.posted = True

    def _write_position(self, position: Position) -> None:
        self.store.set(f"place/{self.rank}", json.dumps(position))

    def _explain_error(self, call: str, error: RuntimeError) -> Exception:
        """The exception to raise in place of an error of the store or the communicator."""
        # Not a context manager: its frame would keep the traceback, and so the frames with the
        # group.
        try:
            with contextlib.suppress(RuntimeError):  # the store may have ended, too
                self._find_missing(call)
        except ConfigError as cause:  # a process that has left may have posted why
            return cause
        return TrainingError(
            f"process {self.rank} lost contact with the others in {call}: "
            f"{str(error).splitlines()[0]}"
        )


def _encode_call(rank: int, call: str) -> bytes:
    """Who enters what, in as many bytes for any call."""
    return f"{rank} {call}".encode()[:_CARD_BYTES].ljust(_CARD_BYTES)


def gather_bytes(everyone: list[torch.Tensor], own: bytes, group: Group) -> Any:
    """Begin to gather equally many bytes from each process of a group, and return torch's work."""
    mine = torch.tensor([*own], dtype=torch.uint8)
    return dist.all_gather(everyone, mine, group=group.torch_group, async_op=True)


def done_within(work: Any, seconds: float) -> bool:
    """Wait for a collective of gloo for so many seconds; return False if it needs longer.

    Raises:
        RuntimeError: it has failed.
    """
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=seconds))
    if not work.is_completed():
        return False
    work.wait()  # raises the failure alone: a chained error would keep the group
    return True


def describe_absent(rank: int, call: str, missing: list[int], waited: float) -> str:
    """Say that a process waits in a call which others have not made."""
    names = ", ".join(map(str, missing)) or "another one"
    return (
        f"process {rank} has waited {waited:.0f} s in {call} for process {names}: all processes "
        "must call it"
    )


def _describe_mismatch(caller: int, position: Position, other: int, steps: int) -> str:
    """Why a step of ``other`` and a call of ``caller`` wait for each other."""
    return (
        f"process {caller} is in {position['call']} after {position['steps']} steps, but process "
        f"{other} is in step {steps + 1} without it: {_RULE}"
    )
