"""Reporters. An exception in one never stops training: a reporter may be a user's code, or write
to a pipe that another program closes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, Protocol, runtime_checkable

from regimes.errors import RecordError
from regimes.job.termination import Terminated
from regimes.records import Header, Row

log = logging.getLogger(__name__)


@runtime_checkable
class Reporter(Protocol):
    """Receives the events of a training, as a progress bar does. Called on process 0 only."""

    def start(self, header: Header, rows: list[Row]) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None: ...
    def epoch(self, row: Row, seconds: dict[str, float]) -> None: ...
    def stop(self, message: str) -> None: ...


class Reporters:
    """Several reporters as one. A reporter that raises an exception is removed, and the exception
    is logged and recorded. Only ``Terminated`` and BaseExceptions such as KeyboardInterrupt
    propagate.

    Attributes:
        event_log: records a failure (``RecordWriter.event``); None before there is a record.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._active = list(reporters)
        self.event_log: Callable[..., None] | None = None

    def _call(self, method: str, *arguments: Any) -> None:
        for reporter in tuple(self._active):
            try:
                getattr(reporter, method)(*arguments)
            except Terminated:  # SIGTERM arrived inside the reporter, which is not at fault
                raise
            except Exception as error:
                self._active = [r for r in self._active if r is not reporter]
                self._report_failure(reporter, method, error)

    start, step = partialmethod(_call, "start"), partialmethod(_call, "step")
    epoch, stop = partialmethod(_call, "epoch"), partialmethod(_call, "stop")

    def _report_failure(self, reporter: Reporter, method: str, error: Exception) -> None:
        name, why = type(reporter).__name__, f"{type(error).__name__} {error}".strip()
        if self.event_log:
            # a full disk raises when the next epoch is written
            with contextlib.suppress(RecordError):
                self.event_log("reporter failed", reporter=name, during=method, why=why)
        with contextlib.suppress(OSError, ValueError):
            log.warning("the reporter %s failed and is left out: %s; training goes on", name, why)
        if method not in ("start", "stop"):
            try:
                reporter.stop("")  # it may hold a terminal or a file
            except Terminated:
                raise
            except Exception:
                log.debug("the reporter %s could not be stopped", name, exc_info=True)
