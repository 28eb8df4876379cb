"""A grid from a TOML file: a base, and what each schedule changes of it ::

    base = "smoke"                # a preset, GRID/SCHEDULE, a file of a configuration (beside this
                                  # one), or a table: a configuration written out
    seeds = 3                     # how many, or which: [7, 8, 9]
    set = ["epochs=12"]           # of all schedules, as on the command line

    [schedules.low]
    policy = {name = "static", level = "low"}
    role = "low"                  # its part in figures, whatever its name

    [schedules.eager]
    policy.eta = 0.3              # of the base's policy
    optimizer.lr = 0.2

A schedule changes the keys that it names; "none" unsets one. What is measured, in all schedules or
in one, with the options that it needs ::

    statistics = ["eigenvalue", "eigenvalue:batch"]

Learning rates, with the start of the warm-up in proportion, and schedules of other files ::

    rates = [0.1, 0.2]            # each schedule at each rate: "low at 0.1", "low at 0.2", ...
    include = ["arms.toml"]       # files with schedules, which come first; paths from this file

    [schedules.low]
    base = "small/low"            # in place of the file's base; `set` applies to it as well
    rate = 0.05                   # at one rate, in place of the file's rates; the name is unchanged

A schedule that continues another one, its trunk, from a unit on; it has the keys of the trunk and
changes those that it names. Of several units there is a branch each: "pulse from 0", ... ::

    [schedules.pulse]
    branch = {of = "low", at = [0, 3, 6], length = 3}  # `length`: the trunk's keys return after it
    policy.level = "high"

`about` and `group` say in words what the grid is, for `regimes presets`.

An installed package offers a folder of such files, which is a package of its own, by an entry point
::

    [project.entry-points."regimes.grids"]
    mine = "package.grids"

Each ``NAME.toml`` there is a grid, each ``presets/NAME.toml`` a preset: a file without schedules.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regimes.base.config import RunConfig, from_dict, load_toml, override, override_table
from regimes.base.config.bounds import LARGEST
from regimes.base.config.convert import convert_value
from regimes.base.config.entry_points import entry_points
from regimes.base.config.toml import read_tables
from regimes.base.errors import ConfigError, is_integer, require, suggest_nearest, unexpected_value
from regimes.policies.detectors.statistics import with_statistics
from regimes.presets.branches import branches_of
from regimes.presets.families import at_rate
from regimes.presets.registry import GRIDS, PRESETS, Grid

logger = logging.getLogger(__name__)
GROUP = "regimes.grids"
MOST_SEEDS = 10_000  # of `seeds = 5`, a number of seeds: a larger one is meant as a seed
KEYS = (
    *("base", "seeds", "set", "statistics", "rate", "rates", "include", "schedules"),
    *("about", "group"),
)
# keys of a schedule that are no fields of a run
NOT_CONFIGURATION = ("base", "rate", "rates", "statistics")
AT = " at "  # between a schedule's name and its rate, in the name of a cell
NAME = re.compile(r"[^/\\\x00-\x1f\x7f-\x9f]{1,100}")  # of a folder, wherever it is unpacked
Presets = Callable[[str], RunConfig]  # the configuration of that name
Table = dict[str, Any]  # of TOML


def is_file(name: str) -> bool:
    """Answer whether it is the name of a TOML file, in place of a registered grid or a folder."""
    return name.endswith(".toml") and not Path(name).is_dir()


def read_grid(path: str, preset: Presets) -> Grid:
    """Read the schedules of a file.

    Raises:
        ConfigError: it cannot be read, or is one configuration; a schedule has an unknown key or a
            wrong value.
    """
    table = _table(path)
    common = _base(path, table, preset, Path(path).parent)
    cells: Grid = {}
    of_schedule: dict[str, list[str]] = {}
    for name, changes in table["schedules"].items():
        good = NAME.fullmatch(name) and name not in (".", "..")
        require(bool(good), f"{path}: schedules", name, "a name for a folder among the records")
        where = f"{path}: schedules.{name}"
        if not isinstance(changes, Mapping):
            raise unexpected_value(where, changes, "a table of keys and values")
        if "branch" in changes:
            continue  # read below, after all schedules that can be its trunk
        fields = {key: changes[key] for key in changes if key not in NOT_CONFIGURATION}
        own = {**table, "base": changes["base"]} if "base" in changes else None
        base = _base(where, own, preset, Path(path).parent) if own else common
        try:
            cell = override_table(replace(base, name=name, role=None), fields)
            cell = _measured("", cell, changes.get("statistics", []))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        rates_from = changes if changes.keys() & {"rate", "rates"} else table
        at_rates = _at_rates(where, cell, rates_from)
        _add_cells(where, cells, at_rates)
        of_schedule[name] = [at.name for at in at_rates]
    for name, changes in table["schedules"].items():
        if "branch" in changes:
            where = f"{path}: schedules.{name}"
            _add_cells(where, cells, branches_of(where, name, changes, cells, of_schedule))
    return cells


def _add_cells(where: str, cells: Grid, added: Iterable[RunConfig]) -> None:
    """Add the cells of a schedule by their names; ConfigError for one that there is already."""
    for cell in added:
        expected = "a name of its own: two schedules, or a schedule at two rates, have this one"
        require(cell.name not in cells, where, cell.name, expected)
        cells[cell.name] = cell


def _measured(where: str, config: RunConfig, names: Any) -> RunConfig:
    """A configuration with instruments that measure these statistics, beside its own.

    Raises:
        ConfigError: no list of texts, or no instrument measures one of them.
    """
    wanted = convert_value(tuple[str, ...], names, f"{where}statistics")
    return replace(
        config, instruments=with_statistics(config.instruments, wanted, config.data.train_size)
    )


def _read_preset(path: str, preset: Presets) -> RunConfig:
    """The base of a file that has no schedules.

    Raises:
        ConfigError: it cannot be read, or is no configuration.
    """
    return _base(path, _read(path, "preset"), preset, Path(path).parent)


def read_seeds(path: str) -> list[int] | None:
    """Read the seeds of a file, if it names any."""
    given = _table(path).get("seeds")
    if given is None:
        return None
    few = is_integer(given, 1) and given <= MOST_SEEDS
    numbers = list(range(given)) if few else given
    valid = isinstance(numbers, list) and all(is_integer(number, 0) for number in numbers)
    if not valid or not numbers or len({*numbers}) < len(numbers):
        expected = f"a number of seeds up to {MOST_SEEDS}, or a list of different ones"
        raise unexpected_value(f"{path}: seeds", given, expected)
    return numbers


def _at_rates(where: str, cell: RunConfig, table: Mapping[str, Any]) -> list[RunConfig]:
    """The cells of one schedule: at the table's ``rate``, at each of its ``rates``, or one."""
    rates = table.get("rates")
    if "rate" in table:
        require(rates is None, f"{where}.rates", rates, "no such key beside rate")
        return [at_rate(cell, _rate(f"{where}.rate", table["rate"]))]
    if rates is None:
        return [cell]
    if not isinstance(rates, list) or not rates:
        raise unexpected_value(f"{where}.rates", rates, "a list of learning rates")
    numbers = [_rate(f"{where}.rates", rate) for rate in rates]
    return [replace(at_rate(cell, rate), name=f"{cell.name}{AT}{rate:g}") for rate in numbers]


