"""Where faults are injected: folders to train in, the undisturbed runs, and moments to strike."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from signal import SIGTERM

from benchmarks.trainers import Training, epochs_of, same
from regimes.base.config import override
from regimes.presets import get_preset

EPOCHS = 6
STEPS = 3  # per epoch
Outcome = tuple[str, int] | None  # what came of it, epochs lost; None: the fault missed
CONFIG = override(
    get_preset("smoke"),
    [
        f"epochs={EPOCHS}",
        "data.train_size=120",
        "data.test_size=100",
        "optimizer.decay_epochs=[4]",
        "policy.interval=1",
        "timeout=15",
        "bucket_mb=0.02",
    ],
)


class Bench:
    """Folders to train in, and an undisturbed run for each number of processes."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.config = CONFIG
        self.scratch, self.draw, self.number = scratch, random.Random(seed), itertools.count()
        self.whole: dict[int, Path] = {}
        self.seconds: dict[int, float] = {}
        Training([CONFIG], self.folder()).ends()  # the first one waits for the server to import
        for count in (1, 2, 4):
            start, out = time.monotonic(), self.folder()
            ends = Training([CONFIG] * count, out).ends()
            assert all(end.code == 0 for end in ends), ends
            self.whole[count], self.seconds[count] = out, time.monotonic() - start

    def folder(self) -> Path:
        return self.scratch / f"run-{next(self.number)}"

    def strike(self, run: Training, first: int = 0) -> None:
        """Let a run go on to a random moment: some epochs, ``first`` at least, and a part of one.
        (What starts it takes about as long as two.)"""
        count, epochs = len(run.group), self.draw.randrange(first, EPOCHS)
        run.reached(epochs)
        part = self.seconds[count] / (EPOCHS + 2) * (1 if epochs else 2)
        time.sleep(self.draw.uniform(0, part))

    def continued(self, out: Path, count: int, before: str) -> Outcome:
        """Continue the run that a fault has ended; ``before`` is what was seen so far."""
        lines = lines_of(out)
        ends = Training([CONFIG] * count, out).ends()
        lost = count_lost(lines, lines_of(out))
        if any(end.code != 0 for end in ends):
            return f"{before}, NOT resumed: {ends[0].said or ends[0].code}", lost
        equal = same(out, self.whole[count])
        return f"{before}, resumed to {'the same bytes' if equal else 'OTHER BYTES'}", lost

    def stopped(self) -> Path:
        """A run of one process that was asked to end after some epochs."""
        while True:
            out = self.folder()
            run = Training([CONFIG], out)
            run.reached(self.draw.randrange(2, EPOCHS - 1))
            run.send(SIGTERM)
            run.ends()
            if 2 <= len(epochs_of(out)) < EPOCHS:
                return out


def lines_of(out: Path) -> list[bytes]:
    file = out / "epochs.jsonl"
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def count_lost(before: list[bytes], after: list[bytes]) -> int:
    """How many lines of a record it no longer has, at their place and in the same bytes."""
    left = sum(was == now for was, now in zip(before, after, strict=False))
    return len(before) - left
