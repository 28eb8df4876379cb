"""Part 3: the paper's setting, ResNet-18 on all of CIFAR-10, as long as the time allows.

The grid ``paper-cifar10-short``, seed by seed; within a seed first the schedules of 20 epochs, then
ranks 2 and 1 at three rates. A run that the time cuts off is continued in the next call; a
seed counts once its schedules have all ended, so that any stop is balanced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import regimes
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.place import Place, rows, task
from regimes.base.config import RunConfig, override
from regimes.presets import get_grid
from regimes.search import sweep

GRID = "paper-cifar10-short"
SEEDS = (1, 2, 3)
PREDICTION = (
    "20 epochs at a rate of 0.4: rank 1 ends below rank 4, ACCORDION within 0.3 points of rank 4; "
    "12 epochs: the gap between ranks 2 and 1 at 0.4 exceeds that at each rank's best rate by 0.5 "
    "points; refuted below 0.2"
)
SMALL = [  # to rehearse
    *("model.name=vgg7", "model.width=4", "batch_size=4", "graphs=none"),
    *("epochs=3", "optimizer.warmup_epochs=1", "optimizer.decay_epochs=[2]"),
]


def grid(place: Place) -> dict[str, RunConfig]:
    """The schedules, on this device and its data."""
    words = [f"device={place.device}", "data.name=folder", "data.path=images"]
    words += [] if place.large else SMALL
    cells = {name: override(cell, words) for name, cell in get_grid(GRID).items()}
    if place.large:
        return cells
    return {name: cells[name] for name in ("rank 4", "accordion 4-1")}


def queue(place: Place) -> list[tuple[str, RunConfig]]:
    """All runs, in order: "SCHEDULE/seed-SEED" and its configuration."""
    cells, seeds = grid(place), SEEDS if place.large else SEEDS[:1]
    return [
        (f"{name}/seed-{seed}", replace(cell, seed=seed))
        for seed in seeds
        for name, cell in cells.items()
    ]


def folder_of(place: Place, name: str) -> Path:
    return place.out / "setting" / GRID / name


def train(place: Place, name: str, config: RunConfig) -> dict[str, Any]:
    """One run, or the rest of one; its result, the mean of the last three evaluations."""
    folder = folder_of(place, name)
    data = task(place, 200, 32)
    if not sweep.is_finished(folder, config):
        regimes.run(config, folder, resume=(folder / "run.json").exists(), task=data)
    found = rows(folder)
    known = [row["metric"] for row in found if row["metric"] is not None][-3:]
    return {
        "metric": sum(known) / len(known),
        "floats": sum(row["floats"] for row in found),
        "epochs": len(found),
    }


def measures(place: Place) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        name: lambda n=name, c=config: train(place, n, c)  # type: ignore[misc]
        for name, config in queue(place)
    }


def summary(lines: Lines, names: Sequence[str]) -> dict[str, Any]:
    """The mean metric by schedule over the seeds that have all schedules."""
    done = {
        row["name"]: row["metric"] for row in lines.rows if row["part"] == "setting" and row["ok"]
    }
    schedules = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
    seeds = [s for s in SEEDS if all(f"{name}/seed-{s}" in done for name in schedules)]
    means = {
        name: round(sum(done[f"{name}/seed-{s}"] for s in seeds) / len(seeds), 5)
        for name in schedules
        if seeds
    }
    return {"seeds": seeds, **means}
