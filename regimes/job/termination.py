"""SIGTERM with grace: the epoch in progress is finished and saved, then the run ends.

A scheduler that preempts a job sends SIGTERM and, some time later, SIGKILL. Steps that are not
saved by then are trained again after ``--resume``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from regimes.base.errors import TrainingError, unexpected_value

_GRACE = "REGIMES_GRACE"
_SECONDS = 30.0  # between SIGTERM and the end, at most; REGIMES_GRACE overrides it
_LONGEST = 1e6  # seconds, of REGIMES_GRACE
# Many schedulers signal every process of a job, and a launcher passes on its own signal. Signals
# within so many seconds of the first are copies of it, not a second request.
_DUPLICATE_SECONDS = 1.0


class Terminated(TrainingError):
    """Ends a run after SIGTERM; the record and the last checkpoint are complete."""

    exit_code = 128 + signal.SIGTERM


def grace_seconds() -> float:
    """Return the seconds between SIGTERM and the end of a run.

    Raises:
        ConfigError: ``REGIMES_GRACE`` is not a number of seconds.
    """
    text = os.environ.get(_GRACE)
    if text is None:
        return _SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST:
        raise unexpected_value(_GRACE, text, f"a number of seconds, from 0 to {_LONGEST:.0f}")
    return seconds


_remembered: list[int] = []  # signals, in a process that trains one run after another


def _remember(number: int, frame: FrameType | None) -> None:
    _remembered.append(number)


def remember_sigterm() -> None:
    """Let a SIGTERM from now on end the run in progress, and let no later run of this process
    start."""
    signal.signal(signal.SIGTERM, _remember)


def _check_remembered() -> None:
    if _remembered:
        raise Terminated("ended by SIGTERM before its next epoch: continue with --resume")


class GracefulShutdown:
    """Ends a run on SIGTERM. While entered, the first SIGTERM sets ``asked``; a second one, or the
    end of the grace time, raises ``Terminated``. Outside the main thread, which alone receives
    signals, this does nothing.

    Raises:
        ConfigError: at construction, from ``grace_seconds``.
        Terminated: at construction or entry, after a SIGTERM that ``remember_sigterm`` handled.
    """

    def __init__(self) -> None:
        _check_remembered()
        self.asked, self.grace, self._since = False, grace_seconds(), 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        _check_remembered()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGALRM):
                self._before[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Call the previous handler if the signal came in the run's last epoch, too late to end
        the run: the caller may have further runs to cancel."""
        handler = self._before.get(signal.SIGTERM)
        if self.asked and callable(handler):
            handler(signal.SIGTERM, None)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if not self.asked:
                self.asked, self._since = True, time.monotonic()
                if self._before[number] is _remember:  # no later run of this process starts, too
                    _remember(number, frame)
                # SIGALRM enforces the grace time; a timer of 0 would never fire
                signal.setitimer(signal.ITIMER_REAL, max(self.grace, 1e-6))
                return
            if time.monotonic() < self._since + _DUPLICATE_SECONDS:
                return
        raise Terminated(
            "ended by SIGTERM within an epoch; the record up to the last epoch is intact: "
            "continue with --resume"
        )
