"""Where the loop's time goes: ``seconds`` of the record.

"compute", "compress" and "communicate" are what the loop itself has spent or waited for. What is
reduced meanwhile, in the thread of ``collectives.overlap``, is in none of them, except that it may
slow
down "compute" where both share a processor. So they add up to the time of a step in every mode.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up seconds by name. On a GPU each switch is a sync point, so that they are true."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.seconds[name] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Book time that was spent within ``source`` on ``target`` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
