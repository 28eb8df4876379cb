"""The curves of a metric: per schedule and epoch, the mean over seeds with its 95 % t interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from regimes.errors import RecordError
from regimes.plotting.groups import Groups, tested_by
from regimes.plotting.metrics import METRICS, Metric
from regimes.records import Record
from regimes.replay.agreement import interval
from regimes.replay.replay import TRAINING as CLOCK


def values(run: Record, shown: Metric) -> np.ndarray:
    """A metric per epoch, as it is shown (accuracy in %)."""
    column = "metric" if shown == tested_by(run) else shown.name
    if column not in run.epochs:
        known = [
            tested_by(run).name,
            *(name for name in METRICS if name in run.epochs),
        ]
        raise RecordError(f"{run.folder} has no {shown.name!r}: choose one of {', '.join(known)}")
    return shown.factor * run.epochs[column].to_numpy(dtype=float)


def seconds(run: Record) -> np.ndarray:
    """Seconds of training up to the end of each epoch; without evaluation and instruments."""
    return run.epochs.reindex(columns=CLOCK).fillna(0.0).sum(axis=1).cumsum().to_numpy()


def curves(found: Groups, shown: Metric | None = None) -> pd.DataFrame:
    """Per schedule and epoch: n, the metric with its 95 % t interval, mean floats and seconds so
    far. A schedule's curve ends where the first of its seeds does; `ends` has all of their ends.

    Args:
        shown: default what the runs were tested by; its name is the column's.
    """
    shown = shown or tested_by(next(iter(found.values()))[0])
    rows = []
    for name, runs in found.items():
        last = min(len(run.epochs) for run in runs)
        measured = np.stack([values(run, shown)[:last] for run in runs])
        floats = np.stack([run.epochs["total_floats"].to_numpy()[:last] for run in runs]).mean(0)
        passed = np.stack([seconds(run)[:last] for run in runs]).mean(0)
        for epoch in range(last):
            found_here = interval(measured[:, epoch].tolist())
            rows.append((name, epoch, len(runs), *found_here, floats[epoch], passed[epoch]))
    columns = ["schedule", "epoch", "n", shown.name, "ci_low", "ci_high", "floats", "seconds"]
    return pd.DataFrame(rows, columns=columns)


def ends(found: Groups, shown: Metric | None = None) -> pd.DataFrame:
    """One row per schedule: the columns of `curves` at the seeds' own ends (the epoch is the mean
    of their last), with the 95 % t intervals of floats and seconds too."""
    shown = shown or tested_by(next(iter(found.values()))[0])
    rows = []
    for name, runs in found.items():
        row: dict[str, Any] = {"schedule": name, "n": len(runs)}
        for column, last in (
            (shown.name, [values(run, shown)[-1] for run in runs]),
            ("epoch", [len(run.epochs) - 1 for run in runs]),
            ("floats", [run.epochs["total_floats"].iloc[-1] for run in runs]),
            ("seconds", [seconds(run)[-1] for run in runs]),
        ):
            prefix = "" if column == shown.name else f"{column}_"
            names = (column, f"{prefix}ci_low", f"{prefix}ci_high")
            row |= dict(zip(names, interval([float(x) for x in last]), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)
