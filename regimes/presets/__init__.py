"""Named experiments: configurations, and grids of them (ablations).

A preset is a diff from the defaults; its docstring says the command, the machine and the minutes.
A grid is a family of schedules of one preset: ``{schedule: configuration}``; every seed of a grid
is a run of its own. ``families`` makes grids from a preset, ``cpu`` and ``paper`` are those of the
two scales.
"""

from __future__ import annotations

from typing import Any

from regimes.config import RunConfig, to_dict
from regimes.errors import ConfigError, nearest
from regimes.presets import cpu, paper, questions
from regimes.presets.families import Grid, schedules
from regimes.presets.registry import GRIDS, PRESETS, grid, preset

__all__ = [
    "GRIDS", "PRESETS", "Grid", "check_common", "cpu", "get_grid", "get_preset", "grid", "paper",
    "preset", "questions", "schedules",
]  # fmt: skip


def get_preset(name: str) -> RunConfig:
    """A preset, or ConfigError with the nearest name. ``GRID/SCHEDULE`` names a cell of a grid."""
    if name in PRESETS:
        return PRESETS[name]()
    grid_name, slash, schedule = name.partition("/")
    if slash and grid_name in GRIDS:
        cells = GRIDS[grid_name]()
        if schedule in cells:
            return cells[schedule]
        raise ConfigError(
            f"grid {grid_name!r} has no schedule {schedule!r}: {nearest(schedule, cells)}"
        )
    raise ConfigError(f"unknown preset {name!r}: {nearest(name, PRESETS)}")


def get_grid(name: str) -> Grid:
    """A grid, or ConfigError with the nearest name."""
    if name not in GRIDS:
        raise ConfigError(f"unknown grid {name!r}: {nearest(name, GRIDS)}")
    return GRIDS[name]()


def check_common(grid: Grid, settings: tuple[str, ...]) -> None:
    """Raise ConfigError if a setting would overwrite what tells a grid's schedules apart."""
    for setting in settings:
        path = setting.partition("=")[0].strip().split(".")
        values = {name: _at(to_dict(cell), path) for name, cell in grid.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise ConfigError(
                f"--set {setting}: the schedules {', '.join(values)} differ in {'.'.join(path)}; "
                "choose those it is meant for with --schedules"
            )


def _at(table: Any, path: list[str]) -> Any:
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table
