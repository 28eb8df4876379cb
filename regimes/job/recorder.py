"""The record of a user's own training job, in the trainer's format (``regimes.records``).

Process 0 writes it, a unit at a time. The row of a unit is written at the next unit's first step:
until then ``log`` still adds to it, so that an evaluation between two units belongs to the first.
A row that cannot be written (a full disk) stays pending, with one warning: a record must not end
the user's job.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from regimes import compression, policies
from regimes.base.errors import ConfigError, RecordError, is_integer, require, unexpected_value
from regimes.base.precision import full_precision
from regimes.job.given import GivenInstruments, GivenProbe
from regimes.job.reporters import Reporters
from regimes.records import (
    OWN,
    Header,
    RecordWriter,
    Row,
    check_reporters,
    is_complete,
    make_reporters,
    read_header,
    read_lines,
)
from regimes.records.schema import FileState

_LOSSES = ("train_loss", "test_loss")
_REGISTRIES = {"compressor": compression.REGISTRY, "policy": policies.REGISTRY}
_SAME = (  # of the configuration, in a job that is continued
    "name",
    "seed",
    "workers",
    "compressor",
    "levels",
    "policy",
    "signal",
    "unit_steps",
    "start_compressing_after",
)


@dataclass(frozen=True)
class RecordOptions:
    """Says what is recorded, measured and checked in a job.

    Attributes:
        folder: The folder of the record: a new folder, or the folder of the job that is continued.
            None: nothing is written.
        name: The name of the schedule; figures and tables group runs by it. None: the policy's.
        data: The name of the data set.
        batch_size: The number of samples per process and step.
        metric: The name under which the script logs its result. Figures know "accuracy" (as a share
            of one), "perplexity" and "bits per byte".
        units: The number of units that the job will have, for progress. None: it is not known.
        reporters: What else shows each unit: "tensorboard", "wandb", ... (``reporters`` of a
            configuration).
        instruments: The instruments that measure in each unit, by name: ``{"error", "residual"}``,
            or a table with their fields, ``{"error": {}}``. With ``probe`` there are also
            "curvature" and "sharpness". The training ends in the same bits with and without
            instruments.
        probe: What "curvature" and "sharpness" measure: a pair (loss, batches). ``loss(model,
            batch)`` is the mean over a batch. ``batches`` is one batch or a list: this process's
            share of the samples, equally many on each process. ``model`` is the model inside
            DistributedDataParallel; a model that FSDP2 divides is gathered for this. Regimes finds
            by trials whether the loss is a mean over samples or over labelled tokens. If it is
            neither, add a third part, ``weight(batch)``, which returns what the loss divides by.
        check_every: The number of steps (with local steps, synchronisations) after which the
            gradient is exchanged once more, uncompressed, and compared with the update. The record
            has the cosine per layer. Nothing else changes.
        check_cosine: Process 0 warns if the cosine of the model is below this, by default 0.3.
        summary: Print to stderr on process 0, as the job ends, what was sent and how long processes
            waited; with a compressor in `attach_shards` also, at once, what its residuals cost in
            memory.
        compare_weights: Compare a hash of the model's weights between processes, once in each unit
            and at ``close()``, and check that the parameters are those that were attached. An error
            names processes that have drifted apart, and parameters whose gradients are not
            exchanged. It sends a few bytes with what is compared anyway.
    """

    folder: str | Path | None = None
    name: str | None = None
    data: str = OWN
    batch_size: int | None = None
    metric: str = "loss"
    units: int | None = None
    reporters: tuple[str, ...] = ()
    instruments: GivenInstruments | None = None
    probe: GivenProbe | None = None
    check_every: int | None = None
    check_cosine: float | None = None
    summary: bool = True
    compare_weights: bool = True

    def __post_init__(self) -> None:
        require("\0" not in str(self.folder), "record", self.folder, "a folder: no path has a NUL")
        for field in ("batch_size", "units"):
            value = getattr(self, field)
            good = value is None or is_integer(value, 1)
            require(good, f"RecordOptions.{field}", value, "a whole number from 1 up")
        names = (self.reporters,) if isinstance(self.reporters, str) else tuple(self.reporters)
        check_reporters(names)
        for name in ("summary", "compare_weights"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "true or false")
        object.__setattr__(self, "reporters", names)


def record_options(record: Any) -> RecordOptions:
    """Make options of the argument ``record`` of ``attach``: a folder, options or None.

    Raises:
        ConfigError: it is something else.
    """
    folder = record.folder if isinstance(record, RecordOptions) else record
    if folder is not None and (not isinstance(folder, str | Path) or not str(folder)):
        raise unexpected_value("record", record, "a folder, or regimes.RecordOptions(folder, ...)")
    options = record if isinstance(record, RecordOptions) else RecordOptions(folder)
    shown = ", ".join(options.reporters)
    require(folder is not None or not shown, "RecordOptions.reporters", shown, "a folder as well")
    return options


def _same_entry(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Do two plain configurations agree in an entry? A version before may have known fewer fields
    of a plug-in: they have their defaults."""
    table, registry = old.get(key), _REGISTRIES.get(key)
    if table != new.get(key) and registry is not None and table is not None:
        with suppress(ConfigError):
            table = registry.table(registry.make(table))
    return table == new.get(key)


