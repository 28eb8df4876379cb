"""Presets and grids that installed packages offer: TOML files in a folder of theirs.

A package names the folder, as a package of its own, by an entry point ::

    [project.entry-points."regimes.grids"]
    mine = "package.grids"

Each ``NAME.toml`` there is a grid (`own`), each ``presets/NAME.toml`` a preset: such a file
without schedules. A name that the toolkit has already stands for the toolkit's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from regimes.config import RunConfig
from regimes.presets import own
from regimes.presets.registry import GRIDS, PRESETS, Grid

GROUP = "regimes.grids"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OfferedFile:
    """Gives what a file describes when it is called, as the toolkit's own functions do."""

    path: str
    read: Callable[[str, own.Presets], Grid | RunConfig]
    preset: own.Presets

    def __call__(self) -> Grid | RunConfig:
        return self.read(self.path, self.preset)


def register(preset: own.Presets) -> None:
    """Add what packages offer to the names that are known; ``preset`` finds a file's base."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            spec = find_spec(point.value)
        except (ImportError, ValueError) as error:
            logger.warning("the grids of %s cannot be found: %s", point.value, error)
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob("*.toml")):
                GRIDS.setdefault(path.stem, OfferedFile(str(path), own.read_grid, preset))
            for path in sorted(Path(folder, "presets").glob("*.toml")):
                PRESETS.setdefault(path.stem, OfferedFile(str(path), own.read_preset, preset))
