"""Named experiments: configurations, and grids of them (ablations).

This room uses policies and base; plotting, search and cli use it. A preset is a diff from the
defaults; its docstring says the command, the machine and the minutes.
A grid is a family of schedules of one preset: ``{schedule: configuration}``; every seed of a grid
is a run of its own. ``families`` makes grids from a preset, ``cpu`` has presets of minutes on two
cores, ``language`` has language models on a text that is everywhere. ``own`` reads TOML files, also
those that installed packages offer: the study's, the paper's scale included, are among them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regimes.base.config import Registry, RunConfig, load_toml, override, to_dict
from regimes.base.config.arguments import check_arguments
from regimes.base.config.toml import split_path
from regimes.base.errors import ConfigError, require, suggest_nearest
from regimes.policies import make_policy
from regimes.presets import cpu, language, own
from regimes.presets.families import figure2_schedules
from regimes.presets.registry import GRIDS, PRESETS, Grid, grid, list_groups, preset

__all__ = [
    "GRIDS",
    "PRESETS",
    "Grid",
    "check_common",
    "cpu",
    "figure2_schedules",
    "get_grid",
    "get_preset",
    "grid",
    "language",
    "list_groups",
    "number_seeds",
    "own",
    "preset",
    "read_configuration",
    "seeds_of",
    "select_arms",
    "select_schedules",
]


@check_arguments()
def get_preset(name: str) -> RunConfig:
    """Gives the configuration of a preset.

    >>> get_preset("smoke").workers
    4

    Args:
        name: The name of a preset, or ``GRID/SCHEDULE`` for one schedule of a grid.

    Raises:
        ConfigError: there is no such preset; the error names the nearest one.
    """
    grid_name, slash, schedule = name.partition("/")
    if name in PRESETS or not slash or grid_name not in GRIDS:
        _check_file(name, PRESETS)
        return PRESETS.find(name)()
    cells = get_grid(grid_name)
    if schedule not in cells:
        raise ConfigError(
            f"grid {grid_name!r} has no schedule {schedule!r}: {suggest_nearest(schedule, cells)}"
        )
    return cells[schedule]


@check_arguments()
def get_grid(name: str) -> Grid:
    """Gives the configurations of a grid, by the names of its schedules.

    >>> list(get_grid("smoke"))[:3]
    ['dense', 'low', 'high']

    Args:
        name: The name of a grid; the path of a TOML file with a grid of your own; or a folder of
            configurations, one for each schedule. In a folder that ``regimes tune`` wrote they have
            the order of their grid, and otherwise the order of their names.

    Raises:
        ConfigError: there is no such grid; the error names the nearest one.
    """
    if own.is_file(name):
        return own.read_grid(name, get_preset)
    if name not in GRIDS and Path(name).is_dir():
        files = sorted(Path(name).glob("*.toml"))
        if not files:
            raise ConfigError(f"{name} has no configuration: expected files *.toml in it")
        order = _tuned_order(Path(name).parent / "tune.json")
        files.sort(key=lambda file: order.get(file.stem, len(order)))  # the others by name
        return {file.stem: load_toml(file) for file in files}
    _check_file(name, GRIDS)
    return GRIDS.find(name)()


def read_configuration(name: str, settings: Sequence[str] = ()) -> RunConfig:
    """Read the configuration of a preset, of ``GRID/SCHEDULE`` or of a file ``*.toml``, and apply
    settings.

    Raises:
        ConfigError: as `get_preset`, `load_toml` and `override` do.
    """
    base = load_toml(name) if name.endswith(".toml") else get_preset(name)
    return override(base, list(settings))


def _tuned_order(path: Path) -> dict[str, int]:
    """The place of each schedule in what `regimes tune` has written; none without such a file."""
    try:
        chosen = json.loads(path.read_text(encoding="utf-8"))["chosen"]
        return {name: place for place, name in enumerate(chosen)}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _check_file(name: str, known: Registry) -> None:
    """Raise ConfigError if an unknown name looks like a file's."""
    if name not in known and (Path(name).suffix or Path(name).exists()):
        why = "is no file *.toml" if Path(name).exists() else "does not exist"
        raise ConfigError(f"no {known.kind} {name!r}, and a file of that name {why}")


def seeds_of(name: str) -> list[int] | None:
    """Read the seeds that a grid's file names; None if it names none, or is no file."""
    return own.read_seeds(name) if own.is_file(name) else None


def select_schedules(
    name: str, schedules: Sequence[str] = (), settings: Sequence[str] = ()
) -> Grid:
    """Select some schedules of a grid, default all, with settings for each of them.

    Raises:
        ConfigError: no such grid or schedule; a setting in which the schedules differ.
    """
    cells = get_grid(name)
    for schedule in schedules:
        if schedule not in cells:
            has = ", ".join(cells)
            raise ConfigError(f"grid {name!r} has no schedule {schedule!r}: it has {has}")
    chosen = {key: cell for key, cell in cells.items() if not schedules or key in schedules}
    check_common(chosen, settings)
    changed = {key: override(cell, list(settings)) for key, cell in chosen.items()}
    for cell in changed.values():
        for table in ("policy", "batch_policy", "sync_policy"):
            if getattr(cell, table) is not None:
                make_policy(getattr(cell, table), table)
    return changed


def select_arms(name: str, schedules: Sequence[str] = (), settings: Sequence[str] = ()) -> Grid:
    """Select the configurations that `regimes tune` tries: `select_schedules` of a grid, or that of
    one preset or GRID/SCHEDULE. A name of both a grid and a preset is the grid's, as for `ablate`.

    Raises:
        ConfigError: as `select_schedules` and `get_preset` do.
    """
    one = name in PRESETS or "/" in name
    if schedules or name in GRIDS or own.is_file(name) or Path(name).is_dir() or not one:
        return select_schedules(name, schedules, settings)
    return {name: read_configuration(name, settings)}


def number_seeds(count: int, first: int = 0) -> list[int]:
    """List ``count`` seeds from ``first`` on.

    Raises:
        ConfigError: the count is not between 1 and `own.MOST_SEEDS`.
    """
    require(1 <= count <= own.MOST_SEEDS, "--seeds", count, f"1 to {own.MOST_SEEDS}")
    return list(range(first, first + count))


def check_common(grid: Grid, settings: Sequence[str]) -> None:
    """Raise ConfigError if a setting would overwrite a field in which a grid's schedules differ."""
    for setting in settings:
        path = split_path(setting.partition("=")[0].strip())
        values = {name: _value_at(to_dict(cell), path) for name, cell in grid.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise ConfigError(
                f"--set {setting}: the schedules {', '.join(values)} differ in {'.'.join(path)}; "
                "choose with --schedules those to which the setting applies"
            )


def _value_at(table: Any, path: list[str]) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table


own.register_offered(get_preset)
