"""What a figure needs of a grid, before it is trained: `regimes figure NAME --needs GRID`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from regimes.config import RunConfig
from regimes.console import stdout
from regimes.console.tables import Table
from regimes.detectors.statistics import lacking, setting
from regimes.plotting.groups import part_of
from regimes.plotting.offered import Needs
from regimes.presets import get_grid, own


class Need(NamedTuple):
    """One of the needs, and a grid.

    Attributes:
        what: "schedule low", "statistic eigenvalue".
        has: the schedules of the grid that are it, or record it.
        key: what makes the grid have it; empty where it has.
    """

    what: str
    has: str
    key: str = ""


def compare(needs: Needs, grid: Mapping[str, RunConfig], in_file: bool = True) -> list[Need]:
    """Each need of a figure, and what a grid has of it.

    Args:
        in_file: the grid is a file, whose keys can be set; else options of `regimes ablate` are.

    Raises:
        ConfigError: no instrument measures a statistic.
    """
    names: dict[str, list[str]] = {}
    for name, config in grid.items():
        names.setdefault(part_of(name, config.role, needs.schedules), []).append(name)
    found = [_schedule(role, names.get(role, [])) for role in needs.schedules]
    found += [
        Need(f"schedule {role}, if there is one", ", ".join(names.get(role, [])))
        for role in needs.also
    ]
    readers = [name for role in needs.schedules for name in names.get(role, [])]
    every, readers = bool(readers), readers or list(grid)
    lacks = {name: lacking(grid[name].instruments, needs.statistics) for name in readers}
    if every:
        missing = [x for x in needs.statistics if any(x in lacks[name] for name in readers)]
    else:  # those of the schedule that lacks the fewest
        missing = min(lacks.values(), key=len)
    key = f"statistics = {json.dumps(missing)}" if in_file else setting(*missing)
    for statistic in needs.statistics:
        having = ", ".join(name for name in readers if statistic not in lacks[name])
        found.append(Need(f"statistic {statistic}", having, key if statistic in missing else ""))
    return found


def _schedule(role: str, names: list[str]) -> Need:
    """The need of one schedule, and the schedules of a grid that are it."""
    key = ""
    if not names:
        key = f'role = "{role}" in one table [schedules.NAME]'
    elif len(names) > 1:
        key = f"one of them, when it is drawn: --role {role}={names[0]!r}"
    return Need(f"schedule {role}", ", ".join(names), key)


def show(figure: str, needs: Needs, name: str) -> bool:
    """Print what a figure needs of a grid; returns whether the grid has it all.

    Args:
        figure: as `regimes figure` calls it.
        name: of the grid, or its file.

    Raises:
        ConfigError: no such grid.
    """
    rows = compare(needs, get_grid(name), own.is_file(name))
    head = ("needed", f"in {name}", "key that is lacking")
    title = f"What figure {figure} needs"
    table = Table(head, [(x.what, x.has or "none", x.key) for x in rows], texts=3, title=title)
    stdout.console(highlight=False).print(table.drawn(), "")
    if any(row.key for row in rows):
        where = "Set them" if own.is_file(name) else "Give them to `regimes ablate`"
        print(f"{where} before the training. A name may also be given when the figure is drawn:")
        print(f"regimes figure {figure} RECORDS --role ROLE=SCHEDULE")
        return False
    runs = f"runs/{Path(name).stem}"
    print(f"Nothing is lacking: regimes ablate {name} --out {runs}, then")
    print(f"regimes figure {figure} {runs}")
    return True
