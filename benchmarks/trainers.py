"""Trainings in forked processes that can be killed, stopped, spoilt and compared.

They are forked from a server that has torch imported, which takes a tenth of a second each, and
run ``regimes.run`` itself. What one says at its end is an exit code and, if it is an error of
ours, a sentence.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regimes.base.config import RunConfig
from regimes.records import read_lines

PATIENCE = 90.0  # seconds until a training that does not end counts as hanging
PRELOAD = (
    "regimes.training.loop",
    "sklearn.datasets",
    "pandas",
    "torch._dynamo",
    "benchmarks.trainers",
)
Spoil = Callable[[int], None]  # called in each process with its rank, before the run


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
        spoil: Spoil | None = None,
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
        context.set_forkserver_preload(list(PRELOAD))
        self.group = [
            context.Process(
                target=_train,
                args=(config, out, resume, rank, len(configs), self.talk, spoil),
            )
            for rank, config in enumerate(configs)
        ]
        for process in self.group:
            process.start()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.group)

    def reached(self, epochs: int) -> None:
        """Wait until so many epochs are recorded, or all have ended."""
        while self.alive() and len(epochs_of(self.out)) < epochs:
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
        """Wait for all; what hangs is killed. A process under SIGSTOP is not waited for."""
        deadline = time.monotonic() + PATIENCE
        found = []
        for rank, process in enumerate(self.group):
            while process.is_alive() and time.monotonic() < deadline and not _stopped(process.pid):
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


def _stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _train(
    config: RunConfig,
    out: Path,
    resume: bool,
    rank: int,
    count: int,
    talk: Path,
    spoil: Spoil | None,
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
        if spoil is not None:
            spoil(rank)
        regimes.run(config, out, resume=resume)
    except RegimesError as error:
        (talk / str(rank)).write_text(str(error))
        sys.exit(error.exit_code)


# -- what is done to them --------------------------------------------------------------------


@dataclass(frozen=True)
class Poison:
    """Worker ``rank`` has a loss of NaN in its ``step``-th forward pass."""

    rank: int
    step: int

    def __call__(self, rank: int) -> None:
        if rank == self.rank:
            _at(self.step, lambda loss: loss * float("nan"))


@dataclass(frozen=True)
class Delay:
    """Process ``rank`` sleeps before its ``step``-th forward pass."""

    rank: int
    step: int
    seconds: float

    def __call__(self, rank: int) -> None:
        if rank == self.rank:
            _at(self.step, lambda loss: (time.sleep(self.seconds), loss)[1])


@dataclass(frozen=True)
class OtherCode:
    """Process ``rank`` runs a changed source."""

    rank: int

    def __call__(self, rank: int) -> None:
        from regimes.records import provenance

        if rank == self.rank:
            provenance.code_digest = lambda: "another"


def _at(step: int, change: Callable[[Any], Any]) -> None:
    from regimes.data import classification

    original, calls = classification.classification_loss, [0]

    def changed(*args: Any) -> Any:
        calls[0] += 1
        loss = original(*args)
        return change(loss) if calls[0] == step + 1 else loss

    classification.classification_loss = changed


# -- what is left of them --------------------------------------------------------------------


def epochs_of(out: Path) -> list[dict[str, Any]]:
    """The whole lines of the record."""
    return read_lines(out / "epochs.jsonl")


def same(a: Path, b: Path) -> bool:
    """Equal bytes of ``epochs.jsonl``, equal bits of the final weights."""
    import torch

    from regimes.training import checkpoint

    if (a / "epochs.jsonl").read_bytes() != (b / "epochs.jsonl").read_bytes():
        return False
    found = [checkpoint.load(folder) for folder in (a, b)]
    if None in found:
        return False
    ours, theirs = (state["model"] for _, state in filter(None, found))
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def damage(file: Path, how: str, draw: random.Random) -> None:
    """Truncate a file at a random byte ("truncated"), or flip a random bit of it ("tampered")."""
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    if how == "truncated":
        del content[place:]
    else:
        content[place] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
