"""The record of a user's own training job, as the trainer writes its own (``regimes.records``).

Process 0 writes it, a unit at a time. A unit's row waits until the next unit's first step, so that
what a script measures between the two still goes into it. A row that cannot be written (a full
disk) waits on, with a warning: the job is somebody else's, and no record is worth its end.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from torch import Tensor

from regimes.collectives.group import GroupWorld
from regimes.ddp.recording import Recording
from regimes.errors import RecordError, RegimesError, require
from regimes.records import Writer, complete, read_header, read_lines, reporters
from regimes.training.reporters import Reporters

Row = dict[str, Any]
LOSSES = ("train_loss", "test_loss")
SAME = (
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


class Journal:
    """The record of one hook, on process 0.

    Attributes:
        header: of the record.
        writer: None until the first step, and after ``close``.
        watchers: who else is told; one that fails is left out.
        waiting: rows that are not written yet, each with its seconds and details.
        kept: the seconds and details of rows that a state had not written yet, by unit.
        fresh: the last of them may still get what is logged.
        closed: the record has ended; what comes later is not its.
    """

    def __init__(self, about: Recording, header: Row) -> None:
        self.about, self.header, self.folder = about, header, Path(about.folder)
        self.writer: Writer | None = None
        self.watchers = Reporters(())
        self.waiting: list[tuple[Row, dict[str, float], Row]] = []
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.kept: dict[int, tuple[dict[str, float], Row]] = {}
        self.fresh = self.warned = self.closed = False

    @property
    def claim(self) -> str:
        """What a job has once: this folder."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()

    # -- start and continue ------------------------------------------------------------------

    def open(self, rows: list[Row], continued: bool) -> None:
        """Start the record, or continue it after ``rows``.

        Raises:
            RecordError: the folder cannot be written, or holds a run that is not continued, or of
                another configuration.
            ConfigError: a package that a reporter needs is missing.
        """
        self.waiting = []
        self.watchers = Reporters(reporters(self.about.reporters, self.folder))
        there = (self.folder / "run.json").exists()
        written = read_lines(self.folder / "epochs.jsonl") if there else []
        if written and not continued:
            self._check_unfinished(written)
        if there and (continued or written):
            self._check_same()
            self.writer = Writer.resume(
                self.folder, min(len(rows), len(written)), workers=self.header["world"]["workers"]
            )
            self.writer.amend(units=self.about.units)
        else:  # also in place of a job that ended before its first unit did
            self.writer = Writer.create(self.folder, self.header)
        self.waiting = [
            (_whole(row), *self.kept.get(row["epoch"], ({}, {}))) for row in rows[len(written) :]
        ]
        self.watchers.event_log = self.writer.event
        self.watchers.start(self.header, written[: len(rows)])

    def _check_unfinished(self, written: list[Row]) -> None:
        """A job that was killed before it had a checkpoint starts again in its folder; the rows of
        units that are trained again are set aside (``superseded.jsonl``)."""
        if complete(read_header(self.folder), written):
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
        theirs, ours = read_header(self.folder), self.header
        differ = [k for k in SAME if theirs["config"].get(k) != ours["config"].get(k)]
        differ += ["layers"] * (theirs["layers"] != ours["layers"])
        if differ:
            raise RecordError(
                f"{self.folder} holds a run with another {', '.join(differ)}: continue it as it "
                "was, or choose another folder"
            )

    def leave(self) -> None:
        """Until the record is opened again: the job goes on from a state, maybe an earlier one."""
        if self.writer is not None:
            self.writer.close()
            self.watchers.stop("")
        self.writer, self.waiting, self.fresh = None, [], False

    # -- what happens ------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values of the unit under way, or of the one just ended."""
        for name, value in values.items():
            known = _one_number(value) if isinstance(value, Tensor) else isinstance(value, Real)
            known &= not (isinstance(value, Integral) and abs(int(value)) >= 2**1023)  # no float
            require(known, f"log: {name}", value, "a number")
            number = value.detach() if isinstance(value, Tensor) else float(value)
            self.sums[name] = self.sums.get(name, 0.0) + number
            self.counts[name] = self.counts.get(name, 0) + 1

    def add(self, row: Row, seconds: dict[str, float], details: Row) -> None:
        """A unit is over."""
        self.waiting.append((row, seconds, details))
        self.fresh = True

    def flush(self) -> None:
        """The next unit begins, or the job is over: write what waits."""
        self.fill()
        begun, self.fresh = self.fresh, False
        while begun and self.waiting and self.writer is not None:
            try:
                self.writer.epoch(*self.waiting[0])
            except Exception as error:  # of the disk, or of a row that a user's policy has spoilt
                if not self.warned:
                    why = "" if isinstance(error, RecordError) else "a row cannot be written: "
                    warnings.warn(f"{why}{error}; training goes on, and rows wait", stacklevel=2)
                self.warned = True
                return
            row, seconds, _ = self.waiting.pop(0)
            self.watchers.epoch(row, seconds)

    def fill(self) -> None:
        """Put what was logged, means over the calls, into the row of the unit that has just ended;
        what is logged while a unit goes on waits for its row."""
        if not self.fresh or not self.counts:
            return
        row = self.waiting[-1][0]
        means = {name: _number(self.sums[name]) / n for name, n in self.counts.items()}
        self.sums, self.counts = {}, {}
        found = {name: x if math.isfinite(x) else None for name, x in means.items()}
        for name in LOSSES:
            row[name] = found.pop(name, row[name])
        metric = found.pop(self.about.metric, found.pop("metric", row["metric"]))
        row["metric"] = row["test_loss"] if self.about.metric == "loss" else metric
        row["logged"] |= found

    def state_dict(self) -> Row:
        """What was logged since the last unit, and what belongs to the rows that are not written
        yet, in plain types."""
        return {
            "sums": {k: _number(v) for k, v in self.sums.items()},
            "counts": dict(self.counts),
            "waiting": [
                {"epoch": row["epoch"], "seconds": dict(seconds), "details": copy.deepcopy(details)}
                for row, seconds, details in self.waiting
            ],
        }

    def load_state_dict(self, state: Row) -> None:
        """The inverse."""
        self.sums, self.counts = dict(state.get("sums", {})), dict(state.get("counts", {}))
        waiting = state.get("waiting", [])
        self.kept = {row["epoch"]: (row["seconds"], row["details"]) for row in waiting}

    # -- the end -----------------------------------------------------------------------------

    def close(self, units: int, why: str = "") -> None:
        """End the record after so many units.

        Args:
            why: the job did not end well.
        """
        self.fresh |= bool(self.waiting)
        self.flush()
        writer, self.writer, self.closed = self.writer, None, True
        if writer is None:
            return
        try:
            short = self.about.units is not None and units < self.about.units
            if short and not why:
                why = f"the job ended after {units} of {self.about.units} units"
            if not why:
                writer.amend(units=units)
                writer.event("end")
            else:
                writer.event("stopped", why=why)
        except RecordError as error:
            print(f"regimes: {error}", file=sys.stderr)
        self.watchers.stop(why)
        writer.close()


