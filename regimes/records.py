"""The record: what a run leaves on disk, enough to redraw every figure and replay every policy.

A run is a folder:

- ``run.json``: schema, resolved configuration, code version, machine, the layer table.
- ``epochs.jsonl``: one line per epoch, append-only. Holds nothing that a clock decides, so that
  the same configuration and code give the same bytes, interrupted or not.
- ``seconds.jsonl``: per epoch, where the time went.
- ``instruments.jsonl``: what instruments found beyond the statistics of ``epochs.jsonl``.
- ``events.jsonl``: starts, resumes, ends, and why a run stopped.
- ``superseded.jsonl``: lines that a resume from an earlier checkpoint trained again.

A crash at any byte leaves a readable record: a torn last line is not a line. No torch here.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import lzma
import os
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.config import RunConfig, from_dict, to_dict
from regimes.errors import ConfigError, RecordError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
FREE_ON_RESUME = {
    "device",
    "checkpoint_every",
    "tensorboard",
    "timeout",
    "parcel_mb",
}  # may differ from the start


# -- writing ---------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """To a new file, synced, then renamed over ``path``: a reader sees the old or the new whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        raise


class Writer:
    """Appends to one run's record; holds the folder's lock until ``close``.

    Raises:
        RecordError: the folder cannot be written, is in use, holds a run already (``create``) or
            none (``resume``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
        except OSError as error:
            raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        if not _locked(self._lock.fileno()):
            self._lock.close()
            raise RecordError(f"another run is writing to {folder}: choose another --out")
        for path in folder.glob("*.jsonl"):
            _cut_torn_line(path)

    @classmethod
    def create(cls, folder: Path, header: dict[str, Any]) -> Writer:
        """Start a record with its provenance."""
        writer = cls(folder)
        if (folder / "run.json").exists():
            writer.close()
            raise RecordError(
                f"{folder} already holds a run: continue it with --resume or choose another --out"
            )
        content = json.dumps({"schema": SCHEMA, **header}, indent=1) + "\n"
        try:
            write_atomically(folder / "run.json", content.encode())
        except OSError as error:
            writer.close()
            raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        writer.event("start")
        return writer

    @classmethod
    def resume(cls, folder: Path, epochs: int, **details: Any) -> Writer:
        """Continue a record after its first ``epochs`` epochs; later lines are set aside.

        Args:
            details: what the diary should say about who continues it.
        """
        if not (folder / "run.json").exists():
            raise RecordError(f"{folder} holds no run to resume: start one without --resume")
        writer = cls(folder)
        for name in ("epochs.jsonl", "seconds.jsonl", "instruments.jsonl"):
            rows = read_lines(folder / name)
            keep = [r for r in rows if r["epoch"] < epochs]
            if len(keep) == len(rows):
                continue
            for row in rows[len(keep) :]:
                writer._append("superseded.jsonl", {"file": name, **row})
            text = "".join(_line(r) for r in keep)
            try:
                write_atomically(folder / name, text.encode())
            except OSError as error:
                writer.close()
                raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        writer.event("resume", epoch=epochs, **details)
        return writer

    def epoch(
        self, row: dict[str, Any], seconds: dict[str, float], details: dict[str, Any] | None = None
    ) -> None:
        """Append one epoch; on the disk when this returns."""
        self._append("seconds.jsonl", {"epoch": row["epoch"], **seconds})
        for name, detail in (details or {}).items():
            self._append("instruments.jsonl", {"epoch": row["epoch"], "instrument": name, **detail})
        self._append("epochs.jsonl", row)

    def event(self, what: str, **details: Any) -> None:
        """Append to the run's diary."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._append("events.jsonl", {"time": now, "event": what, **details})

    def _append(self, name: str, row: dict[str, Any]) -> None:
        path = self.folder / name
        start = None
        try:
            with path.open("ab") as file:
                start = file.tell()
                file.write(_line(row).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if start is not None:
                os.truncate(path, start)
            raise RecordError(
                f"cannot write {path}: {error.strerror}; all earlier lines are intact"
            ) from None

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last newline, so that the next line starts a line."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _locked(file: int, tries: int = 5) -> bool:
    """Take the lock; again, because ``watch`` holds it for the blink of an eye to look."""
    try:
        import fcntl
    except ImportError:  # Windows has no flock; there a second run is not noticed
        return True
    for _ in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


# -- reading ---------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a ``.jsonl`` file; a torn last line is left out.

    Raises:
        RecordError: a line before the last is no JSON.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and ("epoch" in row or "event" in row)):
                raise ValueError
            rows.append(row)
        except ValueError:
            if number == len(lines) - 1:
                break
            raise RecordError(f"{path} line {number} is damaged: no line of a record") from None
    return rows


def read_header(folder: Path) -> dict[str, Any]:
    """``run.json``, checked.

    Raises:
        RecordError: missing, damaged, or written by a later version.
    """
    path = folder / "run.json"
    try:
        header = json.loads(path.read_bytes())
        schema, _, _ = int(header["schema"]), header["config"]["epochs"], header["layers"]
    except FileNotFoundError:
        raise RecordError(f"{folder} holds no run: expected a file run.json in it") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise RecordError(f"{path} is damaged: not a run's header") from None
    if schema > SCHEMA:
        raise RecordError(
            f"{path} has schema {schema}, this version reads up to {SCHEMA}: update regimes"
        )
    return header


