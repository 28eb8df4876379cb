"""SIGTERM with grace: the epoch under way is finished and saved, then the run ends.

A scheduler that preempts a job sends SIGTERM and, some time later, SIGKILL. What a run has not
saved by then is trained again after ``--resume``; nothing recorded is lost in either case.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from regimes.errors import TrainingError

SECONDS = 30.0  # between SIGTERM and the end, at most; REGIMES_GRACE overrides it


class Terminated(TrainingError):
    """SIGTERM came; the record and the last checkpoint are whole."""

    exit_code = 128 + signal.SIGTERM


def seconds() -> float:
    """The time that a run has to end by itself."""
    return float(os.environ.get("REGIMES_GRACE", SECONDS))


class GracefulShutdown:
    """While entered, the first SIGTERM sets ``asked``; a second one, or the grace's end, raises
    ``Terminated``. Only in the main thread, which alone receives signals."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGALRM):
                self._before[number] = signal.signal(number, self._signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self.asked:
            self.asked = True
            signal.setitimer(signal.ITIMER_REAL, seconds())
            return
        raise Terminated(
            "ended by SIGTERM within an epoch; the record up to the last epoch is intact: "
            "continue with --resume"
        )
