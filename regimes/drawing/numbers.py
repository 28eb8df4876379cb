"""Runs grouped by schedule and seed, and the curves of their metric. No drawing here.

A schedule is a configuration's name; the runs of one schedule are its seeds, and every mean over
them comes with a 95 % t interval.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regimes.agreement import interval
from regimes.config import DataConfig, from_dict, to_dict
from regimes.drawing import metrics, style
from regimes.drawing.metrics import Metric
from regimes.errors import ConfigError, RecordError
from regimes.records import Record
from regimes.replay import TRAINING as CLOCK

Groups = dict[str, list[Record]]
BASELINES = ("low", "small-batch", "rank 4", "none")  # what the others' traffic is a share of
SAME = ("workers", "batch_size", "data", "model", "compressor", "levels", "signal", "quirks")


# -- runs ------------------------------------------------------------------------------------


def groups(
    runs: Iterable[Record],
    needed: Sequence[str] = (),
    only: bool = False,
    unfinished: bool = False,
) -> Groups:
    """Runs by schedule, each list by seed.

    Args:
        only: leave out the runs of schedules that are not ``needed``.
        unfinished: take unfinished runs as well.

    Raises:
        RecordError: an unfinished run (unless asked for), two of one schedule and seed, runs of
            different settings, or a schedule of ``needed`` that is missing.
    """
    found: Groups = {}
    first: Record | None = None
    runs = list(runs)
    missing = [name for name in needed if name not in {run.name for run in runs}]
    if missing:
        there = ", ".join(style.order(run.name for run in runs)) or "none"
        raise RecordError(
            f"no run of schedule {', '.join(missing)}; found {there}: run the "
            "missing ones (regimes ablate GRID --schedules ...) before drawing"
        )
    for run in runs:
        if only and run.name not in needed:
            continue
        first = first or run
        if not (unfinished or run.finished):
            raise RecordError(
                f"{run.folder} has {len(run.epochs)} of {run.config['epochs']} epochs: finish it "
                "with --resume before drawing"
            )
        ours, theirs = _setting(run), _setting(first)
        differ = [key for key in SAME if ours.get(key) != theirs.get(key)]
        if differ:
            raise RecordError(
                f"{run.folder} and {first.folder} differ in {', '.join(differ)}: a figure compares "
                "runs of one setting; move them to folders of their own"
            )
        others = found.setdefault(run.name, [])
        if any(run.seed == other.seed for other in others):
            raise RecordError(f"{run.folder}: there is another {run.name!r} run of seed {run.seed}")
        others.append(run)
    return {name: sorted(found[name], key=lambda r: r.seed) for name in style.order(found)}


def _setting(run: Record) -> dict[str, Any]:
    """The configuration, with the images themselves in place of where they lay."""
    data = run.config["data"]
    with contextlib.suppress(ConfigError):  # an older record has what it does not say by default
        data = to_dict(from_dict(DataConfig, data))
    data = {k: v for k, v in data.items() if k not in ("path", "download")}
    found = {**run.config, "data": {**data, "digest": run.header["data"]["digest"]}}
    if run.config.get("batch_policy"):
        del found["batch_size"]  # the batch is what is compared
    return found


def metric(run: Record) -> Metric:
    """What the run was tested by."""
    return metrics.metric(run.header.get("metric", "accuracy"))


def compressed(run: Record) -> list[dict[str, Any]]:
    """The compressed layers in network order."""
    return [layer for layer in run.header["layers"] if layer["compressed"]]


def windows(found: Groups) -> list[list[int]]:
    """The hand-made critical windows ``[first, stop)``; none if no run has them."""
    for name, table in (("low-in-critical", "policy"), ("high-in-critical", "policy"),
                        ("small-in-critical", "batch_policy")):  # fmt: skip
        if found.get(name):
            return found[name][0].config[table].get("windows", [])
    return []


def decaying(found: Groups) -> Record:
    """A run whose decays most of the schedules share."""
    firsts = [runs[0] for runs in found.values()]
    decays = [tuple(run.config["optimizer"].get("decay_epochs", ())) for run in firsts]
    return firsts[decays.index(max(decays, key=decays.count))]


# -- curves ----------------------------------------------------------------------------------


def values(run: Record, shown: Metric) -> np.ndarray:
    """A metric per epoch, as it is shown (accuracy in %).

    Raises:
        RecordError: the run has no such column.
    """
    column = "metric" if shown == metric(run) else shown.name
    if column not in run.epochs:
        known = [
            metric(run).name,
            *(name for name in metrics.METRICS if name in run.epochs),
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
    shown = shown or metric(next(iter(found.values()))[0])
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
    shown = shown or metric(next(iter(found.values()))[0])
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
