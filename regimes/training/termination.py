"""SIGTERM with grace: the epoch under way is finished and saved, then the run ends.

A scheduler that preempts a job sends SIGTERM and, some time later, SIGKILL. What a run has not
saved by then is trained again after ``--resume``; nothing recorded is lost in either case.
Many a scheduler signals every process of a job, and a launcher passes on what it gets itself:
signals within a second of the first are that one. Here is who listens; ``loop`` saves and stops,
``launch.sweep`` ends many runs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from regimes.errors import TrainingError, unexpected

GRACE = "REGIMES_GRACE"
SECONDS = 30.0  # between SIGTERM and the end, at most; REGIMES_GRACE overrides it
LONGEST = 1e6  # what may be asked for
SAME = 1.0  # seconds in which further signals are the first one, come by another way


class Terminated(TrainingError):
    """SIGTERM came; the record and the last checkpoint are whole."""

    exit_code = 128 + signal.SIGTERM


def seconds() -> float:
    """The time that a run has to end by itself.

    Raises:
        ConfigError: ``REGIMES_GRACE`` is no number of seconds.
    """
    text = os.environ.get(GRACE)
    if text is None:
        return SECONDS
    try:
        asked = float(text)
    except ValueError:
        asked = -1.0
    if not 0 <= asked <= LONGEST:
        raise unexpected(GRACE, text, f"a number of seconds, from 0 to {LONGEST:.0f}")
    return asked


class _Noted:
    """A handler of SIGTERM that remembers it; for a process that trains one run after another."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


_noted = _Noted()


def note() -> None:
    """From now on a SIGTERM ends the run under way and every later one of this process: those start
    no epoch."""
    signal.signal(signal.SIGTERM, _noted)


def _check_noted() -> None:
    if _noted.asked:
        raise Terminated("ended by SIGTERM before its next epoch: continue with --resume")


class GracefulShutdown:
    """While entered, the first SIGTERM sets ``asked``; a later one, or the grace's end, raises
    ``Terminated``. Only in the main thread, which alone receives signals.

    Raises:
        ConfigError: when it is made: as ``seconds``.
        Terminated: when it is made or entered: this process was asked to end before (``note``).
    """

    def __init__(self) -> None:
        _check_noted()
        self.asked, self.grace = False, seconds()
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        _check_noted()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGALRM):
                self._before[number] = signal.signal(number, self._signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Hand a signal that came too late to end this run, in its last epoch, to the handler that
        would have had it: what began the run may have others to begin."""
        handler = self._before.get(signal.SIGTERM)
        if self.asked and callable(handler):
            handler(signal.SIGTERM, None)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if not self.asked:
                self.asked, self._since = True, time.monotonic()
                if self._before[number] is _noted:
                    _noted.asked = True
                signal.setitimer(signal.ITIMER_REAL, max(self.grace, 1e-6))  # 0 would be never
                return
            if time.monotonic() < self._since + SAME:
                return
        raise Terminated(
            "ended by SIGTERM within an epoch; the record up to the last epoch is intact: "
            "continue with --resume"
        )
