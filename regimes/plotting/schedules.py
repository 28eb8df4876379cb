"""The table of schedules: metric and traffic of each.

The terminal after an ablation, the report's page and the study show columns of this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from regimes.console.tables import Table
from regimes.console.units import human
from regimes.plotting.differences import LAST
from regimes.plotting.groups import BASELINES, check_setting, tested_by
from regimes.plotting.metrics import Metric
from regimes.records import Record, separate, share_of_low, summary

DASH = "–"


@dataclass(frozen=True)
class Schedules:
    """Finished runs by schedule.

    Attributes:
        frame: one row per schedule, in the order of the runs: n, logged (runs with a metric),
            metric (in the shown unit, mean), sd (over seeds; nan for one), floats, bytes, seconds
            (means over runs), of_base.
        base: the schedule of whose floats ``of_base`` is the share; None without a baseline.
        shown: the metric.
    """

    frame: pd.DataFrame
    base: str | None
    shown: Metric

    def heads(self) -> dict[str, str]:
        """The heading of each column."""
        return {
            "n": "n",
            "metric": self.shown.heading,
            "floats": "floats",
            "of_base": f"of {self.base or 'low throughout'}",
            "bytes": "bytes",
            "seconds": "s per run",
        }

    def cells(self, name: str) -> dict[str, str]:
        """A schedule's columns as text."""
        row, digits = self.frame.loc[name].to_dict(), self.shown.digits
        spread = "" if math.isnan(row["sd"]) else f" ± {row['sd']:.{digits}f}"
        share, some = row["of_base"], 0 < row["logged"] < row["n"]
        return {
            "n": f"{row['logged']:.0f} of {row['n']:.0f}" if some else f"{row['n']:.0f}",
            "metric": DASH if math.isnan(row["metric"]) else f"{row['metric']:.{digits}f}{spread}",
            "floats": human(row["floats"]),
            "of_base": DASH if math.isnan(share) else f"{share:.2f}",
            "bytes": human(row["bytes"], "B"),
            "seconds": f"{row['seconds']:.1f}",
        }

    def table(self, columns: Sequence[str], note: str = "") -> Table:
        """Some columns, for every schedule."""
        heads = self.heads()
        lines = [(name, *(self.cells(name)[c] for c in columns)) for name in self.frame.index]
        return Table(("schedule", *(heads[c] for c in columns)), lines, note)


def schedules(runs: Iterable[Record]) -> Schedules:
    """The table of some finished runs.

    Raises:
        RecordError: an unfinished run, or runs of several metrics.
    """
    runs = separate(runs)
    if len({tested_by(run) for run in runs}) > 1:
        check_setting(runs)
    shown = tested_by(runs[0])
    summaries = summary(runs, LAST)
    summaries["metric"] *= shown.factor
    counted = {"n": ("seed", "count"), "logged": ("metric", "count")}
    means = {column: (column, "mean") for column in ("metric", "floats", "bytes", "seconds")}
    by_name = summaries.groupby("name", sort=False)
    frame = by_name.agg(**counted, **means, sd=("metric", "std"))
    base = next((name for name in BASELINES if name in frame.index), None)
    if base:
        frame["of_base"] = frame["floats"] / frame["floats"][base]
    else:
        frame["of_base"] = [_of_low([r for r in runs if r.name == n]) for n in frame.index]
    return Schedules(frame, base, shown)


def _of_low(runs: Sequence[Record]) -> float:
    """The mean over runs; nan without a low level."""
    shares = [share_of_low(run.header, run.rows) for run in runs]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else math.nan
