"""The branches that one schedule of a grid's file stands for (`own`). No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regimes.base.config import BranchConfig, RunConfig, override_table
from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest, unexpected_value
from regimes.presets.registry import Grid

KEYS = ("of", "at", "length", "skip")  # of the table; see `BranchConfig`
FROM = " from "  # between a schedule's name and the first unit of a branch, in the name of a cell
OF_TRUNK = ("base", "rate", "rates", "statistics")  # keys that its schedule cannot have


def branches_of(
    where: str,
    name: str,
    changes: Mapping[str, Any],
    cells: Grid,
    of_schedule: Mapping[str, Sequence[str]],
) -> list[RunConfig]:
    """Make a cell for each unit of ``changes["branch"]``, and for each rate of the trunk.

    Args:
        where: the schedule, in errors.
        cells: of the file so far.
        of_schedule: the names of the cells of each schedule, one for each rate.

    Raises:
        ConfigError: a table or key that is none, no such trunk, a wrong value.
    """
    table, units = changes["branch"], _units(where, changes["branch"])
    for key in OF_TRUNK:
        expected = "no such key: a branch has its trunk's"
        require(key not in changes, f"{where}.{key}", changes.get(key), expected)
    of, fields = table["of"], {k: v for k, v in changes.items() if k != "branch"}
    trunks = of_schedule.get(of) or [of] * (of in cells)  # else one cell, such as "low at 0.1"
    if not trunks:
        raise ConfigError(f"{where}.branch.of = {of!r}: {suggest_nearest(of, cells)}")
    branches: list[RunConfig] = []
    for trunk in trunks:
        for unit in units:
            own = f"{name}{FROM}{unit}{trunk.removeprefix(of)}"  # which leaves " at RATE", if any
            branch = BranchConfig(trunk, unit, table.get("length"), table.get("skip"))
            base = replace(cells[trunk], name=own, role=None, branch=None)
            try:
                branches.append(replace(override_table(base, fields), branch=branch))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
    return branches


def _units(where: str, table: Any) -> list[Any]:
    """The first units of a schedule's branches."""
    if not isinstance(table, Mapping):
        raise unexpected_value(f"{where}.branch", table, 'a table like {of = "low", at = [0, 3]}')
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{where}.branch: unknown key {key!r}: {suggest_nearest(key, KEYS)}")
    given, length = table.get("at"), table.get("length")
    units = given if isinstance(given, list) else [given]
    good = (
        bool(units) and all(is_integer(unit, 0) for unit in units) and len({*units}) == len(units)
    )
    require(good, f"{where}.branch.at", given, "a unit, or a list of different ones")
    require(length is None or is_integer(length, 1), f"{where}.branch.length", length, "at least 1")
    skip = table.get("skip")
    require(skip is None or skip is True, f"{where}.branch.skip", skip, "true, or no such key")
    require(isinstance(table.get("of"), str), f"{where}.branch.of", table.get("of"), "a schedule")
    return units
