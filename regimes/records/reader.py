"""Records read back as tables. No torch; pandas comes with the first frame."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.errors import RecordError
from regimes.records import frames
from regimes.records.experiment import fields, resolved, separate
from regimes.records.extent import complete, progress
from regimes.records.lines import check_together, read_header, read_lines
from regimes.records.said import hooked

if TYPE_CHECKING:
    import pandas as pd

FREE_ON_RESUME = {
    "device",
    "checkpoint_every",
    "checkpoint_seconds",
    "reporters",
    "timeout",
    "bucket_mb",
    "quirks",  # what it does is spelt out in other fields
}  # may differ from the start


def check_same(folder: Path, ours: dict[str, Any]) -> None:
    """Raise RecordError unless the run in ``folder`` has this (plain, resolved) configuration."""
    theirs = resolved(read_header(folder)["config"])
    keys = {*ours, *theirs} - FREE_ON_RESUME
    differ = sorted(k for k in keys if theirs.get(k) != ours.get(k))
    if differ:
        raise RecordError(
            f"{folder} holds a run with another {', '.join(differ)}: continue it with its own "
            "configuration or choose another --out"
        )


@dataclass(frozen=True)
class Record:
    """A run read back.

    Attributes:
        header: ``run.json`` (keys "config", "layers", "code", "machine", ...).
        epochs: one row per epoch: epoch, lr, train_loss, test_loss, metric, floats, bytes,
            seconds_*, validation_loss and validation_metric where samples were held out, what a
            hook's user has logged (`frames.logged`), and ``total_floats``, ``total_bytes`` summed
            up to the epoch's end.
        layers: one row per epoch and layer: level, floats, bytes, why, and each statistic.
        rows, details: the lines of ``epochs.jsonl`` and ``instruments.jsonl`` as they are.
        processes: of a run on several processes, per epoch the seconds of each by what they went
            into: ``{"epoch": 0, "compute": [1.2, 1.9], ...}``.
        variant: what the run differs in from others of its name that were read with it, see
            `experiment.separate`; empty if there are none.
    """

    folder: Path
    header: dict[str, Any]
    epochs: pd.DataFrame
    layers: pd.DataFrame
    rows: list[dict[str, Any]]
    details: list[dict[str, Any]]
    processes: list[dict[str, Any]] = field(default_factory=list)
    variant: str = ""

    @property
    def config(self) -> dict[str, Any]:
        return self.header["config"]

    @property
    def name(self) -> str:
        """Of the schedule: only seeds of one experiment share it, see `experiment.separate`."""
        own = self.config["name"]
        return f"{own} ({self.variant})" if self.variant else own

    @cached_property
    def said(self) -> dict[str, Any]:
        """What the header says, by dotted path; see `experiment.fields`."""
        return fields(self)

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def rate(self) -> float:
        """The learning rate of its configuration; nan where that does not say."""
        known = (self.config["optimizer"] or {}).get("lr")
        return math.nan if known is None else float(known)

    @property
    def finished(self) -> bool:
        return complete(self.header, self.rows)

    @property
    def hooked(self) -> bool:
        """Has the DDP hook written it, of a user's own training?"""
        return hooked(self.header)

    def check_finished(self) -> None:
        """Raise RecordError, with what to do about it, unless the run is finished."""
        if not self.finished or not self.rows:
            how = (
                "its training has not ended, or was broken off; `regimes report` shows it as it is"
                if self.hooked
                else "finish it with --resume before it is summarised or drawn"
            )
            raise RecordError(
                f"{self.folder} has {progress(self.header, self.rows, ' of ')}: {how}"
            )

    @property
    def statistic(self) -> str:
        """The column of ``layers`` that the run's detectors read."""
        return f"norm:{self.config['signal']}"


def load(folder: str | Path) -> Record:
    """Read one run."""
    folder = Path(folder)
    header, rows = read_header(folder), read_lines(folder / "epochs.jsonl")
    check_together(header, rows, folder / "epochs.jsonl")
    details = read_lines(folder / "instruments.jsonl")
    spent = read_lines(folder / "seconds.jsonl")
    each = [{"epoch": s["epoch"], **s.pop("processes")} for s in spent if "processes" in s]
    return Record(folder, header, *_frames(folder, header, rows, spent), rows, details, each)


def _frames(
    folder: Path, header: dict[str, Any], rows: list[dict[str, Any]], spent: list[dict[str, Any]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(epochs, layers)."""
    seconds = {s.pop("epoch"): s for s in spent}
    if 0 < len(seconds) < len(rows):  # written before each epoch, so that no crash leaves this
        raise RecordError(f"{folder}/seconds.jsonl ends after {len(seconds)} of {len(rows)} epochs")
    names = [layer["name"] for layer in header["layers"]]
    return frames.epochs(rows, seconds), frames.layers(names, rows)


def find(folder: str | Path) -> list[Path]:
    """Every run in or under a folder, sorted."""
    return sorted(path.parent for path in Path(folder).rglob("run.json"))


def summary(runs: Iterable[Record], last: int = 3) -> pd.DataFrame:
    """One row per run: name, seed, metric (mean of the ``last`` epochs, of a hook's record of those
    in which it was logged; nan if in none), total floats and bytes."""
    import pandas as pd

    rows = []
    for run in separate(runs):
        run.check_finished()
        rows.append(
            {
                "name": run.name,
                "seed": run.seed,
                "metric": _reached(run, last),
                "floats": float(run.epochs["floats"].sum()),
                "bytes": int(run.epochs["bytes"].sum()),
                "seconds": float(run.epochs.filter(like="seconds_").sum().sum()),
            }
        )
    return pd.DataFrame(rows)


def _reached(run: Record, last: int) -> float:
    known = [row["metric"] is not None for row in run.rows]
    return float(run.epochs["metric"][known].tail(last).mean())
