"""What a grid lacks for a figure, before it is trained: `regimes figure NAME --needs GRID`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from regimes.base.config import RunConfig, to_dict
from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.plotting.groups import part_of
from regimes.plotting.needs import Needs
from regimes.policies.detectors.statistics import lacking_statistics, measuring_options
from regimes.presets import get_grid, own
from regimes.presets.families import shorten_training


class Need(NamedTuple):
    """Holds one of the needs of a figure, and what a grid has of it.

    Attributes:
        what: "schedule low", "statistic eigenvalue".
        has: the schedules of the grid that are it, or record it.
        key: what makes the grid have it; empty where it has.
    """

    what: str
    has: str
    key: str = ""


def compare_needs(needs: Needs, grid: Mapping[str, RunConfig], in_file: bool = True) -> list[Need]:
    """Compare each need of a figure with what a grid has of it.

    Args:
        in_file: the grid is a file, and its keys can be set; else options of `regimes ablate` are.

    Raises:
        ConfigError: no instrument measures a statistic.
    """
    names: dict[str, list[str]] = {}
    for name, config in grid.items():
        names.setdefault(part_of(name, config.role, needs.schedules), []).append(name)
    for role, other in needs.instead.items():
        if role not in names and other in names:
            names[role] = names[other]
    like = get_grid(needs.like) if needs.like else {}
    length = next(iter(grid.values())).epochs if grid else 0
    rows = [
        _schedule(role, names.get(role, []), in_file, _example(role, needs.like, like, length))
        for role in needs.schedules
    ]
    rows += [
        Need(f"schedule {role}, if there is one", ", ".join(names.get(role, [])))
        for role in needs.also
    ]
    readers = [name for role in needs.schedules for name in names.get(role, [])]
    every, readers = bool(readers), readers or list(grid)
    lacks = {name: lacking_statistics(grid[name].instruments, needs.statistics) for name in readers}
    if every:
        missing = [x for x in needs.statistics if any(x in lacks[name] for name in readers)]
    else:  # those of the schedule that lacks the fewest
        missing = min(lacks.values(), key=len)
    wanted = [x for x in needs.statistics if x != "norm"]  # that is always recorded
    key = f"statistics = {json.dumps(wanted)}" if in_file else measuring_options(*wanted)
    for statistic in needs.statistics:
        having = ", ".join(name for name in readers if statistic not in lacks[name])
        rows.append(Need(f"statistic {statistic}", having, key if statistic in missing else ""))
    return rows


def _schedule(role: str, names: list[str], in_file: bool, example: str) -> Need:
    """The need of one schedule, and the schedules of a grid that are it."""
    key = ""
    if not names:
        where = "takes this part" if in_file else "takes this part, in a grid of your own"
        key = f'role = "{role}", in the table [schedules.NAME] that {where}{example}'
    elif len(names) > 1:
        key = f'role = "{role}" in one of {", ".join(names)} alone'
    return Need(f"schedule {role}", ", ".join(names), key)


def _example(role: str, name: str, grid: Mapping[str, RunConfig], length: int) -> str:
    """A line with the keys that make another grid's schedule what it is, in so many epochs."""
    if role not in grid:
        return ""
    base = next(iter(grid.values())).epochs
    config = to_dict(shorten_training(grid[role], length / base))
    keys = {key: config[key] for key in ("policy", "budget") if config.get(key)}
    if "budget" in keys:  # the longest that the training may last
        keys = {"epochs": config["epochs"], **keys}
    return f"\n    {name} has {', '.join(f'{key} = {_inline(x)}' for key, x in keys.items())}"


def _inline(value: Any) -> str:
    """A value as TOML in one line.

    >>> _inline({"name": "windows", "windows": [[0, 6]]})
    '{ name = "windows", windows = [[0, 6]] }'
    """
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_inline(one)}' for key, one in value.items())} }}"
    return json.dumps(value)


def print_needs(figure: str, needs: Needs, name: str) -> bool:
    """Print what a figure needs of a grid; returns whether the grid has it all.

    Args:
        figure: as `regimes figure` calls it.
        name: of the grid, or its file.

    Raises:
        ConfigError: no such grid.
    """
    in_file = own.is_file(name)
    rows = compare_needs(needs, get_grid(name), in_file)
    title = f"What figure {figure} needs"
    cells = [(x.what, x.has or ("lacking" if x.key else "none")) for x in rows]
    table = Table(("needed", f"in {name}"), cells, texts=2, title=title)
    stdout.make_console(highlight=False).print(table.drawn(), "")
    runs = f"runs/{Path(name).stem}"
    if keys := list(dict.fromkeys(row.key for row in rows if row.key)):
        print(f"Before the training, {'set in ' + name if in_file else f'regimes ablate {name}'}:")
        print(*(f"  {key}" for key in keys), sep="\n")
        if any("role" in key for key in keys):
            print("A schedule's role may also be given when the figure is drawn:")
            print(f"  regimes figure {figure} {runs} --role ROLE=SCHEDULE")
        return False
    print("Nothing is lacking:")
    print(f"  regimes ablate {name} --out {runs}")
    print(f"  regimes figure {figure} {runs}")
    return True
