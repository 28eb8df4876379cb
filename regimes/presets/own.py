"""A grid of one's own from a TOML file: a base and what each schedule changes of it ::

    base = "smoke"                # a preset, GRID/SCHEDULE, or a table: a configuration written out
    seeds = 3                     # how many, or which: [7, 8, 9]
    set = ["epochs=12"]           # of all schedules, as on the command line

    [schedules.low]
    policy = {name = "static", level = "low"}

    [schedules.eager]
    policy.eta = 0.3              # of the base's policy
    optimizer.lr = 0.2

A schedule changes the keys that it names; "none" unsets one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regimes.config import RunConfig, from_dict, override, override_table
from regimes.config.toml import read_tables
from regimes.errors import ConfigError, is_whole, nearest, require, unexpected
from regimes.presets.registry import Grid

MOST_SEEDS = 10_000
KEYS = ("base", "seeds", "set", "schedules")
NAME = re.compile(r"[^/\\\x00-\x1f\x7f-\x9f]{1,100}")  # of a folder, wherever it is unpacked


def is_file(name: str) -> bool:
    """Is it the name of a grid's file, and not that of a grid or a folder?"""
    return name.endswith(".toml") and not Path(name).is_dir()


def read_grid(path: str, preset: Callable[[str], RunConfig]) -> Grid:
    """The schedules of a file.

    Args:
        preset: gives the configuration of that name.

    Raises:
        ConfigError: it cannot be read, or is one configuration; what a schedule says is unknown.
    """
    table = _table(path)
    base, cells = _base(path, table, preset), {}
    for name, changes in table["schedules"].items():
        good = NAME.fullmatch(name) and name not in (".", "..")
        require(bool(good), f"{path}: schedules", name, "a name for a folder among the records")
        if not isinstance(changes, Mapping):
            raise unexpected(f"{path}: schedules.{name}", changes, "a table of keys and values")
        try:
            cells[name] = override_table(replace(base, name=name), changes)
        except ConfigError as error:
            raise ConfigError(f"{path}: schedules.{name}: {error}") from None
    return cells


def read_seeds(path: str) -> list[int] | None:
    """The seeds of a file, if it names any."""
    given = _table(path).get("seeds")
    if given is None:
        return None
    few = is_whole(given, 1) and given <= MOST_SEEDS
    numbers = list(range(given)) if few else given
    whole = isinstance(numbers, list) and all(is_whole(number, 0) for number in numbers)
    if not whole or not numbers or len({*numbers}) < len(numbers):
        expected = f"a number of seeds up to {MOST_SEEDS}, or a list of different ones"
        raise unexpected(f"{path}: seeds", given, expected)
    return numbers


def _table(path: str) -> dict[str, Any]:
    try:
        table = read_tables(path)
    except FileNotFoundError:
        raise ConfigError(f"cannot read the grid {path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the grid {path}: {error}") from None
    if not isinstance(table.get("schedules"), Mapping) or not table["schedules"]:
        raise ConfigError(
            f"{path} is no grid: it needs a table [schedules.NAME] for each schedule, with what is "
            f"changed of its base; regimes run {path} trains one configuration"
        )
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}: {nearest(key, KEYS)}")
    return table


def _base(path: str, table: Mapping[str, Any], preset: Callable[[str], RunConfig]) -> RunConfig:
    given, settings = table.get("base", {}), table.get("set", [])
    if not isinstance(given, str | Mapping):
        raise unexpected(f"{path}: base", given, "the name of a preset, or a configuration")
    if not isinstance(settings, list) or not all(isinstance(s, str) for s in settings):
        raise unexpected(f"{path}: set", settings, 'a list like ["epochs=12"]')
    try:
        known = preset(given) if isinstance(given, str) else from_dict(RunConfig, given)
        return override(known, settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: base: {error}") from None
