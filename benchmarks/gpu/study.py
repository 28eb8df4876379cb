"""Part 3: schedules of a ResNet-18 and of a VGG-19, which has no skip connections, on CIFAR-10.

The paper's setting (Table 7) in 30 of its 300 epochs. Each arm's rate is chosen on 5,000 images
held out, by one seed in a third of the epochs; the result has other seeds. A queue that is
continued: a run is started only if it will end within the slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Lines
from benchmarks.gpu.place import Place, rows
from regimes.config import RunConfig, override
from regimes.launch import sweep, tune
from regimes.presets import get_preset
from regimes.presets.families import schedules, shortened

NETWORKS = ("resnet18-cifar10", "vgg19bn-cifar10")
ARMS = ("dense", "low", "high", "accordion", "low-early", "low-late")
RATES = ["0.05", "0.1", "0.2", "0.4"]
CHOOSING, SEEDS = (1000,), range(3)


class SliceOver(Exception):
    """The next run would not end in time."""


@dataclass
class Slice:
    """Runs cells one after the other until ``end``, a time of ``time.monotonic``."""

    end: float
    longest: float = 0.0  # seconds per epoch of training so far

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
        for folder, config in todo:
            began = time.monotonic()
            if began + 1.1 * self.longest * config.epochs > self.end:
                raise SliceOver
            error = sweep.run_cell(folder, config)
            self.longest = max(self.longest, (time.monotonic() - began) / config.epochs)
            progress(folder, error)


def base(place: Place, model: str) -> dict[str, RunConfig]:
    """The arms, with validation data; small enough to rehearse where there is no GPU."""
    words = [
        f"device={place.device}",
        "precision=bfloat16",
        "channels_last=true",
        "checkpoint_every=10",
    ]
    if place.gpu:
        words += ["data.name=folder", f"data.path={place.data}", "data.validation_size=5000"]
    else:
        words += [
            "data.name=digits",
            "data.augment=false",
            "data.validation_size=60",
            "data.train_size=128",
            "data.test_size=60",
            "model.name=vgg7",
            "model.width=4",
            "batch_size=16",
        ]
    windows = [(0, 20), (152, 162)]  # the first epochs, and after the first decay
    grid = schedules(get_preset(f"paper-{model}"), windows, late=(152, 172), interval=10)
    share = 0.1 if place.gpu else 0.02
    return {name: shortened(override(grid[name], words), share) for name in ARMS}


def study(place: Place, lines: Lines, end: float) -> None:
    """As much as a slice holds; each run that has ended is a line.

    Raises:
        SliceOver: there is more to do.
    """
    this = Slice(end)
    for model in NETWORKS:
        cells, folder = base(place, model), place.out / "study" / model
        thirds = {name: shortened(config, 1 / 3) for name, config in cells.items()}
        found = tune.tune(
            thirds,
            {"optimizer.lr": RATES},
            CHOOSING,
            folder / "tune",
            run=this.run,
            progress=partial(_told, lines, folder, "tuning"),
        )
        rates = {name: trial.config.optimizer for name, trial in found.chosen.items()}
        todo = []
        for seed in SEEDS:
            for name, config in cells.items():
                o = replace(
                    config.optimizer, lr=rates[name].lr, warmup_from=rates[name].warmup_from
                )
                made = replace(config, optimizer=o, seed=seed, tuned_on=CHOOSING)
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
