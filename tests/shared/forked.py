"""Runs on one or several processes, forked from a server that has torch imported.

`regimes.search.processes` starts Python anew for each, which takes longer than most trainings of
the tests; `test_train` and `test_faults` try that launcher itself. What a process says at its end
is an exit code and, if it is an error of ours, a sentence.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regimes.base.config import RunConfig
from regimes.records import read_lines

PATIENCE = 90.0  # seconds until a training that does not end counts as hanging


def train(config: RunConfig, out: Path, count: int) -> None:
    """Run one configuration on ``count`` processes; continues what the folder has begun."""
    ends = Training([config] * count, out).ends()
    assert [end.code for end in ends] == [0] * count, ends


@dataclass(frozen=True)
class End:
    """How a process has ended: its exit code (negative: a signal's number), and its sentence or,
    without one, the last line that it wrote to standard error."""

    code: int | None  # None: it hung, and was killed
    said: str


class Training:
    """One run on one or several processes, continued if the folder holds it already."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        out: Path,
    ) -> None:
        """
        Args:
            configs: one per process.
        """
        self.out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.talk = Path(tempfile.mkdtemp())  # not beside the run, whose disk may be full
        resume = (out / "run.json").exists()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ddp_scripts.preload"])
        self.group = [
            context.Process(
                target=_train,
                args=(config, out, resume, rank, len(configs), self.talk),
            )
            for rank, config in enumerate(configs)
        ]
        for process in self.group:
            process.start()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.group)

    def reached(self, epochs: int) -> None:
        """Wait until so many epochs are recorded, or all have ended."""
        while self.alive() and len(read_lines(self.out / "epochs.jsonl")) < epochs:
            time.sleep(0.005)

    def send(self, number: int, rank: int | None = None) -> bool:
        """A signal to one process or all; False if it has ended before."""
        victims = self.group if rank is None else [self.group[rank]]
        for victim in victims:
            if victim.is_alive() and victim.pid is not None:
                os.kill(victim.pid, number)
            else:
                return False
        return True

    def ends(self) -> list[End]:
        """Wait for all; what hangs is killed."""
        deadline = time.monotonic() + PATIENCE
        found = []
        for rank, process in enumerate(self.group):
            while process.is_alive() and time.monotonic() < deadline:
                process.join(0.02)
            code = None if process.is_alive() else process.exitcode
            process.kill()
            process.join()
            found.append(End(code, self._said(rank) if code != 0 else ""))
        shutil.rmtree(self.talk, ignore_errors=True)
        return found

    def _said(self, rank: int) -> str:
        said, log = self.talk / str(rank), self.talk / f"stderr-{rank}"
        if said.exists():
            return said.read_text()
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else ""


def _train(
    config: RunConfig,
    out: Path,
    resume: bool,
    rank: int,
    count: int,
    talk: Path,
) -> None:
    import torch

    import regimes
    from regimes.base.errors import RegimesError

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        GLOO_SOCKET_IFNAME="lo",
        REGIMES_RENDEZVOUS=(talk / "meet").as_uri(),
    )
    os.dup2(os.open(talk / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    try:
        regimes.run(config, out, resume=resume)
    except RegimesError as error:
        (talk / str(rank)).write_text(str(error))
        sys.exit(error.exit_code)