def complete(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Has the run trained all its epochs, or spent its budget of floats?"""
    budget = header.get("budget")
    spent = budget is not None and sum(row["floats"] for row in rows) >= budget
    return spent or len(rows) >= header["config"]["epochs"]


def check_same(folder: Path, ours: dict[str, Any]) -> None:
    """Raise RecordError unless the run in ``folder`` has this (plain, resolved) configuration."""
    theirs = read_header(folder)["config"]
    if theirs.get("instruments") == []:  # what the first records had for none
        theirs = {**theirs, "instruments": {}}
    with contextlib.suppress(ConfigError):  # an older record has what it does not say by default
        theirs = to_dict(from_dict(RunConfig, theirs))
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
            seconds_*, and ``total_floats``, ``total_bytes`` summed up to the epoch's end.
        layers: one row per epoch and layer: level, floats, bytes, why, and each statistic.
        rows, details: the lines of ``epochs.jsonl`` and ``instruments.jsonl`` as they are.
    """

    folder: Path
    header: dict[str, Any]
    epochs: pd.DataFrame
    layers: pd.DataFrame
    rows: list[dict[str, Any]]
    details: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        return self.header["config"]

    @property
    def name(self) -> str:
        return self.config["name"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def finished(self) -> bool:
        return complete(self.header, self.rows)

    @property
    def statistic(self) -> str:
        """The column of ``layers`` that the run's detectors read."""
        return f"norm:{self.config['signal']}"


def load(folder: str | Path) -> Record:
    """Read one run.

    Raises:
        RecordError: no run there, or a damaged one.
    """
    folder = Path(folder)
    header, rows = read_header(folder), read_lines(folder / "epochs.jsonl")
    details = read_lines(folder / "instruments.jsonl")
    try:
        return Record(folder, header, *_frames(folder, header, rows), rows, details)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__} {error}"
        raise RecordError(f"the record in {folder} is damaged: {why}") from None


def _frames(
    folder: Path, header: dict[str, Any], rows: list[dict[str, Any]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(epochs, layers)."""
    import pandas as pd

    seconds = {s.pop("epoch"): s for s in read_lines(folder / "seconds.jsonl")}
    flat = []
    for row in rows:
        scalars = {k: v for k, v in row.items() if not isinstance(v, dict)} | row.get("model", {})
        times = {f"seconds_{k}": v for k, v in seconds.get(row["epoch"], {}).items()}
        flat.append({**scalars, **times})
    epochs = pd.DataFrame(flat)
    for column in ("floats", "bytes") if len(epochs) else ():
        epochs[f"total_{column}"] = epochs[column].cumsum()
    names = [layer["name"] for layer in header["layers"]]
    parts = [
        pd.DataFrame({"layer": names, **row["layers"], **row["statistics"]}).assign(
            epoch=row["epoch"]
        )
        for row in rows
    ]
    layers = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"layer": []})
    return epochs, layers


def find(folder: str | Path) -> list[Path]:
    """Every run in or under a folder, sorted."""
    return sorted(path.parent for path in Path(folder).rglob("run.json"))


@contextlib.contextmanager
def opened(place: str | Path) -> Iterator[Path]:
    """The folder itself; of an archive that ``pack`` has made, a scratch folder with its content.

    Raises:
        RecordError: the archive is damaged.
    """
    place = Path(place)
    if not place.is_file():
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        try:
            with tarfile.open(place) as archive:
                archive.extractall(scratch, filter="data")
        except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
            why = str(error).partition("\n")[0].rstrip(":")
            raise RecordError(f"{place} is no archive of records: {why}") from None
        yield Path(scratch)


def load_all(folder: str | Path) -> list[Record]:
    """Every run in or under a folder, or in an archive that ``pack`` has made.

    Raises:
        RecordError: there is none, or the archive is damaged.
    """
    with opened(folder) as root:
        runs = [load(path) for path in find(root)]
    if not runs:
        raise RecordError(f"no run in or under {folder}")
    return runs


def pack(folder: str | Path, archive: str | Path) -> int:
    """Write the records under a folder, without checkpoints, to a ``.tar.xz``; returns how many.

    The same records give the same bytes.
    """
    folder, runs = Path(folder), find(folder)
    if not runs:
        raise RecordError(f"no run in or under {folder}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for run in runs:
            for path in sorted([run / "run.json", *run.glob("*.jsonl")]):
                content = path.read_bytes()
                member = tarfile.TarInfo(path.relative_to(folder).as_posix())
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    try:
        write_atomically(Path(archive), buffer.getvalue())
    except OSError as error:
        raise RecordError(f"cannot write {archive}: {error.strerror}") from None
    return len(runs)


def summary(runs: Iterable[Record], last: int = 3) -> pd.DataFrame:
    """One row per run: name, seed, metric (mean of the ``last`` epochs), total floats and bytes."""
    import pandas as pd

    rows = []
    for run in runs:
        if not run.finished:
            raise RecordError(f"{run.folder} is not finished: resume it before summarising")
        rows.append(
            {
                "name": run.name,
                "seed": run.seed,
                "metric": float(run.epochs["metric"].tail(last).mean()),
                "floats": float(run.epochs["floats"].sum()),
                "bytes": int(run.epochs["bytes"].sum()),
                "seconds": float(run.epochs.filter(like="seconds_").sum().sum()),
            }
        )
    return pd.DataFrame(rows)
