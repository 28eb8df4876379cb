"""What a row of speed has: milliseconds of a step, the host's share, kernels, waits, memory."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.place import Place
from benchmarks.gpu.sizes import UNITS

KINDS = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
PROFILED = 3  # steps: a profile of more takes seconds to read


@dataclass
class Timer:
    """Times the steps of a loop, unit by unit.

    The clock begins when the first step of a unit has been launched and ends after its last one, so
    that neither evaluation nor the record's row is within. The last steps of the last unit are
    profiled instead.

    Attributes:
        units: milliseconds per step of each unit but the first two and the profiled one.
        host: of them, milliseconds of processor time, of all threads, until the last step was
            launched.
    """

    place: Place
    units: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    _unit: int = 0

    def step(self, done: int, steps: int) -> None:
        """Called after each step: the ``done``-th of a unit's ``steps``."""
        if self._unit == UNITS - 1:
            self._profile(done, steps)
        elif done == 1:
            self._synchronise()
            self._began, self._processor = time.perf_counter(), time.process_time()
        elif done == steps:
            host = time.process_time() - self._processor
            self._synchronise()
            if self._unit > 1:
                seconds = time.perf_counter() - self._began
                self.units.append(1e3 * seconds / (steps - 1))
                self.host.append(1e3 * host / (steps - 1))
        self._unit += done == steps

    def _profile(self, done: int, steps: int) -> None:
        if done == steps - PROFILED:
            self._synchronise()
            kinds = KINDS if self.place.gpu else KINDS[:1]
            self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)
            self._profiler.start()
        elif done == steps:
            self._synchronise()
            self._profiler.stop()
            self.counts = counted(self._profiler)

    def _synchronise(self) -> None:
        if self.place.gpu:
            torch.cuda.synchronize()

    def row(self) -> dict[str, Any]:
        """The numbers of the line; "busy" is the profiled kernels' time, each by itself, over
        the time of a step that is not profiled: above 1 where kernels run side by side."""
        found: dict[str, Any] = {
            "ms": round(statistics.median(self.units), 3),
            "n": len(self.units),
            "least": round(min(self.units), 3),
            "most": round(max(self.units), 3),
            "host_ms": round(statistics.median(self.host), 3),
            **self.counts,
        }
        if "kernel_ms" in found:
            found["busy"] = round(found["kernel_ms"] / found["ms"], 3)
        if self.place.gpu:
            found["MiB"] = round(torch.cuda.max_memory_allocated() / 2**20)
        return found


def counted(profile: torch.profiler.profile) -> dict[str, Any]:
    """Kernels, their milliseconds, and waits of the host, per step (on the CPU: operations)."""
    seen: Counter[str] = Counter()
    busy = 0.0
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    for event in profile.events():
        if "CUDA" in str(event.device_type):
            seen["kernels"] += not event.name.startswith(("Memcpy", "Memset"))
            busy += event.time_range.elapsed_us()
        elif event.name.startswith("aten::"):
            seen["operations"] += 1
        elif event.name in waits:
            seen["waits"] += 1
    numbers: dict[str, Any] = {name: round(n / PROFILED, 1) for name, n in seen.items()}
    return numbers | ({"kernel_ms": round(busy / 1e3 / PROFILED, 3)} if busy else {})
