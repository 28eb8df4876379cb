"""Selecting runs by their headers (``--where optimizer.lr=0.4``).

A command reads inside `select_while_loading`: every `load_all` there gives the selected runs,
separated by experiment, and adds its `same_experiment.write_notes` to those of the command::

    with select_while_loading(["optimizer.lr=0.4"], print_notes=True):
        ...

Or by their part in a figure (``--role low=mine``): runs of ``mine`` are read as if it were called
``low``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from regimes.base.config import read_value
from regimes.base.config.arguments import check_arguments
from regimes.base.console.stdout import escape_control
from regimes.base.errors import ConfigError, RecordError, is_integer, require, suggest_nearest
from regimes.records.fields import field_text
from regimes.records.reader import Record
from regimes.records.same_experiment import separate_experiments, write_notes

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass
class Selection:
    """Says what a command reads.

    Attributes:
        where: conditions FIELD=VALUE.
        roles: the name of a schedule, by its part in a figure.
        notes: of the runs that were read, as keys.
    """

    where: tuple[str, ...] = ()
    roles: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, None] = dataclasses.field(default_factory=dict)


_selection: ContextVar[Selection | None] = ContextVar("selection", default=None)


@contextlib.contextmanager
def select_while_loading(
    where: Sequence[str] = (), print_notes: bool = False, roles: Sequence[str] = ()
) -> Iterator[dict[str, None]]:
    """Let `load_all` select by ``where`` and call schedules by their ``roles``; yields the notes so
    far, as keys, and may print them at the end.

    Args:
        roles: ROLE=NAME each: the schedule of that name is read as if it were called ROLE, and
            another one that is called so is left out.

    Raises:
        ConfigError: a condition that is not FIELD=VALUE, or a role that is not ROLE=NAME.
    """
    for text in where:
        _parse_condition(text)
    chosen = {}
    for text in roles:
        role, _, name = text.partition("=")
        if not (role and name):
            raise ConfigError(f"--role {text}: expected ROLE=SCHEDULE, e.g. --role low=mine")
        chosen[role] = name
    notes: dict[str, None] = {}
    token = _selection.set(Selection(tuple(where), chosen, notes))
    try:
        yield notes
    finally:  # after an error too: the notes may explain it
        _selection.reset(token)
        for sentence in notes if print_notes else ():
            print(f"note: {escape_control(sentence)}")


def select_and_separate(runs: Iterable[Record], where: Sequence[str] = ()) -> list[Record]:
    """Return the runs that ``where`` and the command select (`select_runs`), separated by
    `separate_experiments`."""
    command = _selection.get() or Selection()
    selected = _in_roles(select_runs(select_runs(runs, command.where), where), command.roles)
    selected = separate_experiments(selected)
    command.notes |= dict.fromkeys(write_notes(selected))
    return selected


def add_note(sentence: str) -> None:
    """Let the command say something of the runs that it has read (`select_while_loading`)."""
    if (command := _selection.get()) is not None:
        command.notes[sentence] = None


def _in_roles(runs: Sequence[Record], roles: Mapping[str, str]) -> list[Record]:
    """The runs; schedules in ``roles`` (name by role) are called by their roles.

    Raises:
        RecordError: no run of such a schedule.
    """
    names = dict.fromkeys(run.config["name"] for run in runs)
    for role, name in roles.items():
        if names and name not in names:
            raise RecordError(
                f"--role {role}={name}: no run of schedule {name!r}; {suggest_nearest(name, names)}"
            )
    role_of = {name: role for role, name in roles.items()}
    kept = []
    for run in runs:
        own, declared = run.config["name"], run.config.get("role")
        if own in role_of:
            kept.append(run.called(role_of[own]))
        elif own not in roles:
            kept.append(run.called(own) if declared in roles else run)
    return kept


def select_runs(runs: Iterable[Record], where: Sequence[str]) -> list[Record]:
    """Select the runs with each value in their header, e.g. ``["optimizer.lr=0.4", "name=low"]``: a
    value as in a configuration, the beginning of a digest, "none" for a field without a value.

    Raises:
        ConfigError: a condition that is not FIELD=VALUE.
        RecordError: a field that no run has, or no run with the value.
    """
    left = list(runs)
    for text in [where] if isinstance(where, str) else where:
        field, value, raw = _parse_condition(text)
        tables = [{"name": run.config["name"], **run.fields} for run in left]
        if left and not any(field in table for table in tables):
            known = dict.fromkeys(name for table in tables for name in table)
            raise RecordError(
                f"--where {text}: no run says {field!r}; {suggest_nearest(field, known)}"
            )
        chosen = [
            run
            for run, table in zip(left, tables, strict=True)
            if _equal(field, table.get(field), value, raw) or (field == "name" and run.name == raw)
        ]
        if left and not chosen:
            values = dict.fromkeys(field_text(field, table.get(field)) for table in tables)
            raise RecordError(f"--where {text}: no run has it; {field} is {', '.join(values)}")
        left = chosen
    return left


def _parse_condition(text: str) -> tuple[str, Any, str]:
    """(field, value, the value as it is written)."""
    field, _, raw = text.partition("=")
    if not (field and raw):
        raise ConfigError(f"--where {text}: expected FIELD=VALUE, e.g. --where optimizer.lr=0.4")
    return field, read_value(raw), raw


def _equal(field: str, recorded: Any, wanted: Any, raw: str) -> bool:
    if field.endswith("digest") and recorded is not None:
        return str(recorded).startswith(raw)
    same_kind = isinstance(recorded, bool) == isinstance(wanted, bool)  # 1 == True in Python
    return recorded == raw or (same_kind and recorded == wanted)


def last_metric(run: Record, last: int = 3) -> float:
    """Average the metric of a run's end: of the tests after the ``last`` units that end with the
    last test. A run that is tested more seldom has one test there; earlier ones are not of its end.
    It is nan where there is no test, or where the metric was not finite in one of these."""
    import numpy as np

    tested = run.tested_rows()
    metrics = [row["metric"] for row in tested if row["epoch"] > tested[-1]["epoch"] - last]
    reached = [math.nan if metric is None else metric for metric in metrics]
    return float(np.mean(reached)) if reached else math.nan


@check_arguments(error=RecordError)
def summary(runs: Iterable[Record], last: int = 3) -> pd.DataFrame:
    """Makes a table with one row per run.

    >>> from regimes import load_all
    >>> list(summary(load_all("data/reference/smoke-resnet8.tar.xz")).columns)[:3]
    ['name', 'seed', 'metric']

    Args:
        runs: The runs.
        last: The number of last epochs of which the metric is the mean (see `last_metric`).

    Returns:
        A table with the columns name, seed, metric, and the run's total floats, bytes and seconds.

    Raises:
        RecordError: a run has not ended.
    """
    import numpy as np
    import pandas as pd

    require(is_integer(last, 1), "last", last, "a number of epochs from 1 up")
    rows = []
    for run in separate_experiments(runs):
        run.check_finished()
        floats, count = run.column("floats"), run.column("bytes")
        assert floats is not None
        assert count is not None
        spent = [run.clock.get(row["epoch"], {}) for row in run.rows]
        purposes = dict.fromkeys(purpose for seconds in spent for purpose in seconds)
        by_purpose = [np.sum([seconds.get(x, 0.0) for seconds in spent]) for x in purposes]
        rows.append(
            {
                "name": run.name,
                "seed": run.seed,
                "metric": last_metric(run, last),
                "floats": float(floats.sum()),
                "bytes": int(count.sum()),
                "seconds": float(np.sum(by_purpose)),
            }
        )
    return pd.DataFrame(rows)
