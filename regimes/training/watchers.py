"""Those who watch a training, kept from ending it.

A reporter is somebody else's code, or writes to a pipe that somebody else closes. One that raises
is told about once and left out; the training goes on, its record is what it would have been.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from regimes.errors import RecordError
from regimes.training.termination import Terminated

log = logging.getLogger(__name__)


@runtime_checkable
class Reporter(Protocol):
    """Somebody who watches. Called on process 0 only; one that raises is left out (`watchers`)."""

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None: ...
    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None: ...
    def stop(self, message: str) -> None: ...


class Watchers:
    """Reporters as one. KeyboardInterrupt and ``Terminated`` pass through, as does any exception
    that is no ``Exception``.

    Attributes:
        event_log: records a failure (``RecordWriter.event``); None before there is a record.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._active = list(reporters)
        self.event_log: Callable[..., None] | None = None

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self._tell("start", header, rows)

    def step(self, epoch: int, done: int, steps: int) -> None:
        self._tell("step", epoch, done, steps)

    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None:
        self._tell("epoch", row, seconds)

    def stop(self, message: str) -> None:
        self._tell("stop", message)

    def _tell(self, what: str, *arguments: Any) -> None:
        for reporter in tuple(self._active):
            try:
                getattr(reporter, what)(*arguments)
            except Terminated:  # a signal came while the reporter was at work
                raise
            except Exception as error:
                self._active = [r for r in self._active if r is not reporter]
                self._leave_out(reporter, what, error)

    def _leave_out(self, reporter: Reporter, what: str, error: Exception) -> None:
        name, why = type(reporter).__name__, f"{type(error).__name__} {error}".strip()
        if self.event_log:
            with contextlib.suppress(RecordError):  # if the disk is full, the next epoch says so
                self.event_log("reporter failed", reporter=name, during=what, why=why)
        with contextlib.suppress(OSError, ValueError):
            log.warning("the reporter %s failed and is left out: %s; training goes on", name, why)
        if what not in ("start", "stop"):
            try:
                reporter.stop("")  # it may hold a terminal or a file
            except Terminated:
                raise
            except Exception:
                log.debug("the reporter %s could not be stopped", name, exc_info=True)
