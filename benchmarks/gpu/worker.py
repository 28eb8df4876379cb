"""Rows are measured in processes of their own: one that fails, hangs or leaves a device in disorder
costs a row."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.place import Place, archived, end_group
from regimes.search.processes import die_with_parent

START = 120.0  # seconds that a process may take to import everything, and to decode the images
FIRST = "alone"  # the process that has the device to itself, and the images


@dataclass(frozen=True)
class Row:
    """Attributes:
    part, name: of the line.
    seconds: that it will take, as planned; it ends after ``limit``.
    fresh: in a process that nothing else has used, nor will.
    """

    part: str
    name: str
    seconds: float
    fresh: bool = False

    @property
    def limit(self) -> float:
        return max(3 * self.seconds, 60.0)


class Worker:
    """A process that measures one row after the other."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        self.process: Any = None

    def start(self) -> None:
        """Begin the process, if none is there; it imports everything meanwhile."""
        if self.process is None or not self.process.is_alive():
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(
                target=serve, args=(theirs, self.place, self.name, os.getpid())
            )
            self.process.start()
            theirs.close()
            self.ready = False

    def measure(self, row: Row, limit: float | None = None) -> dict[str, Any]:
        """A row's content; an error, or the end of its time, is one too."""
        if row.fresh:
            self.end()
        self.start()
        began = time.monotonic()
        found = self._answer((row.part, row.name), limit or row.limit)
        if row.fresh:
            self.end()
        return {**found, "seconds": round(time.monotonic() - began, 2)}

    def _answer(self, question: tuple[str, str], limit: float) -> dict[str, Any]:
        try:
            if not self.ready and not self.connection.poll(START):
                raise EOFError
            if not self.ready:
                self.connection.recv()
                self.ready = True
            self.connection.send(question)
            if self.connection.poll(limit):
                found: dict[str, Any] = self.connection.recv()
                return found
            why = f"still at work after {limit:g} s"
        except (EOFError, OSError):
            self.process.join(1)
            why = f"its process ended with code {self.process.exitcode}"
        self.end()
        return {"ok": False, "detail": why}

    def terminate(self) -> None:
        """SIGTERM: a run ends after its unit."""
        if self.process is not None and self.process.is_alive():
            self.process.terminate()

    def end(self) -> None:
        """End the process with all that it has started."""
        if self.process is not None:
            if self.process.is_alive():
                end_group(self.process.pid)
            self.process.join()
            self.connection.close()
            self.process = None


def serve(connection: Connection, place: Place, name: str, parent: int) -> None:
    """The process: measures what it is sent, until the other side closes."""
    os.setsid()
    die_with_parent(parent)
    log = place.out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    said = log.open("a", buffering=1)
    os.dup2(said.fileno(), sys.stdout.fileno())
    os.dup2(said.fileno(), sys.stderr.fileno())
    import torch

    from benchmarks.gpu.catalogue import measures  # after the redirection: imports may speak

    if name != FIRST:
        torch.set_num_threads(1)  # several of these share the cores
    found = measures(place)
    if place.images and name == FIRST:
        archived(place.images)
    connection.send("ready")
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        print(f"-- {question}", flush=True)
        connection.send(outcome(found[question], place))


def outcome(measure: Any, place: Place) -> dict[str, Any]:
    """A row's content; an error is one, too."""
    import torch

    from regimes.job.termination import Terminated

    try:
        return {"ok": True, **measure()}
    except Terminated as ended:
        return {"ok": False, "unfinished": True, "detail": str(ended)}
    except Exception as error:
        traceback.print_exc()
        said = (str(error).splitlines() or [""])[0]
        return {"ok": False, "detail": f"{type(error).__name__}: {said}"[:400]}
    finally:
        gc.collect()
        if place.gpu and torch.cuda.is_available():
            torch.cuda.empty_cache()
