"""Runs grouped by schedule (a configuration's name) and seed, and where learning rates decay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from regimes.base.errors import LackingError, RecordError
from regimes.plotting.looks import Metric, find_metric, order_schedules
from regimes.policies import read_history
from regimes.policies.base import FollowsDecays
from regimes.records import (
    Record,
    differing_fields,
    identify_experiment,
    list_variants,
    run_length,
    separate_experiments,
)
from regimes.records.fields import differences_text
from regimes.records.selection import add_note

Groups = dict[str, list[Record]]
BASELINES = ("low", "small-batch", "rank 4", "none")  # of whose traffic the others' is a share
COMPARABLE = {"data", "model", "metric", "written_by"}  # else metrics are not of the same thing
# Also shared by schedules of a figure that needs certain ones, such as the paper's: it says "low"
# and "high" of all. Elsewhere schedules may differ in these, and are arms of one comparison.
METHOD = {"workers", "batch_size", "compressor", "levels", "signal", "quirks"}


def group_runs(
    runs: Iterable[Record], needed: Sequence[str] = (), only: bool = False, unfinished: bool = False
) -> Groups:
    """Group runs by schedule, each list by seed: only seeds of one experiment
    (`records.separate_experiments`).

    Args:
        needed: schedules that must be there, by their name or their role (`in_roles`).
        only: leave out the schedules that are not ``needed``.
        unfinished: take unfinished runs as well.

    Raises:
        RecordError: an unfinished run (unless asked for), two of one experiment and seed, schedules
            of other data, models or metrics, or of one role; where some are needed, of other
            compressors, levels, workers or batches.
        LackingError: a schedule of ``needed`` is missing.
    """
    runs, by_schedule = in_roles(separate_experiments(runs), needed), Groups()
    check_there(runs, needed)
    runs = [run for run in runs if run.name in needed or not only]
    for run in runs:
        if not unfinished:
            run.check_finished()
        by_schedule.setdefault(run.name, []).append(run)
    check_setting(runs, COMPARABLE | METHOD if needed else COMPARABLE)
    if not needed and (differ := differing_methods(by_schedule)):
        add_note(f"schedules differ in {differ}")
    return {
        name: sorted(by_schedule[name], key=lambda r: r.seed)
        for name in order_schedules(by_schedule)
    }


def in_roles(runs: Iterable[Record], needed: Sequence[str]) -> list[Record]:
    """Call the schedules, in a figure that needs certain ones, by the roles that their grid gives
    them; one that is needed by its own name keeps it. Without needed ones the runs stay as they
    are.

    Raises:
        RecordError: two schedules of one needed role.
    """
    runs = list(runs)
    if not needed:
        return runs
    names: dict[str, dict[str, None]] = {}
    for run in runs:
        own = run.config["name"]
        names.setdefault(part_of(own, run.config.get("role"), needed), {})[own] = None
    for part, several in names.items():
        if len(several) > 1 and part in needed:
            raise RecordError(
                f"schedules {', '.join(several)}: each is {part!r}, by its name or by its role; "
                f"choose one with --role {part}={next(iter(several))!r}"
            )
    runs_in_role = []
    for run in runs:
        own = run.config["name"]
        part = part_of(own, run.config.get("role"), needed)
        if part == own or len(names[part]) > 1:  # a role that is not needed
            runs_in_role.append(run)
        else:
            add_note(f"the schedule {own} is drawn as {part}, its role")
            runs_in_role.append(run.called(part))
    return runs_in_role


def part_of(name: str, role: str | None, needed: Sequence[str]) -> str:
    """Return what a schedule is called in a figure that needs certain ones: its role, if it has one
    and is not needed by its own name.

    >>> part_of("mine", "low", ["low", "high"]), part_of("mine", "low", ["mine"])
    ('low', 'mine')
    """
    return name if role is None or (name in needed and role not in needed) else role


def check_there(runs: Sequence[Record], needed: Iterable[str]) -> None:
    """Raise LackingError unless there are runs of each of these schedules."""
    names = {run.name for run in runs}
    missing = [name for name in needed if name not in names]
    for name in missing:
        if experiments := list_variants(runs, name):
            raise RecordError(
                f"{', '.join(experiments)}: runs of {name!r} are not of the same experiment; "
                "choose one with --where FIELD=VALUE, or read a folder that has one of them"
            )
    if missing:
        raise LackingError(
            f"no run of schedule {', '.join(missing)}; found "
            f"{', '.join(order_schedules(names)) or 'none'}: "
            "run the missing ones (regimes ablate GRID --schedules ...) before drawing, or say "
            f"which schedule takes the part, --role {missing[0]}=NAME"
        )


def check_setting(runs: Sequence[Record], shared: Collection[str] = frozenset(COMPARABLE)) -> None:
    """Raise RecordError unless schedules that are compared share these fields or tables."""
    first_runs = list({run.name: run for run in reversed(runs)}.values())[::-1]
    # stable: all are compared with one whose batch is fixed
    first_runs.sort(key=lambda run: bool(run.config.get("batch_policy")))
    for other in first_runs[1:]:
        one = first_runs[0]
        differ = differing_fields([_fields_of(one, shared), _fields_of(other, shared)])
        if other.config.get("batch_policy"):
            differ.pop("batch_size", None)
        if differ:
            raise RecordError(
                f"{one.folder} and {other.folder} differ in {differences_text(differ)}: they are "
                "not compared in one table or figure; choose one with --where FIELD=VALUE, or read "
                "a folder that has one of them"
            )


def differing_methods(by_schedule: Groups) -> str:
    """Says in which fields the schedules of a figure differ beside their policies.

    Such fields are those of the method, like the compressor. The first run of a schedule stands for
    all its seeds. The text is empty if they differ in nothing else.
    """
    tables = [_fields_of(runs[0], METHOD) for runs in by_schedule.values()]
    return differences_text(differing_fields(tables)) if tables else ""


def _fields_of(run: Record, names: Collection[str]) -> dict[str, Any]:
    """The fields of these names, and of these tables."""
    fields = identify_experiment(run).items()
    return {k: v for k, v in fields if {k, k.partition(".")[0]} & {*names}}


def tested_by(run: Record) -> Metric:
    """Return the metric by which the run was tested."""
    return measured_metric(run, run.header.get("metric", "accuracy"))


def measured_metric(run: Record, column: str) -> Metric:
    """Return how a column of the run's epochs is written."""
    own_loss = run.header["data"].get("loss") is not None
    return find_metric(column, unit_known=not run.hooked and not own_loss)


