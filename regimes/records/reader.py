"""Records read back as tables. No torch; pandas is imported with the first frame."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import RecordError
from regimes.records import shown
from regimes.records.branches import read_all, read_rows
from regimes.records.extent import format_progress, is_complete
from regimes.records.fields import Fields, header_fields, identifying_fields
from regimes.records.lines import read_header
from regimes.records.schema import Header, Row, is_hooked

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

LOSSES = ("train_loss", "test_loss", "validation_loss")
NULLABLE = (*LOSSES, "metric", "validation_metric", "perplexity", "batch_size")
YOKED = "yoked "  # controls recorded before `drawn_per_seed` was a field of configurations
OF_RUN = ("schedule", "seed")  # columns that tables of several runs have before the others
COMPUTED = ("seconds_", "total_")  # prefixes of columns that are no part of a row
IN_EVERY_ROW = ("train_loss", "test_loss", "metric", "floats", "bytes")


@dataclass(frozen=True, repr=False)
class Record:
    """Holds a run that was read back.

    Attributes:
        folder: The folder that was read.
        header: The content of ``run.json``, with the keys "config", "layers", "code", "machine" and
            others.
        rows: The lines of ``epochs.jsonl`` as they are. Only read them: equal columns of successive
            rows are one list.
        details: The lines of ``instruments.jsonl`` as they are.
        processes: For a run on several processes, the seconds of each process by purpose, per
            epoch: ``{"epoch": 0, "compute": [1.2, 1.9], ...}``.
        clock: The seconds of each epoch by purpose.
        variant: How the run differs from other runs of the same name that were read together with
            it. Empty if it does not differ.
    """

    folder: Path
    header: Header
    rows: list[Row]
    details: list[dict[str, Any]]
    processes: list[dict[str, Any]] = field(default_factory=list)
    clock: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    variant: str = ""

    def __repr__(self) -> str:
        """One line: the rows of a run would be thousands."""
        trained = format_progress(self.header, self.rows, " of ")
        return f"<Record {self.name}, seed {self.seed}: {trained}, {self.folder}>"

    def _repr_html_(self) -> str:
        return shown.as_html([shown.of_run(self)])

    @property
    def config(self) -> dict[str, Any]:
        """Return the configuration of the run, as tables of its keys."""
        return self.header["config"]

    @property
    def name(self) -> str:
        """Return the name of the schedule. If runs of several experiments with one name were read
        together, it also says in brackets how this run differs (``variant``)."""
        own = self.config["name"]
        return f"{own} ({self.variant})" if self.variant else own

    @cached_property
    def epochs(self) -> pd.DataFrame:
        """Give one row per epoch: epoch, lr, train_loss, test_loss, metric, floats, bytes,
        seconds_*, validation_loss and validation_metric where samples were held out, what a hook's
        user has logged (`logged_values`), and ``total_floats``, ``total_bytes`` summed up to the
        epoch's end."""
        return _epochs_table(self.rows, self.clock)

    def column(self, name: str) -> np.ndarray | None:
        """Return a column of ``epochs`` as an array, or None if there is no such column. For
        columns that every run has this is faster than making the table."""
        import numpy as np

        if name in IN_EVERY_ROW and self.rows and "epochs" not in vars(self):
            values = (cast("dict[str, Any]", row)[name] for row in self.rows)
            return np.array([math.nan if value is None else value for value in values])
        return self.epochs[name].to_numpy() if name in self.epochs else None

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Give one row per epoch and layer: level, floats, bytes, why, and each statistic."""
        return layers_table([layer["name"] for layer in self.header["layers"]], self.rows)

    @cached_property
    def fields(self) -> Fields:
        """Return the header by dotted path; see `fields.header_fields`."""
        return header_fields(self.header, self.rows)

    @cached_property
    def identity(self) -> Fields:
        """Return the fields in which all runs of the experiment agree, see `same_experiment`."""
        yoked = ("policy.layers",) if self.config["name"].startswith(YOKED) else ()
        return identifying_fields(self.fields, self.config.get("drawn_per_seed", yoked) or ())

    def varied(self, variant: str) -> Record:
        """Return a copy with another ``variant``."""
        return self._changed(variant=variant)

    def called(self, name: str) -> Record:
        """Return a copy in which the schedule has another name. Figures also take this name for
        its role, the part that a schedule plays in them."""
        config = self.config | {"name": name, "role": name}
        return self._changed(header=self.header | {"config": config})

    def _changed(self, **fields: Any) -> Record:
        """A copy, which takes over what was computed of this run."""
        other = replace(self, **fields)
        computed = ("epochs", "layers", "fields", "identity")
        vars(other).update({x: vars(self)[x] for x in computed if x in vars(self)})
        return other

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.config["seed"]

    @property
    def rate(self) -> float:
        """Return the configured learning rate, the highest of the run; nan if it is not known."""
        known = (self.config["optimizer"] or {}).get("lr")
        return math.nan if known is None else float(known)

    @property
    def finished(self) -> bool:
        """Answer whether the run has trained all its units, or has spent its budget of floats."""
        return is_complete(self.header, self.rows)

    @property
    def hooked(self) -> bool:
        """Answer whether the record is of a training script with a hook or with local steps, and
        not of a run of Regimes."""
        return is_hooked(self.header)

    def tested_rows(self) -> list[Row]:
        """Return the rows of the units after which the run was tested. In a hook's record these are
        the units in which the script has logged a metric. In other records they are every
        ``evaluate_every``-th unit and the last one; if the metric of such a unit is None, it was
        not finite."""
        if self.hooked:
            return [row for row in self.rows if row["metric"] is not None]
        every, end = self.config.get("evaluate_every", 1), self.rows[-1] if self.finished else None
        return [row for row in self.rows if (row["epoch"] + 1) % every == 0 or row is end]

    def check_finished(self) -> None:
        """Do nothing if the run is finished.

        Raises:
            RecordError: it is not finished; the error says what to do.
        """
        if not self.finished or not self.rows:
            how = (
                "its training has not ended, or was broken off; `regimes report` shows it as it is"
                if self.hooked
                else "finish it with --resume before it is summarised or drawn"
            )
            raise RecordError(
                f"{self.folder} has {format_progress(self.header, self.rows, ' of ')}: {how}"
            )

    @property
    def statistic(self) -> str:
        """Return the name of the column of ``layers`` that the run's detectors read, such as
        "norm:update"."""
        return f"norm:{self.config['signal']}"


@check_arguments(error=RecordError)
def load(folder: str | Path) -> Record:
    """Reads one run.

    >>> from regimes import get_preset, override, run
    >>> short = ["epochs=1", "data.train_size=100", "optimizer.decay_epochs=[]"]
    >>> _ = run(override(get_preset("smoke"), short), "runs/loaded")
    >>> record = load("runs/loaded")
    >>> record.header["config"]["workers"], len(record.epochs)
    (4, 1)

    Args:
        folder: The folder of the run.

    Returns:
        The record. ``record.epochs`` has a row per epoch, and ``record.layers`` a row per epoch and
        layer.

    Raises:
        RecordError: there is no run in the folder, or its record violates the schema.
    """
    folder = Path(folder)
    header = read_header(folder)
    rows = read_rows(folder, header)
    details, seconds = (read_all(folder, header, f"{x}.jsonl") for x in ("instruments", "seconds"))
    if 0 < len(seconds) < len(rows):  # written before each epoch: no crash leaves this
        raise RecordError(f"{folder}/seconds.jsonl ends after {len(seconds)} of {len(rows)} epochs")
    processes = [{"epoch": s["epoch"], **s.pop("processes")} for s in seconds if "processes" in s]
    clock = {s.pop("epoch"): s for s in seconds}
    return Record(folder, header, rows, details, processes, clock)


def find_runs(folder: str | Path) -> list[Path]:
    """Find every run in or under a folder, sorted. Links to folders are followed; a folder that is
    reached twice counts once."""
    found, seen = list[Path](), {os.path.realpath(folder)}
    for place, folders, files in os.walk(folder, onerror=_raise_strange, followlinks=True):
        paths = [os.path.join(place, name) for name in folders]
        folders[:] = [  # links last: a folder is named by its own path
            os.path.basename(path)
            for path in sorted(paths, key=lambda path: (os.path.islink(path), path))
            if _is_new(path, seen)
        ]
        if "run.json" in files:
            found.append(Path(place))
    return sorted(found)


def _raise_strange(error: OSError) -> None:
    """A folder that is not there, or that nobody may read, has no runs; a path that there cannot be
    is an error."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


