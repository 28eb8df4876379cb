"""The order of the work: which row begins when, in which process, and until when."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import setting
from benchmarks.gpu.catalogue import BESIDE, plan, planned
from benchmarks.gpu.lines import Lines, deliver
from benchmarks.gpu.place import Place
from benchmarks.gpu.worker import FIRST, Row, Worker

ENDING = 15.0  # seconds that a unit, its checkpoint and the archive may take at a slice's end
REHEARSED = 300.0  # seconds of a row in a rehearsal: a CPU may be slow, or busy
SATURATED = 0.75  # share of a step with a kernel from which a second run beside it gains nothing


class Campaign:
    """One call of the command.

    Attributes:
        end: time of ``time.monotonic`` at which the last row has ended.
        only: a regular expression that a row's name has.
    """

    def __init__(self, place: Place, out: Path, end: float, only: str = "") -> None:
        self.place, self.out, self.end, self.only = place, out.resolve(), end, only
        self.began = time.monotonic()
        self.lines = Lines(place.out / "lines.jsonl")
        self.rows = plan(place)
        self.lock = threading.Lock()
        self.workers: list[Worker] = []
        self.first = self._worker(FIRST)
        self.first.start()  # imports, and decodes the images, while checks go on

    def _worker(self, name: str) -> Worker:
        worker = Worker(self.place, name)
        self.workers.append(worker)
        return worker

    def header(self) -> None:
        """What is planned, and predicted, before anything is measured."""
        self._add(
            Row("plan", "header", 0),
            {
                "prediction": setting.PREDICTION,
                "grid": setting.GRID,
                "device": self.place.device,
                "slice": round(self.end - self.began),
                "cores": os.cpu_count(),
                "planned": {part: round(planned(rows)) for part, rows in self.rows.items()},
            },
        )

    def _add(self, row: Row, found: dict[str, Any]) -> None:
        with self.lock:
            at = round(time.monotonic() - self.began, 1)
            self.lines.add(row.part, row.name, **found, at=at)
            deliver(self.place.out, self.out)

    def left(self, part: str) -> list[Row]:
        """The rows of a part that are to be measured."""
        return [
            row
            for row in self.rows[part]
            if re.search(self.only, row.name) and not self.lines.has(row.part, row.name)
        ]

    # -- the parts ---------------------------------------------------------------------------

    def side_by_side(self, part: str, seconds: float) -> None:
        """Rows that need no device of their own: no new one begins after so many seconds."""
        todo: queue.SimpleQueue[Row] = queue.SimpleQueue()
        for row in self.left(part):
            todo.put(row)
        end = min(self.began + seconds, self.end - ENDING)
        count = min(BESIDE, max(1, (os.cpu_count() or 1) * 3 // 4), todo.qsize())
        workers = [self._worker(f"{part}-{number}") for number in range(count)]
        threads = [
            threading.Thread(target=self._take, args=(worker, todo, end)) for worker in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take(self, worker: Worker, todo: queue.SimpleQueue[Row], end: float) -> None:
        while time.monotonic() < end:
            try:
                row = todo.get_nowait()
            except queue.Empty:
                break
            self._add(row, worker.measure(row, self._limit(row)))
        worker.end()

    def _limit(self, row: Row) -> float:
        limit = row.limit if self.place.large else REHEARSED
        return max(1.0, min(limit, self.end - time.monotonic()))

    def alone(self, part: str) -> None:
        """One row after the other, each with the device to itself."""
        for row in self.left(part):
            if time.monotonic() + row.seconds + ENDING < self.end:
                worker = self._worker("graphs") if row.fresh else self.first
                self._add(row, worker.measure(row, self._limit(row)))

    def setting(self) -> None:
        """Runs in their order until the slice ends; the ones in progress end with their unit."""
        todo: queue.SimpleQueue[Row] = queue.SimpleQueue()
        for row in self.left("setting"):
            todo.put(row)
        second = [self._worker("beside")] if self._beside() else []
        workers = [self.first, *second][: todo.qsize()]
        threads = [threading.Thread(target=self._train, args=(w, todo)) for w in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = [row.name for row in self.rows["setting"]]
        self._add(Row("setting-summary", "means", 0), setting.summary(self.lines, names))

    def _beside(self) -> bool:
        """Do two runs at once use a device that one leaves idle?"""
        row = self.lines.find("graphs", "powersgd 2 as graphs, bfloat16") or {}
        return row.get("busy", 1.0) < SATURATED

    def _train(self, worker: Worker, todo: queue.SimpleQueue[Row]) -> None:
        stop = self.end - ENDING
        while time.monotonic() < stop - 5:
            try:
                row = todo.get_nowait()
            except queue.Empty:
                return
            alarm = threading.Timer(stop - time.monotonic(), worker.terminate)
            alarm.start()
            found = worker.measure(row, self.end - time.monotonic())
            alarm.cancel()
            self._add(row, found)
            if found.get("unfinished"):
                return

    def failures(self, part: str) -> list[str]:
        """The rows of this part that have ended badly, and not well since."""
        names = dict.fromkeys(row["name"] for row in self.lines.rows if row["part"] == part)
        return [name for name in names if not self.lines.has(part, name)]

    def close(self) -> int:
        """End all processes; the size of the archive in bytes."""
        for worker in self.workers:
            worker.end()
        return deliver(self.place.out, self.out, checks=bool(self.failures("correct")))
