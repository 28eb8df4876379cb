"""Part 3: a rank that falls with the rate, at 14 and 93 times the parameters of committed runs.

The arms of ``analysis/grids/arms/ladder.toml`` on the standard library's source, as `lm-small`
trains it (600 steps). Each arm's rate is chosen on text held out, by one seed; the result has
others. The runs are small, so several share the device side by side. A queue that is continued: a
set of runs is started only if it will end within the slice.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Lines
from benchmarks.gpu.place import ROOT, Place, rows
from regimes.config import ModelConfig, RunConfig, override
from regimes.launch import sweep, tune
from regimes.presets import get_preset

ARMS = tomllib.loads((ROOT / "analysis/grids/arms/ladder.toml").read_text())["schedules"]
NETWORKS = {  # the committed runs have 115 k, 460 k and 1.8 M
    "1800k": ModelConfig(name="gpt", width=256, depth=2, heads=4),
    "10700k": ModelConfig(name="gpt", width=384, depth=6, heads=6),
}
RATES = (0.0015, 0.0021, 0.003, 0.0042, 0.006)  # at a width of 64; others by the root of the width
CHOOSING, SEEDS = (1000,), range(9000, 9003)
JOBS = 8  # side by side


class SliceOver(Exception):
    """The next runs would not end in time."""


@dataclass
class Slice:
    """Runs cells, ``jobs`` side by side, until ``end``, a time of ``time.monotonic``."""

    end: float
    jobs: int
    longest: float = 0.0  # seconds of a set of runs so far

    def run(
        self,
        todo: list[tuple[Path, RunConfig]],
        jobs: int,
        progress: Callable[[Path, str | None], None],
    ) -> None:
        """As `sweep.ablate`.

        Raises:
            SliceOver: what is left is for the next slice.
        """
        for first in range(0, len(todo), self.jobs):
            began = time.monotonic()
            if began + 1.1 * self.longest > self.end:
                raise SliceOver
            sweep.ablate(todo[first : first + self.jobs], self.jobs, progress)
            self.longest = max(self.longest, time.monotonic() - began)


def base(place: Place, size: str) -> dict[str, RunConfig]:
    """The arms, with validation data; small enough to rehearse where there is no GPU."""
    words = ["levels={r3=3, r2=2, r1=1}", "data.validation_size=16385", "checkpoint_every=100"]
    common = replace(get_preset("lm-small"), model=NETWORKS[size])
    if not place.large:
        words[1:2] = [
            "data={name='synthetic-text', sequence=8, windows='contiguous', train_size=1537}",
            "data.test_size=129",
            "data.validation_size=129",
            "model={name='gpt', width=8, depth=1, heads=2}",
            "batch_size=2",
            "unit_steps=1",
            "optimizer.warmup_steps=2",
            "optimizer.decay_steps=[14, 19]",
        ]
    common = override(common, [*words, f"device={place.device}"])
    return {
        name: replace(common, name=name, policy=table["policy"]) for name, table in ARMS.items()
    }


def rates(size: str) -> list[str]:
    width = NETWORKS[size].width or 64
    return [f"{rate * (64 / width) ** 0.5:.2g}" for rate in RATES]


def study(place: Place, lines: Lines, end: float) -> None:
    """As much as a slice holds; each run that has ended is a line.

    Raises:
        SliceOver: there is more to do.
    """
    this = Slice(end, JOBS if place.large else 1)
    for size in NETWORKS:
        cells, folder = base(place, size), place.out / "study" / size
        found = tune.tune(
            cells,
            {"optimizer.lr": rates(size)[:: 1 if place.large else 4]},
            CHOOSING,
            folder / "tune",
            run=this.run,
            progress=partial(_told, lines, folder, "tuning"),
        )
        todo = []
        for seed in SEEDS:
            for name, config in cells.items():
                chosen = found.chosen[name].config.optimizer
                made = replace(config, optimizer=chosen, seed=seed, tuned_on=CHOOSING)
                todo.append((folder / name / f"seed-{seed}", made))
        left = [cell for cell in todo if not sweep.done(*cell)]
        this.run(left, 1, partial(_told, lines, folder, "study"))


def _told(lines: Lines, top: Path, part: str, folder: Path, error: str | None) -> None:
    what: dict[str, Any] = {"ok": error is None}
    if error:
        what["detail"] = error
    else:
        last = rows(folder)[-3:]
        what["metric"] = sum(row["metric"] for row in last) / len(last)
        what["floats"] = sum(row["floats"] for row in rows(folder))
    lines.add(part, f"{top.name}/{folder.relative_to(top)}", **what)
