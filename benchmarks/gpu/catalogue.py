"""All rows by part and name: what a process of the campaign measures, and what each takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import correct, setting, speed
from benchmarks.gpu.place import Place
from benchmarks.gpu.worker import Row

Measure = Callable[[], dict[str, Any]]
ESTIMATES = Path(__file__).with_name("estimates.json")
BESIDE = 12  # checks side by side on a device machine, which has 16 cores


def tables(place: Place) -> dict[str, dict[str, Measure]]:
    """By part, in order: a part's rows by name."""
    return {
        "correct": {
            name: partial(checked, check, place) for name, check in correct.checks(place).items()
        },
        "speed": speed.rows(place),
        "graphs": speed.graph_rows(place),
        "setting": setting.measures(place),
        "late": speed.late_rows(place),
    }


def checked(check: Callable[[Place], str], place: Place) -> dict[str, Any]:
    """A check as something that is measured."""
    return {"detail": check(place)}


def measures(place: Place) -> dict[tuple[str, str], Measure]:
    return {
        (part, name): measure
        for part, table in tables(place).items()
        for name, measure in table.items()
    }


def plan(place: Place) -> dict[str, list[Row]]:
    """The rows of each part, with the seconds that they take on a device.

    After a capture that fails, a thread stays in the capture's stream: each row of graphs has a
    process of its own.
    """
    seconds = json.loads(ESTIMATES.read_text())
    return {
        part: [
            Row(part, name, seconds[part].get(name, seconds[part]["usual"]), part == "graphs")
            for name in table
        ]
        for part, table in tables(place).items()
    }


def planned(rows: Iterable[Row]) -> float:
    """Seconds of rows one after the other."""
    return sum(row.seconds for row in rows)
