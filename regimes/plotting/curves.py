"""The curves of a metric: per schedule and epoch, the mean over seeds with its 95 % t interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from regimes.base.errors import RecordError
from regimes.base.statistics import interval_names, t_interval
from regimes.plotting.groups import Groups, measured_metric, tested_by
from regimes.plotting.looks import METRICS, Metric
from regimes.policies.replay.replay import TRAINING as CLOCK
from regimes.records import Record
from regimes.records.reader import logged_values

KEYS = ("schedule", "epoch", "n", "ci_low", "ci_high", "floats", "seconds")  # of the tables below
# columns of tables in which the metric is a column, too
TAKEN = {
    *(*KEYS, "part", "name", "seed"),
    *(f"{key}_{end}" for key in ("epoch", "floats", "seconds") for end in ("ci_low", "ci_high")),
}


def metric_values(run: Record, metric: Metric) -> np.ndarray:
    """Return a metric per epoch, in the shown unit (accuracy in %); RecordError if the run does not
    have it."""
    if not has_metric(run, metric):
        metrics = (
            measured_metric(run, name) for name in (*METRICS, *logged_values(run.rows).values())
        )
        known = [m.name for m in (tested_by(run), *metrics) if has_metric(run, m)]
        choice = ", ".join(dict.fromkeys(known))
        raise RecordError(
            f"{run.folder} has no {metric.name!r}: "
            + (f"choose one of {choice}" if choice else "no loss or metric was logged in it")
        )
    if metric.name in TAKEN:
        raise RecordError(
            f"{metric.name!r} is a column of the tables that show it: choose another column, or "
            "log it by another name"
        )
    return metric.factor * np.asarray(run.column(_column(run, metric)), dtype=float)


def has_metric(run: Record, metric: Metric) -> bool:
    """Answer whether a metric was measured, or logged, in any epoch."""
    column = run.column(_column(run, metric))
    return column is not None and bool(pd.notna(column).any())


def _column(run: Record, metric: Metric) -> str:
    return "metric" if metric == tested_by(run) else metric.name


def training_seconds(run: Record) -> np.ndarray:
    """Add up the seconds of training to the end of each epoch, without evaluation and
    instruments."""
    names = [column.removeprefix("seconds_") for column in CLOCK]
    spent = [run.clock.get(row["epoch"], {}) for row in run.rows]
    return np.cumsum(sum(np.array([x.get(name, 0.0) for x in spent]) for name in names))


def _sent(run: Record) -> np.ndarray:
    """Floats sent up to the end of each epoch."""
    return np.cumsum(np.asarray(run.column("floats")))


def tabulate_curves(by_schedule: Groups, metric: Metric | None = None) -> pd.DataFrame:
    """Makes a table with a row for each schedule and epoch.

    A row has n, the mean of the metric with its 95 % t interval, and the mean floats and seconds so
    far. A schedule's curve ends where the first of its seeds does; `tabulate_ends` has the ends of
    all.

    Args:
        by_schedule: the runs of each schedule.
        metric: the metric, whose name is the column's; by default what the runs were tested by.
    """
    metric = metric or tested_by(next(iter(by_schedule.values()))[0])
    rows = []
    for name, runs in by_schedule.items():
        last = min(len(run.rows) for run in runs)
        metrics = np.stack([metric_values(run, metric)[:last] for run in runs])
        floats = np.mean([_sent(run)[:last] for run in runs], axis=0)
        clock = np.mean([training_seconds(run)[:last] for run in runs], axis=0)
        for epoch in range(last):
            mean_and_ends = t_interval(metrics[:, epoch].tolist())
            rows.append((name, epoch, len(runs), *mean_and_ends, floats[epoch], clock[epoch]))
    return pd.DataFrame(rows, columns=[*KEYS[:3], metric.name, *KEYS[3:]])


def tabulate_ends(by_schedule: Groups, metric: Metric | None = None) -> pd.DataFrame:
    """Make a table with one row per schedule: the columns of `tabulate_curves` at the end of each
    seed (the epoch is the mean of their last ones; in a hook's record the last with a logged
    metric), with the 95 % t intervals of floats and seconds too."""
    metric = metric or tested_by(next(iter(by_schedule.values()))[0])
    rows = []
    for name, runs in by_schedule.items():
        row: dict[str, Any] = {"schedule": name, "n": len(runs)}
        last = [(run, _last(run, metric)) for run in runs]
        for column, numbers in (
            (metric.name, [metric_values(run, metric)[end] for run, end in last]),
            ("epoch", [end for _, end in last]),
            ("floats", [_sent(run)[end] for run, end in last]),
            ("seconds", [training_seconds(run)[end] for run, end in last]),
        ):
            names = (column, *interval_names("" if column == metric.name else column))
            row |= dict(zip(names, t_interval([float(x) for x in numbers]), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def _last(run: Record, metric: Metric) -> int:
    """The last epoch; in a hook's record, the last with a value."""
    known = ~np.isnan(metric_values(run, metric))  # raises if there is none
    return int(np.flatnonzero(known)[-1]) if run.hooked else len(run.rows) - 1
