"""Where the loop's time goes: ``seconds`` of the record.

"compute", "compress" and "communicate" are the time that the loop itself spends or waits, without
that of the thread of ``collectives.overlap``; they add up to the time of a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regimes.collectives.world import World

LOOP = ("compute", "compress", "communicate")


class Clock:
    """Adds up seconds by name.

    A GPU runs behind the loop, so events in its stream take the times there; ``settle`` reads them,
    which is a wait for the GPU.

    Attributes:
        seconds: by name, as of the last ``settle``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float, dict.fromkeys(LOOP, 0.0))
        self._marked: list[tuple[str, Any, Any]] = []  # name, two torch.cuda.Event
        self._collectives: list[tuple[Any, Any]] = []  # likewise, within "compress"

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
        """Wait for the GPU, and add up the times of its events."""
        if self._marked:
            self._marked[-1][2].synchronize()
        for name, start, end in self._marked:
            self.seconds[name] += start.elapsed_time(end) / 1e3  # of milliseconds
        self._marked.clear()
        for start, end in self._collectives:
            end.synchronize()  # of another stream, which ends before what waits for it
            self.move(start.elapsed_time(end) / 1e3, "compress", "communicate")
        self._collectives.clear()
        # A wait counted as communication may have begun in the other thread during backward, and
        # so be longer than the "compress" it was moved out of. No time is negative; the sum stays.
        excess = min(self.seconds["compress"], 0.0)
        self.move(excess, "compress", "communicate")

    @contextmanager
    def exchanging(self, world: World) -> Iterator[None]:
        """Count the time of collectives inside as "communicate" and not as "compress"; of those
        without a wait of the host, all since the last ``take_marks``."""
        before = world.seconds
        yield
        self.move(world.seconds - before, "compress", "communicate")
        self._collectives += world.take_marks()

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count time spent within ``source`` as ``target`` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
