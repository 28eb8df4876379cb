"""Who else is told of a run's epochs, by name: TensorBoard, wandb, what other packages offer.

A package offers a reporter by an entry point ::

    [project.entry-points."regimes.reporters"]
    mine = "package.module:Class"

``Class(folder)`` is made for the run in that folder and called as ``training.watchers.Reporter``
says, on process 0. No torch here; what a name stands for is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from regimes.config import Registry

GROUP = "regimes.reporters"
OURS = {"tensorboard": "regimes.monitor.tensorboard:Scalars", "wandb": "regimes.monitor.wandb:Runs"}


def registry() -> Registry:
    """All names that are known."""
    theirs = {point.name: point.value for point in entry_points(group=GROUP)}
    return Registry("reporter", theirs | OURS)


def check_reporters(names: Sequence[str]) -> None:
    """Raise ConfigError unless all are known, or spelt ``package.module:Class``."""
    known = registry()
    for name in names:
        known.load(name)


def reporters(names: Sequence[str], folder: Path) -> list[Any]:
    """The reporters of these names, for the run in a folder.

    Raises:
        ConfigError: an unknown name; a package that one of them needs is missing.
    """
    known = registry()
    return [known.load(name)(Path(folder)) for name in names]
