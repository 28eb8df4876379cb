"""Replicas of torchft as processes of this machine: started, killed, and started again.

Processes are forked from one that has torch and torchft imported, so that a replica is back within
a second. Each writes a line after each synchronisation: step, quorum, replicas, fingerprint.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from regimes.collectives.agreement import fingerprint
from regimes.records import provenance

LIMIT = timedelta(seconds=20)  # of a collective, and of torchft's calls
HEARTBEAT = 2000  # milliseconds without a sign after which the lighthouse counts a replica as dead


@dataclass
class Lighthouse:
    """The process that says which replicas take part."""

    process: int
    address: str

    def kill(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        self.process = 0


@contextmanager
def lighthouse(log: Path, least: int = 1) -> Iterator[Lighthouse]:
    """A lighthouse that waits two seconds for a replica that is alive and not there yet.

    Forked like the replicas: its command imports torch first.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    if (child := os.fork()) == 0:
        try:
            _shine(log, least, port)
        finally:
            os._exit(1)
    one = Lighthouse(child, f"http://localhost:{port}")
    try:
        yield one
    finally:
        one.kill()


def _shine(log: Path, least: int, port: int) -> None:
    from torchft.coordination import LighthouseServer

    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    server = LighthouseServer(
        bind=f"[::]:{port}",
        min_replicas=least,
        join_timeout_ms=2000,
        heartbeat_timeout_ms=HEARTBEAT,
    )
    while server.address():
        time.sleep(60)


def preload() -> None:
    """Import what a replica needs before replicas are forked: else each would take 20 seconds."""
    import torchft

    import regimes

    _ = torchft.Optimizer, regimes.attach, regimes.local_steps
    for module in ("regimes.records", "torchft.local_sgd", "sklearn.datasets", "pandas"):
        importlib.import_module(module)
    provenance.code_digest()


def manager_of(address: str, name: str, patience: float = 600) -> Any:
    """The manager of this process's replica.

    Args:
        patience: seconds that it waits for a quorum. A survivor that ends takes the state with
            it, so this must be longer than a replica takes to start.
    """
    from torchft import Manager, ProcessGroupGloo

    for logger in ("torchft", "torchft.manager"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=timedelta(seconds=patience),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=name,
    )


class Notes:
    """The lines that one life of a replica writes."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def add(self, **values: Any) -> None:
        self.file.write(json.dumps({"time": time.time(), **values}) + "\n")

    def synced(self, manager: Any, model: torch.nn.Module, job: Any, **more: Any) -> None:
        """All replicas of a quorum are the same now.

        Args:
            job: the hook, or local steps.
        """
        state = [p.detach() for p in model.parameters()]
        self.add(
            step=manager.current_step(),
            quorum=" ".join(sorted(job.world.quorum.members)),
            replicas=manager.num_participants(),
            fingerprint=fingerprint(state),
            **more,
        )


def read_notes(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that a kill may have cut short."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class Fleet:
    """Replicas by name, each with the lives it has had.

    Args:
        life: what a replica does, from its name and notes on to its end.
    """

    def __init__(self, out: Path, life: Callable[[str, Notes], None]) -> None:
        self.out, self.life = out, life
        self.alive: dict[str, int] = {}
        self.lives: dict[str, int] = {}

    def start(self, name: str) -> None:
        number = self.lives[name] = self.lives.get(name, 0) + 1
        if (child := os.fork()) == 0:
            self._live(name, number)
        self.alive[name] = child

    def _live(self, name: str, number: int) -> None:
        code = 1
        try:
            with (self.out / f"{name}-{number}.log").open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            notes = Notes(self.out / f"{name}-{number}.jsonl")
            notes.add(born=number)
            try:
                self.life(name, notes)
                code = 0
            except BaseException as error:
                notes.add(error=f"{type(error).__name__}: {error}")
                traceback.print_exc()
                sys.last_value = error
                atexit._run_exitfuncs()  # the end of the record, as a script that ends by itself
        finally:
            os._exit(code)  # without the parent's cleaning up

    def kill(self, name: str) -> None:
        os.kill(child := self.alive.pop(name), signal.SIGKILL)
        os.waitpid(child, 0)

    def ended(self) -> dict[str, int]:
        """Replicas that have ended by themselves since the last call, with their codes."""
        codes = {}
        for name, child in list(self.alive.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[name] = os.waitstatus_to_exitcode(status)
                del self.alive[name]
        return codes

    def join(self, seconds: float) -> dict[str, int]:
        """Wait for all, at most so long; kill those that are left."""
        codes, until = {}, time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            codes |= self.ended()
            time.sleep(0.05)
        for name in list(self.alive):
            self.kill(name)
            codes[name] = -9
        return codes

    def notes(self) -> list[dict[str, Any]]:
        """All lines of all lives, in order of time."""
        lines = []
        for name, count in self.lives.items():
            for number in range(1, count + 1):
                own = read_notes(self.out / f"{name}-{number}.jsonl")
                lines += [{"name": name, "life": number, **line} for line in own]
        return sorted(lines, key=lambda line: line["time"])