def _is_new(place: str, seen: set[str]) -> bool:
    """Whether a folder is reached for the first time; it is then noted in ``seen``."""
    real = os.path.realpath(place)
    new = real not in seen
    seen.add(real)
    return new


def _epochs_table(rows: Sequence[Row], seconds: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    import pandas as pd

    columns = logged_values(rows)
    table = pd.DataFrame(
        [
            _scalars(row)
            | {columns[name]: value for name, value in row.get("logged", {}).items()}
            | {f"seconds_{k}": v for k, v in seconds.get(row["epoch"], {}).items()}
            for row in rows
        ]
    )
    _as_floats(table, [x for x in table if x in NULLABLE or table[x].isna().all()])
    for name in ("floats", "bytes") if len(table) else ():
        table[f"total_{name}"] = table[name].cumsum()
    return table


def _as_floats(table: pd.DataFrame, names: Iterable[str]) -> None:
    """Make columns of null alone, which pandas takes for objects, columns of nan."""
    for name in names:
        if table[name].dtype == object:
            table[name] = table[name].astype(float)


def logged_values(rows: Sequence[Row]) -> dict[str, str]:
    """Map the further values that a user's training has logged, by name, to columns of the epochs;
    a column begins with "logged_" where another column has the name."""
    names = dict.fromkeys(name for row in rows for name in row.get("logged", {}))
    taken = {*OF_RUN, *(name for row in rows for name in _scalars(row))} if names else ()
    return {
        name: f"logged_{name}" if name in taken or name.startswith(COMPUTED) else name
        for name in names
    }


def _scalars(row: Row) -> dict[str, Any]:
    """The single values of a row; a statistic of the model begins with "model_" where another value
    has its name."""
    plain: dict[str, Any] = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
    plain |= {f"lr_{i}": rate for i, rate in enumerate(row.get("group_lr") or ()) if i}
    model = {f"model_{k}" if k in plain else k: v for k, v in row.get("model", {}).items()}
    validation = {f"validation_{k}": v for k, v in row.get("validation", {}).items()}
    sync = row.get("sync", {})
    local = {k: sync.get(k) for k in ("period", "rounds")} if sync.get("level") else {}
    # up to version 0.4 workers of a simulated run could be absent; those in the mean step
    churn: dict[str, Any] = row.get("churn", {})
    there = {"present": churn["worker_steps"] / row["steps"]} if churn else {}
    return plain | model | validation | local | there


def layers_table(names: Sequence[str], rows: Sequence[Row]) -> pd.DataFrame:
    import pandas as pd

    tables: list[dict[str, Any]] = [
        {"layer": names, **row["layers"], **row["statistics"], "epoch": [row["epoch"]] * len(names)}
        for row in rows
    ]
    columns, absent = dict.fromkeys(["layer", *(x for t in tables for x in t)]), [None] * len(names)
    table = pd.DataFrame(
        {x: [*chain.from_iterable(t.get(x, absent) for t in tables)] for x in columns}
    )
    _as_floats(table, dict.fromkeys(x for row in rows for x in row["statistics"]))
    return table
