"""Runs grouped by schedule (a configuration's name) and seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from regimes.errors import RecordError
from regimes.plotting.decays import decay_epochs
from regimes.plotting.looks import order
from regimes.plotting.metrics import Metric, named
from regimes.records import Record, differing, identity, separate, variants

Groups = dict[str, list[Record]]
BASELINES = ("low", "small-batch", "rank 4", "none")  # of whose traffic the others' is a share
SETTING = {  # shared by all schedules of a figure
    *("workers", "batch_size", "data", "model", "compressor", "levels", "signal", "quirks"),
    *("metric", "written_by"),
}


def groups(
    runs: Iterable[Record], needed: Sequence[str] = (), only: bool = False, unfinished: bool = False
) -> Groups:
    """Runs by schedule, each list by seed: only seeds of one experiment (`records.separate`).

    Args:
        only: leave out the schedules that are not ``needed``.
        unfinished: take unfinished runs as well.

    Raises:
        RecordError: an unfinished run (unless asked for), two of one experiment and seed, schedules
            of different settings, or a schedule of ``needed`` that is missing.
    """
    runs, by_schedule = separate(runs), Groups()
    check_there(runs, needed)
    runs = [run for run in runs if run.name in needed or not only]
    for run in runs:
        if not unfinished:
            run.check_finished()
        by_schedule.setdefault(run.name, []).append(run)
    check_setting(runs)
    return {name: sorted(by_schedule[name], key=lambda r: r.seed) for name in order(by_schedule)}


def check_there(runs: Sequence[Record], needed: Iterable[str]) -> None:
    """Raise RecordError unless there are runs of each of these schedules."""
    names = {run.name for run in runs}
    missing = [name for name in needed if name not in names]
    for name in missing:
        if experiments := variants(runs, name):
            raise RecordError(
                f"{', '.join(experiments)}: runs of {name!r} are not of the same experiment; "
                "choose one with --where FIELD=VALUE, or read a folder that has one of them"
            )
    if missing:
        raise RecordError(
            f"no run of schedule {', '.join(missing)}; found {', '.join(order(names)) or 'none'}: "
            "run the missing ones (regimes ablate GRID --schedules ...) before drawing"
        )


def check_setting(runs: Sequence[Record], shared: Collection[str] = SETTING) -> None:
    """Raise RecordError unless schedules that are compared share these fields or tables."""
    first_runs = list({run.name: run for run in reversed(runs)}.values())[::-1]
    first_runs.sort(key=_adapts_batch)  # stable: all are compared with one whose batch is fixed
    for other in first_runs[1:]:
        one = first_runs[0]
        differ = differing([_fields(one, shared), _fields(other, shared)])
        if _adapts_batch(other):
            differ.pop("batch_size", None)
        if differ:
            words = ", ".join(f"{name} ({a}, {b})" for name, (a, b) in differ.items())
            raise RecordError(
                f"{one.folder} and {other.folder} differ in {words}: a figure compares schedules "
                "of one setting; choose one with --where FIELD=VALUE, or read a folder that has "
                "one of them"
            )


def _fields(run: Record, shared: Collection[str]) -> dict[str, Any]:
    return {k: v for k, v in identity(run).items() if {k, k.partition(".")[0]} & {*shared}}


def _adapts_batch(run: Record) -> bool:
    return bool(run.config.get("batch_policy"))


def tested_by(run: Record) -> Metric:
    """The metric by which the run was tested."""
    return measured(run, run.header.get("metric", "accuracy"))


def measured(run: Record, column: str) -> Metric:
    """How a column of the run's epochs is written."""
    return named(column, unit_known=not run.hooked)


def compressed(run: Record) -> list[dict[str, Any]]:
    """The compressed layers in network order."""
    return [layer for layer in run.header["layers"] if layer["compressed"]]


def windows(by_schedule: Groups) -> list[list[int]]:
    """The hand-made critical windows ``[first, stop)``; empty if no run has them."""
    for level, table in (("low", "policy"), ("high", "policy"), ("small", "batch_policy")):
        if runs := by_schedule.get(f"{level}-in-critical"):
            return runs[0].config[table].get("windows", [])
    return []


def decaying(by_schedule: Groups) -> Record:
    """A run whose decays most of the schedules share."""
    runs = [group[0] for group in by_schedule.values()]
    decays = [decay_epochs(run) for run in runs]
    return runs[decays.index(max(decays, key=decays.count))]