def compressed_layers(run: Record) -> list[dict[str, Any]]:
    """List the compressed layers in network order."""
    return [layer for layer in run.header["layers"] if layer["compressed"]]


def critical_windows(by_schedule: Groups) -> list[list[int]]:
    """Return the hand-made critical windows ``[first, stop)``; empty if no run has them."""
    for level, table in (("low", "policy"), ("high", "policy"), ("small", "batch_policy")):
        if runs := by_schedule.get(f"{level}-in-critical"):
            return (runs[0].config.get(table) or {}).get("windows", [])
    return []


def find_decays(run: Record) -> list[tuple[int, float]]:
    """Find the units of a run that are the first at a lower learning rate, and the factor by which
    it falls (infinity: to zero). A trainer's step schedule gives the configured ones; a user's own
    training has no known schedule and gives the decays that the policies see in its rates."""
    if run.hooked:
        seen = FollowsDecays().decays(read_history(run.rows, [], run.config["signal"]))
        known = [(first, old, new) for first, old, new in seen if first < len(run.rows)]
        return [(first, old / new if new else math.inf) for first, old, new in known]
    optimizer, per_epoch = run.config["optimizer"], run.header.get("steps_per_epoch") or 1
    if optimizer.get("schedule", "step") != "step":
        return []
    steps = [*(optimizer.get("decay_steps") or ())]
    steps += [first * per_epoch for first in optimizer.get("decay_epochs") or ()]
    # the first unit that begins at or after a decay: one within which the rate falls is not lower
    size = run.config.get("unit_steps") or per_epoch
    units = [-(-step // size) for step in sorted(steps)]
    factor, end = np.float64(optimizer.get("decay_factor") or 1), run_length(run.header, run.rows)
    with np.errstate(over="ignore"):
        return [(first, float(factor**n)) for first, n in Counter(units).items() if first < end]


def decay_epochs(run: Record) -> tuple[int, ...]:
    """Return the units that are the first at a lower learning rate."""
    return tuple(first for first, _ in find_decays(run))


def typical_run(by_schedule: Groups) -> Record:
    """Choose a run with the decays that most of the schedules share."""
    runs = [group[0] for group in by_schedule.values()]
    decays = [decay_epochs(run) for run in runs]
    return runs[decays.index(max(decays, key=decays.count))]
