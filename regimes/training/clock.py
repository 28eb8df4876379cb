"""Where the loop's time goes: ``seconds`` of the record.

"compute", "compress" and "communicate" are what the loop itself has spent or waited for. What is
reduced meanwhile, in the thread of ``collectives.overlap``, is in none of them, except that it may
slow down "compute" where both share a processor. So they add up to the time of a step in every
mode.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

LOOP = ("compute", "compress", "communicate")  # what the loop itself spends


class Clock:
    """Adds up seconds by name. A GPU marks the begin and the end when it comes to them, which is
    read by ``settle``, so that the loop need not wait at each.

    Attributes:
        seconds: by name, as far as settled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float, dict.fromkeys(LOOP, 0.0))
        self._marked: list[tuple[str, Any, Any]] = []  # name, two torch.cuda.Event

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            start = self._mark()
            yield
            self._marked.append((name, start, self._mark()))
        else:
            begin = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - begin

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Wait for the GPU, and add up what it has marked. A wait that began in another thread,
        during backward, may be longer than what it was moved out of: no time is negative, and the
        sum stays.
        """
        if self._marked:
            self._marked[-1][2].synchronize()
        for name, start, end in self._marked:
            self.seconds[name] += start.elapsed_time(end) / 1e3  # of milliseconds
        self._marked.clear()
        short = min(self.seconds["compress"], 0.0)
        self.move(short, "compress", "communicate")

    def move(self, seconds: float, source: str, target: str) -> None:
        """Book time that was spent within ``source`` on ``target`` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