class _PendingRow(NamedTuple):
    """What ``RecordWriter.epoch`` takes."""

    row: Row
    seconds: dict[str, float]
    details: dict[str, Any]


class JobRecorder:
    """Writes the record of one hook or of local steps, on process 0.

    Attributes:
        header: of the record.
        writer: None until the first step, and after ``close``.
        reporters: TensorBoard and others; an exception in one never stops training.
        pending: rows that are not written yet.
        sums, counts: of the values logged for the open row, or without one for the unit under way,
            by name.
        restored: the seconds and details of rows that were pending in a loaded state, by unit.
        row_is_open: ``log`` still adds to the last pending row.
        closed: the record has ended; later units are not written.
    """

    def __init__(self, options: RecordOptions, header: Header) -> None:
        self.options, self.header, self.folder = options, header, Path(options.folder or "")
        self.writer: RecordWriter | None = None
        self.reporters = Reporters(())
        self.pending: list[_PendingRow] = []
        self.sums: dict[str, float | Tensor] = {}
        self.counts: dict[str, int] = {}
        self.restored: dict[int, tuple[dict[str, float], dict[str, Any]]] = {}
        self.row_is_open = self.warned = self.closed = False

    @property
    def folder_key(self) -> str:
        """Name the folder in the store of the process group (``collectives.claims``)."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()

    @property
    def file_state(self) -> FileState | None:
        """Return the number of lines of the file of units, and their digest; None while it is not
        open."""
        return None if self.writer is None else self.writer.state("epochs.jsonl")

    # -- start and continue ------------------------------------------------------------------

    def open_record(self, rows: list[Row], continued: bool) -> None:
        """Start the record, or continue it after ``rows``.

        Raises:
            RecordError: the folder cannot be written, or holds a run that is not continued, or of
                another configuration.
            ConfigError: a package that a reporter needs is missing.
        """
        self.pending = []
        self.reporters = Reporters(make_reporters(self.options.reporters, self.folder))
        exists = (self.folder / "run.json").exists()
        written = cast("list[Row]", read_lines(self.folder / "epochs.jsonl") if exists else [])
        if written and not continued:
            self._check_unfinished(written)
        if exists and (continued or written):
            self._check_same()
            self.writer = RecordWriter.resume(
                self.folder, min(len(rows), len(written)), workers=self.header["world"]["workers"]
            )
            self.writer.amend(units=self.options.units)
        else:  # also in place of a job that ended before its first unit did
            self.writer = RecordWriter.create(self.folder, self.header)
        self.pending = [
            _PendingRow(json.loads(json.dumps(row)), *self.restored.get(row["epoch"], ({}, {})))
            for row in rows[len(written) :]
        ]
        self.reporters.event_log = self.writer.event
        self.reporters.start(self.header, written[: len(rows)])

    def note_branch(self, unit: int) -> None:
        """Note that a branch begins at a unit; its trunk's rows come before."""
        if self.writer is not None:
            self.writer.event("changed", epoch=unit)

    def _check_unfinished(self, written: list[Row]) -> None:
        """A job that was killed before its first checkpoint starts again in its folder; the rows of
        units that are trained again are set aside (``superseded.jsonl``)."""
        if is_complete(read_header(self.folder), written):
            raise RecordError(
                f"{self.folder} already holds a run: load the state of its hook to continue it, "
                "or choose another folder"
            )
        warnings.warn(
            f"{self.folder} holds {len(written)} units of a job that did not end, and no state of "
            "its hook was loaded: training starts again, and these rows are set aside in "
            "superseded.jsonl",
            stacklevel=2,
        )

    def _check_same(self) -> None:
        old, new = read_header(self.folder), self.header
        differ = [k for k in _SAME if not _same_entry(k, old["config"], new["config"])]
        differ += ["layers"] * (old["layers"] != new["layers"])
        if differ:
            raise RecordError(
                f"{self.folder} holds a run that differs in {', '.join(differ)}: continue it as it "
                "was, or choose another folder"
            )

    def close_files(self) -> None:
        """Close the files until ``open_record``, because a loaded state may be an earlier one."""
        self._close_row()
        if self.writer is not None:
            self.writer.close()
            self.reporters.stop("")
        self.writer, self.pending = None, []

    # -- while the job trains ----------------------------------------------------------------

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Add values to the unit under way, or to the open row of the unit before.

        Raises:
            ConfigError: a value that is no real number.
        """
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + logged_number(name, value)
            self.counts[name] = self.counts.get(name, 0) + 1

    def take_logged(self) -> dict[str, float]:
        """Take the means of the values that were logged since the last call."""
        means = self._logged_means()
        self.sums, self.counts = {}, {}
        return means

    def _logged_means(self) -> dict[str, float]:
        return {name: float(_to_number(self.sums[name]) / n) for name, n in self.counts.items()}

    def add_row(self, row: Row, seconds: dict[str, float], details: dict[str, Any]) -> None:
        """Add the row of a unit that is over; the row stays open until ``write_pending``."""
        self.pending.append(_PendingRow(row, seconds, details))
        self.row_is_open = True

    def write_pending(self) -> None:
        """Write pending rows, as the next unit begins or the job ends."""
        was_open = self.row_is_open
        self._close_row()
        while was_open and self.pending and self.writer is not None:
            try:
                self.writer.epoch(*self.pending[0])
            except Exception as error:  # of the disk, or of a row that a user's policy has spoilt
                if not self.warned:
                    why = "" if isinstance(error, RecordError) else "a row cannot be written: "
                    said = f"{why}{error}; training goes on, rows are kept in memory"
                    warnings.warn(said, stacklevel=2)
                self.warned = True
                return
            done = self.pending.pop(0)
            self.reporters.epoch(done.row, done.seconds)

    def _close_row(self) -> None:
        """From now on values belong to the unit under way."""
        self.merge_logged()
        if self.row_is_open:
            self.sums, self.counts = {}, {}
        self.row_is_open = False

    def merge_logged(self) -> None:
        """Put the mean of each logged value into the open row, which stays open: the mean of what
        is logged later has the same values. Without an open row values wait."""
        if not self.row_is_open or not self.counts:
            return
        row: dict[str, Any] = cast("dict[str, Any]", self.pending[-1].row)
        logged = {k: x if math.isfinite(x) else None for k, x in self._logged_means().items()}
        for name in _LOSSES:
            row[name] = logged.pop(name, row[name])
        own = "test_loss" if self.options.metric == "loss" else self.options.metric
        if own in _LOSSES:  # a value named metric stays among the logged
            row["metric"] = row[own]
        else:
            metric = logged.pop("metric", row["metric"])
            row["metric"] = logged.pop(own, metric)
        row["logged"] |= logged

    def state_dict(self) -> dict[str, Any]:
        """Return the values logged since the last unit, and clocks and details of pending rows, in
        plain types. The rows themselves are in the job's state, with what ``merge_logged`` has put
        there."""
        waiting = {} if self.row_is_open else self.sums
        return {
            "sums": {k: _to_number(v) for k, v in waiting.items()},
            "counts": {k: self.counts[k] for k in waiting},
            "waiting": [
                {"epoch": row["epoch"], "seconds": dict(seconds), "details": copy.deepcopy(details)}
                for row, seconds, details in self.pending
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums, self.counts = dict(state.get("sums", {})), dict(state.get("counts", {}))
        waiting = state.get("waiting", [])
        self.restored = {row["epoch"]: (row["seconds"], row["details"]) for row in waiting}

    # -- the end -----------------------------------------------------------------------------

    def end_record(self, units: int, why: str = "") -> None:
        """End the record after so many units.

        Args:
            why: the error that has ended the job, if one has.
        """
        self.row_is_open |= bool(self.pending)
        self.write_pending()
        writer, self.writer, self.closed = self.writer, None, True
        if writer is None:
            return
        expected = self.options.units
        if not why and expected is not None and units < expected:
            why = f"the job ended after {units} of {expected} units"
        try:
            if why:
                writer.event("stopped", why=why)
            else:
                writer.amend(units=units)
                writer.event("end")
        except RecordError as error:
            print(f"regimes: {error}", file=sys.stderr)
        self.reporters.stop(why)
        writer.close()


def logged_number(name: str, value: Any) -> float | Tensor:
    """Return a value that a script logs; raise ConfigError unless it is one real number. A tensor
    stays on its device: ``.item()`` here would wait for the GPU at each step."""
    good = isinstance(value, Real)
    if isinstance(value, Tensor):  # on the device "meta" it holds no number
        good = value.numel() == 1 and not value.is_meta and not value.is_complex()
    good &= not (isinstance(value, Integral) and abs(int(value)) >= 2**1023)  # no float
    require(good, f"log: {name}", value, "a number")
    if not isinstance(value, Tensor):
        return float(value)
    # a sum of 16 bits soon stands still: in bfloat16 256 + 1 is 256
    return full_precision(value.detach())


def check_undivided(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value is a DTensor of which each process has a part: to read its value
    is a collective, and process 0 alone records."""
    for name, value in values.items():
        placements = getattr(value, "placements", ())
        if isinstance(value, Tensor) and not all(x.is_replicate() for x in placements):
            raise ConfigError(
                f"log: {name} is a DTensor of which each process has a part "
                f"({', '.join(map(str, placements))}): pass {name}.full_tensor(), on all processes"
            )


def _to_number(value: float | Tensor) -> Any:
    return value.item() if isinstance(value, Tensor) else value
