"""Where the time of a unit's steps goes: ``seconds`` of the record.

"compute", "compress" and "communicate" are the time that the loop itself spends or waits. The time
of a thread that exchanges in the background is left out. They add up to the time of a step. A loop
of our own says what it does (``clock(name)``). Of a script's loop the waits for an exchange are
known (``count_waiting``); "compute" is all the rest.
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
    """Adds up the seconds of a unit's steps by name.

    A GPU runs behind the loop, so events in its stream take the times there; ``read_events`` reads
    them, which is a wait for the GPU. ``count_waiting`` never waits for it.

    Attributes:
        seconds: by name, as of the last ``read_events``.
        since: of a script's loop, the end of the iteration before; None: not known.
        clocked: iterations with a known beginning.
        before: seconds of "compute" before the first of them, of a part of an iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float, dict.fromkeys(LOOP, 0.0))
        self.since: float | None = None
        self.clocked = 0
        self.before = 0.0
        self._marked: list[tuple[str, Any, Any]] = []  # name, two torch.cuda.Event
        self._collectives: list[tuple[Any, Any]] = []  # likewise, within "compress"

    def move_seconds(self, seconds: float, source: str, target: str) -> None:
        """Count time spent within ``source`` as ``target`` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    # -- a loop of our own -------------------------------------------------------------------

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            start = self._record_event()
            yield
            self._marked.append((name, start, self._record_event()))
        else:
            begin = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - begin

    def _record_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read_events(self) -> None:
        """Wait for the GPU, and add up the times of its events."""
        if self._marked:
            self._marked[-1][2].synchronize()
        for name, start, end in self._marked:
            self.seconds[name] += start.elapsed_time(end) / 1e3  # of milliseconds
        self._marked.clear()
        for start, end in self._collectives:
            end.synchronize()  # of another stream, which ends before what waits for it
            self.move_seconds(start.elapsed_time(end) / 1e3, "compress", "communicate")
        self._collectives.clear()
        # A wait counted as communication may have begun in the other thread during backward, and
        # so be longer than the "compress" it was moved out of. No time is negative; the sum stays.
        excess = min(self.seconds["compress"], 0.0)
        self.move_seconds(excess, "compress", "communicate")

    @contextmanager
    def count_exchange(self, world: World) -> Iterator[None]:
        """Count the time of collectives as "communicate", and all other time inside as "compress".
        Of collectives without a wait of the host, all since the last ``take_marks`` count."""
        before = world.seconds
        with self("compress"):
            yield
        self.move_seconds(world.seconds - before, "compress", "communicate")
        self._collectives += world.take_marks()

    # -- a script's loop ---------------------------------------------------------------------

    def start_step(self) -> None:
        """Note the time at which a step's first bucket is full, or at which the computation of a
        local step has ended."""
        if self.since is None:
            self.since = time.perf_counter()
            return
        if not self.clocked:
            self.before = self.seconds["compute"]
        self.clocked += 1

    @contextmanager
    def count_waiting(self, world: World) -> Iterator[None]:
        """Count the time inside, in which the script waits for what is exchanged."""
        start, before = time.perf_counter(), world.seconds
        yield
        waited = time.perf_counter() - start
        # Collectives that overlap with backward cost the script nothing.
        marked = [a.elapsed_time(b) / 1e3 for a, b in world.take_marks() if b.query()]
        communicated = min(waited, world.seconds - before + sum(marked))
        self.seconds["communicate"] += communicated
        self.seconds["compress"] += waited - communicated
        self.seconds["compute"] -= waited

    def stop_step(self) -> None:
        """Note that a step is over."""
        now = time.perf_counter()
        self.seconds["compute"] += now - (now if self.since is None else self.since)
        self.since = now

    def of_unit(self, steps: int) -> dict[str, float]:
        """Return the seconds of a unit of so many iterations, by name. An iteration without a known
        beginning, like the first, counts as the mean of the others."""
        if not self.clocked:
            return dict(self.seconds)
        clocked = self.seconds["compute"] - self.before
        return self.seconds | {"compute": clocked * steps / self.clocked}

    def next_unit(self, steps: int) -> Clock:
        """Make the clock of the next unit. A unit of one iteration has no mean of others: it begins
        with the end of the iteration before."""
        clock = Clock(self.device)
        clock.since = self.since if steps == 1 else None
        return clock
