"""What a notebook's cell shows of records: a row for a run, a row for each schedule of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from regimes.base.console.units import metric_unit
from regimes.records.extent import format_progress
from regimes.records.schema import Header, Row


class Run(Protocol):
    """Has what is shown of a `Record`."""

    @property
    def folder(self) -> Path: ...
    @property
    def header(self) -> Header: ...
    @property
    def rows(self) -> list[Row]: ...
    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def finished(self) -> bool: ...
    def tested_rows(self) -> list[Row]: ...


def of_schedules(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Describe each schedule of some runs in a few words."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    return [_of_schedule(name, of_name) for name, of_name in by_name.items()]


def of_run(run: Run) -> dict[str, Any]:
    """Describe a run in a few words."""
    shown = {
        "schedule": run.name,
        "seed": run.seed,
        "trained": format_progress(run.header, run.rows, " of "),
        **_metric(run, _last_metric(run)),
        "MB sent by a worker": _sent_megabytes(run),
        "folder": str(run.folder),
    }
    return {name: value for name, value in shown.items() if value is not None}


def _of_schedule(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """All runs of a schedule; numbers are means."""
    ends = [end for run in runs if (end := _last_metric(run)) is not None]
    return {
        "schedule": name,
        "seeds": len(runs),
        "finished": sum(run.finished for run in runs),
        **_metric(runs[0], math.fsum(ends) / len(ends) if ends else None),
        "MB sent by a worker": math.fsum(map(_sent_megabytes, runs)) / len(runs),
    }


def _metric(run: Run, value: float | None) -> dict[str, float | None]:
    """A value of the metric, below its name with the unit in which it is shown."""
    name = run.header["metric"]
    factor, unit = metric_unit(name)
    return {f"{name}{unit}": None if value is None else factor * value}


def _last_metric(run: Run) -> float | None:
    """The metric when it was tested last, nan if not finite; None: it was not tested yet."""
    tested = run.tested_rows()[-1:]
    return next((math.nan if row["metric"] is None else row["metric"] for row in tested), None)


def _sent_megabytes(run: Run) -> float:
    """MB that a worker has sent."""
    return math.fsum(row["bytes"] for row in run.rows) / 1e6


def as_html(rows: Sequence[dict[str, Any]]) -> str:
    import pandas as pd

    table = pd.DataFrame(rows)
    return table.to_html(index=False, na_rep="", float_format="{:.4g}".format, border=0)
