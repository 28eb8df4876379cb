"""Where the processes of a group are, told beside the collectives, in the store where they met.

A process that forgets a call which all must make waits in some collective while the others wait
elsewhere, for ten minutes and without a cause. So calls that all must make begin with a *meeting*,
on a communicator that nothing else uses (there a process that dies is noticed at once), and who has
waited for ``SOON``, in a meeting or in a collective, says where. Two places that cannot both be
reached are the cause, and both processes hear it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import warnings
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regimes.errors import ConfigError, TrainingError

SOON = 5.0  # seconds after which a process that waits says where it is
PATIENCE = 15.0  # seconds for others to come to a call before it is said who is missing
SAME = "every process makes the same calls and takes the same number of steps"
NOWHERE = {"call": None, "steps": -1, "count": 0}


class Meeting:
    """One process's view.

    Attributes:
        done: gives the steps that this process has finished.
        gather: begins an all-reduce (maximum) of a tensor on the meetings' own communicator; None
            while there is none yet.
    """

    def __init__(self, store: dist.Store, rank: int, processes: int, timeout: float) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.others = [other for other in range(processes) if other != rank]
        self.done: Callable[[], int] = lambda: 0
        self.gather: Callable[[torch.Tensor], Any] | None = None
        self.count = 0
        self.posted = False

    def come(self, call: str, patience: float | None = None) -> None:
        """Wait until all processes have come to the same call.

        Args:
            call: its name, e.g. "attach()".
            patience: seconds until a warning names those that are missing; None: ``PATIENCE``.

        Raises:
            ConfigError: another process is in another call, or in a step that comes after it.
            TrainingError: one has died, or has not come within the timeout.
        """
        if not self.others:
            return
        self.count += 1
        patience = PATIENCE if patience is None else patience
        try:
            if self.gather is None:
                self._wait(call, patience, self._all_posted)
            elif not self._all_gathered(call, patience, self.gather):
                self._differ(call)
        except RuntimeError as error:
            raise self._lost(call, error) from error.with_traceback(None)
        self.free()

    def stuck(self) -> None:
        """Say that this process waits in a collective of the step under way.

        Raises:
            ConfigError: another one waits in a call that this process has not made.
        """
        self._post(None)
        for other in self.others:
            there = self._place(other)
            late = there["count"] > self.count and there["steps"] <= self.done()
            if there["call"] and late:
                raise ConfigError(_apart(other, there, self.rank, self.done()))

    def free(self) -> None:
        """This process waits no longer."""
        if self.posted:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"place/{self.rank}", json.dumps({**NOWHERE, "count": self.count}))
            self.posted = False

    def _wait(self, call: str, patience: float, come: Callable[[float], bool]) -> None:
        """Until all have come; ``come`` waits for so many seconds and says whether they have."""
        start, warned = time.monotonic(), False
        while not come(min(SOON, patience)):
            self._post(call)
            missing, waited = self._missing(call), time.monotonic() - start
            if waited > self.timeout:
                raise TrainingError(_absent(self.rank, call, missing, waited))
            if waited >= patience and missing and not warned:
                warnings.warn(_absent(self.rank, call, missing, waited), stacklevel=2)
                warned = True

    def _all_gathered(
        self, call: str, patience: float, gather: Callable[[torch.Tensor], Any]
    ) -> bool:
        """Wait for all; have they come to the same call?"""
        sign = zlib.crc32(call.encode())
        signs = torch.tensor([sign, -sign])
        work = gather(signs)  # keeps the group, so no frame that an error keeps may have it
        self._wait(call, patience, functools.partial(done_within, work))
        return signs.tolist() == [sign, -sign]

    def _all_posted(self, seconds: float) -> bool:
        """Without a communicator: has every process posted that it has come?"""
        until, pause = time.monotonic() + min(seconds, self.timeout), 0.001
        self._post("attach()")
        while any(self._place(other)["count"] < self.count for other in self.others):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(0.1, 2 * pause)
        return True

    def _missing(self, call: str) -> list[int]:
        """Who has not said that it is here; ConfigError if somebody cannot come any more."""
        missing = []
        for other in self.others:
            there = self._place(other)
            if there["count"] < self.count:
                missing.append(other)
                if there["steps"] >= self.done():
                    here = {"call": call, "steps": self.done()}
                    raise ConfigError(_apart(self.rank, here, other, there["steps"]))
        return missing

    def _differ(self, call: str) -> None:
        """All have come, but not to the same call."""
        self._post(call)
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            for other in self.others:
                there = self._place(other)
                if there["count"] == self.count and there["call"] not in (call, None):
                    raise ConfigError(
                        f"process {self.rank} is in {call}, process {other} in {there['call']}: "
                        f"{SAME}"
                    )
            time.sleep(0.05)
        raise ConfigError(f"process {self.rank} is in {call}, another one elsewhere: {SAME}")

    def _place(self, other: int) -> dict[str, Any]:
        key = f"place/{other}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else NOWHERE

    def _post(self, call: str | None) -> None:
        """Say where this process waits; None: in a collective of a step."""
        place = {"call": call, "steps": self.done(), "count": self.count}
        if not self.posted:
            self.store.set(f"place/{self.rank}", json.dumps(place))
        self.posted = True

    def _lost(self, call: str, error: RuntimeError) -> Exception:
        """What to raise in place of an error of the store or the communicator. (No context manager:
        its frame would keep the traceback, whose frames keep the group.)"""
        try:
            with contextlib.suppress(RuntimeError):  # the store may have gone, too
                self._missing(call)
        except ConfigError as cause:  # who has left has said why
            return cause
        return TrainingError(
            f"process {self.rank} lost contact with the others in {call}: "
            f"{str(error).splitlines()[0]}"
        )


def done_within(work: Any, seconds: float) -> bool:
    """Wait for a collective of gloo; False if it needs longer.

    Raises:
        RuntimeError: it has failed.
    """
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=seconds))
    if not work.is_completed():
        return False
    work.wait()  # raises what it has failed of, with no other error behind that keeps the group
    return True


def _absent(rank: int, call: str, missing: list[int], waited: float) -> str:
    who = ", ".join(map(str, missing)) or "another one"
    return (
        f"process {rank} has waited {waited:.0f} s in {call} for process {who}: every process "
        f"calls it, or none"
    )


def _apart(caller: int, place: dict[str, Any], other: int, steps: int) -> str:
    """Why a step of ``other`` and a call of ``caller`` wait for each other."""
    return (
        f"process {caller} is in {place['call']} after {place['steps']} steps, but process {other} "
        f"is in step {steps + 1} without it: {SAME}"
    )
