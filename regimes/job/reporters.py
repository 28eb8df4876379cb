"""Reporters. An exception in one never stops training: a reporter may be a user's code, or write
to a pipe that another program closes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, Protocol, runtime_checkable

from regimes.base.console.notebook import Line, in_notebook
from regimes.base.console.units import metric_unit
from regimes.base.errors import RecordError
from regimes.job.termination import Terminated
from regimes.records import Header, Row, number_of_units, run_name, unit_name

log = logging.getLogger(__name__)


@runtime_checkable
class Reporter(Protocol):
    """Receives the events of a training, as a progress bar does. Called on process 0 only."""

    def start(self, header: Header, rows: list[Row]) -> None: ...
    def step(self, epoch: int, done: int, steps: int) -> None: ...
    def epoch(self, row: Row, seconds: dict[str, float]) -> None: ...
    def stop(self, message: str) -> None: ...


class CellLine:
    """Shows one line of progress in a notebook's cell: run, unit, step, seconds so far and left,
    and the metric of the unit before. It is gone at the end."""

    def start(self, header: Header, rows: list[Row]) -> None:
        self._line, self._began = Line(), time.monotonic()
        self._first: float | None = None  # where training went on, in units
        self._unit = unit_name(header["config"]).partition(" ")[0]
        self._units, self._metric = number_of_units(header), header["metric"]
        self._last, self._run = "", run_name(header["config"])

    def step(self, epoch: int, done: int, steps: int) -> None:
        now, spent = epoch + done / steps, time.monotonic() - self._began
        if self._first is None:
            self._first = epoch + (done - 1) / steps
        of = "" if self._units is None else f" of {self._units}"
        left = ""
        if self._units is not None:
            seconds = spent / (now - self._first) * max(0.0, self._units - now)
            left = f", {_in_minutes(seconds)} left"
        where = f"{self._run}: {self._unit} {epoch + 1}{of}, step {done} of {steps}"
        self._line.show(f"{where}: {_in_minutes(spent)}{left}{self._last}")

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        value, (factor, unit) = row["metric"], metric_unit(self._metric)
        self._last = "" if value is None else f", {self._metric} {factor * value:.4g}{unit}"

    def stop(self, message: str) -> None:
        interrupted = message.startswith(KeyboardInterrupt.__name__)
        self._line.clear("" if interrupted else message)  # `stoppable` says how to go on


def _in_minutes(seconds: float) -> str:
    """Minutes and seconds.

    >>> _in_minutes(75.2)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def default_reporters() -> Sequence[Reporter]:
    """Return what shows a training if nothing else was chosen: a line in a notebook's cell."""
    return (CellLine(),) if in_notebook() else ()


class Reporters:
    """Calls several reporters as one. A reporter that raises an exception is removed, and the
    exception is logged and recorded. Only ``Terminated`` and BaseExceptions such as
    KeyboardInterrupt propagate.

    Attributes:
        event_log: records a failure (``RecordWriter.event``); None before there is a record.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._active = list(reporters)
        self._started = False
        self.event_log: Callable[..., None] | None = None

    def _call_all(self, method: str, *arguments: Any) -> None:
        for reporter in tuple(self._active):
            try:
                getattr(reporter, method)(*arguments)
            except Terminated:  # SIGTERM arrived inside the reporter, which is not at fault
                raise
            except Exception as error:
                self._active = [r for r in self._active if r is not reporter]
                self._report_failure(reporter, method, error)

    step, epoch = partialmethod(_call_all, "step"), partialmethod(_call_all, "epoch")

    def start(self, header: Header, rows: list[Row]) -> None:
        self._started = True
        self._call_all("start", header, rows)

    def stop(self, message: str) -> None:
        """Stop all reporters, unless training was refused before it has started: they then hold
        nothing that must be closed."""
        if self._started:
            self._call_all("stop", message)

    def _report_failure(self, reporter: Reporter, method: str, error: Exception) -> None:
        name, why = type(reporter).__name__, f"{type(error).__name__} {error}".strip()
        if self.event_log:
            # a full disk raises when the next epoch is written
            with contextlib.suppress(RecordError):
                self.event_log("reporter failed", reporter=name, during=method, why=why)
        goes_on = "" if method == "stop" else "; training goes on"
        with contextlib.suppress(OSError, ValueError):
            log.warning("the reporter %s failed and is left out: %s%s", name, why, goes_on)
        if method not in ("start", "stop"):
            try:
                reporter.stop("")  # it may hold a terminal or a file
            except Terminated:
                raise
            except Exception:
                log.debug("the reporter %s could not be stopped", name, exc_info=True)