def _rate(where: str, rate: Any) -> float:
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    require(number and 0 < rate <= LARGEST, where, rate, f"a positive number up to {LARGEST:g}")
    return float(rate)


def _table(path: str) -> Table:
    """A grid's file, the schedules that it includes among its own."""
    table = _read(path, "grid")
    schedules = table.get("schedules", {})
    if isinstance(schedules, Mapping):
        schedules = _included(path, table) | dict(schedules)
    if not isinstance(schedules, Mapping) or not schedules:
        raise ConfigError(
            f"{path} is no grid: it needs a table [schedules.NAME] for each schedule, with what is "
            f"changed of its base; regimes run {path} trains one configuration"
        )
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}: {suggest_nearest(key, KEYS)}")
    return {**table, "schedules": schedules}


def _included(path: str, table: Table) -> Table:
    """The schedules of the files that a file includes; ConfigError if two have one of a name."""
    schedules: Table = {}
    for name in convert_value(tuple[str, ...], table.get("include", []), f"{path}: include"):
        other = str(Path(path).parent / name)
        included = _read(other, f"schedules that {path} includes:")
        if [*included] != ["schedules"] or not isinstance(included["schedules"], Mapping):
            raise ConfigError(
                f"{other} is included by {path}: expected tables [schedules.NAME] alone"
            )
        if twice := sorted(schedules.keys() & included["schedules"].keys()):
            raise ConfigError(
                f"{other} is included by {path}: schedule {twice[0]!r} is also in a file included "
                "before it"
            )
        schedules |= included["schedules"]
    return schedules


def _read(path: str, what: str) -> Table:
    try:
        return read_tables(path)
    except FileNotFoundError:
        raise ConfigError(f"cannot read the {what} {path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None


def _base(path: str, table: Table, preset: Presets, folder: Path) -> RunConfig:
    """The base of a grid or of a schedule. A base that is a file lies in ``folder``, the grid's."""
    given = table.get("base", {})
    settings = convert_value(tuple[str, ...], table.get("set", []), f"{path}: set")
    if not isinstance(given, str | Mapping):
        raise unexpected_value(f"{path}: base", given, "the name of a preset, or a configuration")
    try:
        if isinstance(given, str) and is_file(given):
            known = load_toml(folder / given)
        else:
            known = preset(given) if isinstance(given, str) else from_dict(RunConfig, given)
        changed = override(known, list(settings))
    except ConfigError as error:
        raise ConfigError(f"{path}: base: {error}") from None
    return _measured(f"{path}: ", changed, table.get("statistics", []))


@dataclass(frozen=True)
class OfferedFile:
    """Reads a package's file when it is called, without arguments, like the toolkit's presets."""

    path: str
    read: Callable[[str, Presets], Grid | RunConfig]
    preset: Presets

    def __call__(self) -> Grid | RunConfig:
        return self.read(self.path, self.preset)

    def words(self) -> tuple[str, str]:
        """Return what the file says of itself: (group, about), each on one line."""
        table = _read(self.path, "grid")
        group, about = (" ".join(str(table.get(key, "")).split()) for key in ("group", "about"))
        return group, about


def register_offered(preset: Presets) -> None:
    """Register the grids and presets of installed packages, which replace none of the toolkit's.

    Args:
        preset: gives the configuration that a file names as its base.
    """
    for point in entry_points(GROUP):
        try:
            spec = find_spec(point.value)
        except (ImportError, ValueError) as error:
            logger.warning("the grids of %s cannot be found: %s", point.value, error)
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob("*.toml")):
                GRIDS.setdefault(path.stem, OfferedFile(str(path), read_grid, preset))
            for path in sorted(Path(folder, "presets").glob("*.toml")):
                PRESETS.setdefault(path.stem, OfferedFile(str(path), _read_preset, preset))
