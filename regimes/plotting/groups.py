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
BASELINES = ("low", "small-batch", "rank 4", "none")  # what the others' traffic is a share of
SETTING = {  # shared by all schedules of a figure
    *("workers", "batch_size", "data", "model", "compressor", "levels", "signal", "quirks"),
    *("metric", "written_by"),
}


def groups(
    runs: Iterable[Record],
    needed: Sequence[str] = (),
    only: bool = False,
    unfinished: bool = False,
) -> Groups:
    """Runs by schedule, each list by seed: only seeds of one experiment (`records.separate`).

    Args:
        only: leave out the runs of schedules that are not ``needed``.
        unfinished: take unfinished runs as well.

    Raises:
        RecordError: an unfinished run (unless asked for), two of one experiment and seed, schedules
            of different settings, or a schedule of ``needed`` that is missing.
    """
    runs, found = separate(runs), Groups()
    check_there(runs, needed)
    runs = [run for run in runs if run.name in needed or not only]
    for run in runs:
        if not unfinished:
            run.check_finished()
        found.setdefault(run.name, []).append(run)
    check_setting(runs)
    return {name: sorted(found[name], key=lambda r: r.seed) for name in order(found)}


def check_there(runs: Sequence[Record], needed: Iterable[str]) -> None:
    """Raise RecordError unless there are runs of each of these schedules."""
    names = {run.name for run in runs}
    missing = [name for name in needed if name not in names]
    apart = {name: found for name in missing if (found := variants(runs, name))}
    for name, found in apart.items():
        raise RecordError(
            f"{', '.join(found)}: runs of {name!r} are not of the same experiment; choose one with "
            "--where FIELD=VALUE, or read a folder that has one of them"
        )
    if missing:
        raise RecordError(
            f"no run of schedule {', '.join(missing)}; found {', '.join(order(names)) or 'none'}: "
            "run the missing ones (regimes ablate GRID --schedules ...) before drawing"
        )


def check_setting(runs: Sequence[Record], shared: Collection[str] = SETTING) -> None:
    """Raise RecordError unless schedules that are compared share these fields or tables."""
    ones = list({run.name: run for run in reversed(runs)}.values())[::-1]
    ones.sort(key=_decided)  # stable: one whose batch is fixed stands for all
    for other in ones[1:]:
        differ = differing([_some(ones[0], shared), _some(other, shared)])
        if _decided(other):
            differ.pop("batch_size", None)
        if differ:
            words = ", ".join(f"{name} ({a}, {b})" for name, (a, b) in differ.items())
            raise RecordError(
                f"{ones[0].folder} and {other.folder} differ in {words}: a figure compares "
                "schedules of one setting; choose one with --where FIELD=VALUE, or read a folder "
                "that has one of them"
            )


def _some(run: Record, shared: Collection[str]) -> dict[str, Any]:
    return {k: v for k, v in identity(run).items() if {k, k.partition(".")[0]} & {*shared}}


def _decided(run: Record) -> bool:
    """Does a policy choose the batch?"""
    return bool(run.config.get("batch_policy"))


def tested_by(run: Record) -> Metric:
    """What the run was tested by."""
    return measured(run, run.header.get("metric", "accuracy"))


def measured(run: Record, column: str) -> Metric:
    """How a column of the run's epochs is written."""
    return named(column, unit_known=not run.hooked)


def compressed(run: Record) -> list[dict[str, Any]]:
    """The compressed layers in network order."""
    return [layer for layer in run.header["layers"] if layer["compressed"]]


def windows(found: Groups) -> list[list[int]]:
    """The hand-made critical windows ``[first, stop)``; none if no run has them."""
    for name, table in (
        ("low-in-critical", "policy"),
        ("high-in-critical", "policy"),
        ("small-in-critical", "batch_policy"),
    ):
        if found.get(name):
            return found[name][0].config[table].get("windows", [])
    return []


def decaying(found: Groups) -> Record:
    """A run whose decays most of the schedules share."""
    firsts = [runs[0] for runs in found.values()]
    decays = [decay_epochs(run) for run in firsts]
    return firsts[decays.index(max(decays, key=decays.count))]