def open_together(
    world: GroupWorld, journal: Journal | None, rows: list[Row], continued: bool
) -> Journal | None:
    """Open the journal of process 0; all processes hear of it if that fails. Where several groups
    of a job have one folder (a group for each tensor-parallel rank), the first one's record it is.

    Returns:
        The journal, unless it is another group's.

    Raises:
        RecordError: as ``Journal.open`` does, on all of them.
    """
    failure = None
    if journal is not None:
        first, *others = world.claimants(journal.claim)
        if first != world.first:
            warnings.warn(
                f"hook: {journal.folder} has the record of the group of process {first}: levels "
                f"and traffic of the group of process {world.first} are not in it",
                stacklevel=2,
            )
            journal = None
        elif others:
            journal.header["world"]["groups"] = 1 + len(others)
    if journal is not None:
        try:
            journal.open(rows, continued)
        except RegimesError as error:
            failure = str(error)
    if failure := world.gather_object(failure)[0]:
        raise RecordError(failure)
    return journal


def _one_number(value: Tensor) -> bool:
    """Does a tensor hold one real number? On the device "meta" it holds none."""
    return value.numel() == 1 and not value.is_meta and not value.is_complex()


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _whole(row: Row) -> Row:
    """A row that comes out of a hook's state; RecordError if it says too little."""
    if "floats" not in row:
        raise RecordError(
            "the hook's state was saved without a record and by an earlier version, whose rows do "
            "not say what was sent: choose a new folder and start without that state"
        )
    return json.loads(json.dumps(row))
