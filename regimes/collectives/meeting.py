"""Where the processes of a group are, told beside the collectives, in the store where they met.

A process that forgets a call which all must make waits in some collective while the others wait
elsewhere, for ten minutes and without a cause. Here each says where it waits: those that wait in a
call before they go on, those that have waited for ``SOON`` in a collective as well. Two places that
cannot both be reached are the cause, and both processes hear it.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from regimes.errors import ConfigError, TrainingError

SOON = 5.0  # seconds in a collective after which a process says where it is
PATIENCE = 15.0  # seconds for others to come to a call before it is said who is missing
SAME = "every process makes the same calls and takes the same number of steps"


class Meeting:
    """One process's view.

    Attributes:
        done: gives the steps that this process has finished.
    """

    def __init__(self, store: dist.Store, rank: int, processes: int, timeout: float) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout
        self.others = [other for other in range(processes) if other != rank]
        self.done: Callable[[], int] = lambda: 0
        self.count = 0
        self.posted = False

    def come(self, call: str, patience: float | None = None) -> None:
        """Wait until all processes have come to the same call.

        Args:
            call: its name, e.g. "attach()".
            patience: seconds until a warning names those that are missing; None: ``PATIENCE``.

        Raises:
            ConfigError: another process is in another call, or in a step that comes after it.
            TrainingError: one has not come within the timeout.
        """
        if not self.others:
            return
        self.count += 1
        here = {"call": call, "steps": self.done(), "count": self.count}
        with self._contact(call):
            self._post(here)
            start, warned, pause = time.monotonic(), False, 0.001
            while missing := self._missing(call):
                waited = time.monotonic() - start
                if waited > self.timeout:
                    raise TrainingError(_absent(self.rank, call, missing, waited))
                if waited > (PATIENCE if patience is None else patience) and not warned:
                    warnings.warn(_absent(self.rank, call, missing, waited), stacklevel=2)
                    warned = True
                time.sleep(pause)
                pause = min(0.1, 2 * pause)

    def stuck(self) -> None:
        """Say that this process waits in a collective of the step under way.

        Raises:
            ConfigError: another one waits in a call that this process has not made.
        """
        with self._contact("backward()"):
            if not self.posted:
                self._post({"call": None, "steps": self.done(), "count": self.count})
            for other in self.others:
                there = self._place(other)
                if there["call"] and there["count"] > self.count and there["steps"] <= self.done():
                    raise ConfigError(_apart(other, there, self.rank, self.done()))

    def free(self) -> None:
        """This process waits no longer."""
        if self.posted:
            with contextlib.suppress(RuntimeError):
                self._post({"call": None, "steps": -1, "count": self.count})
            self.posted = False

    def _missing(self, call: str) -> list[int]:
        """Who has not come yet; ConfigError if somebody cannot come any more."""
        missing = []
        for other in self.others:
            there = self._place(other)
            if there["count"] < self.count:
                missing.append(other)
                if there["call"] is None and there["steps"] >= self.done():
                    mine = {"call": call, "steps": self.done()}
                    raise ConfigError(_apart(self.rank, mine, other, there["steps"]))
            elif there["count"] == self.count and there["call"] not in (call, None):
                raise ConfigError(
                    f"process {self.rank} is in {call}, process {other} in {there['call']}: {SAME}"
                )
        return missing

    def _place(self, other: int) -> dict[str, Any]:
        key = f"place/{other}"
        if not self.store.check([key]):
            return {"call": None, "steps": -1, "count": 0}
        return json.loads(self.store.get(key))

    def _post(self, place: dict[str, Any]) -> None:
        self.store.set(f"place/{self.rank}", json.dumps(place))
        self.posted = place["call"] is None

    @contextlib.contextmanager
    def _contact(self, call: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TrainingError(
                f"process {self.rank} lost contact with the others in {call}: "
                f"{str(error).splitlines()[0]}"
            ) from None


def _absent(rank: int, call: str, missing: list[int], waited: float) -> str:
    who = ", ".join(map(str, missing))
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
