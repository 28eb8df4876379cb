"""The writer of a record: appends line by line, and returns to a checkpoint on a resume."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from regimes.base.errors import FolderInUse, RecordError
from regimes.records import chain
from regimes.records.files import append_synced, check_regular, opened_to_append, write_atomically
from regimes.records.kinds import find_fault
from regimes.records.lines import (
    LONGEST_LINE,
    ONE_PER_EPOCH,
    branch_table,
    complete_lines,
    parse_line,
    read_content,
    read_header,
    read_lines,
)
from regimes.records.schema import (
    SCHEMA,
    FileState,
    Header,
    Row,
    header_fault,
    row_fault,
    row_kinds,
)

REWOUND = ("epochs.jsonl", "seconds.jsonl", "instruments.jsonl")  # by a resume


class RecordWriter:
    """Appends to one run's record; holds the folder's lock until ``close``. RecordError if the
    folder cannot be written, is in use, holds a run (``create``) or none (``resume``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._header: Mapping[str, Any] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = opened_to_append(folder / ".lock")
        except OSError as error:
            raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        if not _lock_folder(self._lock.fileno()):
            self._lock.close()
            raise FolderInUse(f"another run is writing to {folder}: choose another folder (--out)")
        with self._close_on_error():
            for path in sorted(folder.glob("*.jsonl")):
                _cut_torn_line(path)
            self._sums = chain.sum_files(folder)

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path, header: Mapping[str, Any]) -> RecordWriter:
        """Start a record with its provenance, in place of one that has no epoch yet."""
        writer = cls(folder)
        with writer._close_on_error():
            if (folder / "run.json").exists() and read_lines(folder / "epochs.jsonl"):
                how = (
                    "continue it with --resume (in Python resume=True) or choose another folder "
                    "(--out)"
                )
                raise RecordError(f"{folder} already holds a run: {how}")
            text = _encode_header({"schema": SCHEMA, **header}, folder)
            writer._header = json.loads(text)
            writer._announce_present()
            writer._rewind(0)
            writer._replace({"run.json": text})
            writer.event("start")
        return writer

    @classmethod
    def resume(cls, folder: Path, epochs: int, **details: Any) -> RecordWriter:
        """Continue a record after its first ``epochs`` epochs; later lines are set aside, and
        ``details`` go to the event log. A killed resume leaves a record that can be resumed."""
        if not (folder / "run.json").exists():
            raise RecordError(f"{folder} holds no run to resume: start one without --resume")
        writer = cls(folder)
        with writer._close_on_error():
            writer._header = read_header(folder)
            for name in ONE_PER_EPOCH:
                count = branch_table(folder).get("at", 0) + len(read_lines(folder / name))
                if count < epochs:
                    raise RecordError(
                        f"{folder / name} ends before epoch {count}, the checkpoint "
                        f"before epoch {epochs}: was it edited?"
                    )
            writer._announce_present()
            writer._rewind(epochs)
            writer.event("resume", epoch=epochs, **details)
        return writer

    def _announce_present(self) -> None:
        """Let the present state of the files count from here on: a kill, or a version without a
        chain, may have left files that the chain does not describe."""
        known = (self.folder / chain.CHAIN).exists()
        if present := {name: x for name, x in self._sums.items() if x.lines or known}:
            self._announce(present)

    def _rewind(self, epochs: int) -> None:
        """Copy the lines of later epochs to superseded.jsonl, then rewrite the files without them;
        epochs.jsonl first, so that it is never ahead of the others."""
        superseded, earlier = [], {}
        for name in REWOUND:
            lines = read_lines(self.folder / name)
            later = [{"file": name, **row} for row in lines if row["epoch"] >= epochs]
            if later:
                superseded += later
                texts = chain.split_lines(read_content(self.folder / name))
                earlier[name] = b"".join(texts[: len(lines) - len(later)])
        if earlier:
            self._append([("superseded.jsonl", row) for row in superseded])
            self._replace(earlier)

    def amend(self, **fields: Any) -> None:
        """Change fields of the header."""
        text = _encode_header({**read_header(self.folder), **fields}, self.folder)
        self._replace({"run.json": text})
        self._header = json.loads(text)

    def _replace(self, files: dict[str, bytes]) -> None:
        """Write whole files anew, each announced in the chain before any of them changes."""
        sums = {name: chain.RunningDigest(chain.split_lines(text)) for name, text in files.items()}
        self._announce(sums)
        try:
            for name, text in files.items():
                write_atomically(self.folder / name, text)
        except OSError as error:
            raise RecordError(f"cannot write to {self.folder}: {error.strerror}") from None
        self._sums |= sums

    def epoch(
        self,
        row: Mapping[str, Any],
        seconds: Mapping[str, Any],
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one epoch; it is on the disk when this returns, and absent if it cannot be
        written."""
        at = {"epoch": row["epoch"]}
        instruments = [
            ("instruments.jsonl", {**at, "instrument": name, **detail})
            for name, detail in (details or {}).items()
        ]
        # epochs.jsonl last: readers take an epoch in it for complete.
        self._append([("seconds.jsonl", {**at, **seconds}), *instruments, ("epochs.jsonl", row)])

    def state(self, name: str) -> FileState:
        """Return the number of lines of a file, as written so far, and their digest."""
        return self._sums[name].state

    def event(self, what: str, **details: Any) -> None:
        """Append to the run's event log."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._append([("events.jsonl", {"time": now, "event": what, **details})])

    def _append(self, rows: list[tuple[str, Mapping[str, Any]]]) -> None:
        """Lines to files, announced in the chain; all of them or none."""
        lines: dict[str, list[bytes]] = {}
        for name, row in rows:
            lines.setdefault(name, []).append(self._encode_checked(name, row))
        sums = {name: chain.RunningDigest(new, self._sums[name]) for name, new in lines.items()}
        sizes = {
            path: _file_size(path) for path in (self.folder / n for n in (chain.CHAIN, *lines))
        }
        try:
            self._announce(sums)
            for name, new in lines.items():
                self._write(name, b"".join(new))
        except RecordError:
            for path, size in sizes.items():
                if _file_size(path) > size:
                    os.truncate(path, size)
            raise
        self._sums |= sums

    def _encode_checked(self, name: str, row: Mapping[str, Any]) -> bytes:
        """The line of a row; RecordError if readers would refuse it."""
        try:
            line = _encode_row(row)
            why = _find_unreadable(name, line, self._header)
        except (TypeError, ValueError, RecursionError) as error:
            line, why = b"", f"it is no JSON ({error})"
        if why:
            source = f" of the instrument {row['instrument']}" if "instrument" in row else ""
            raise RecordError(f"cannot write a line{source} to {self.folder / name}: {why}")
        return line

    def _announce(self, sums: dict[str, chain.RunningDigest]) -> None:
        """Write to the chain, before the files change, the digests that they will have."""
        self._write(
            chain.CHAIN, _encode_row({"files": {name: x.state for name, x in sums.items()}})
        )

    def _write(self, name: str, lines: bytes) -> None:
        try:
            append_synced(self.folder / name, lines)
        except OSError as error:
            raise RecordError(
                f"cannot write {self.folder / name}: {error.strerror}; all earlier lines are intact"
            ) from None

    def close(self) -> None:
        """Release the folder's lock."""
        self._lock.close()


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that what is appended begins a line of its own."""
    try:
        check_regular(path)
        size = sum(len(line) + 1 for line in complete_lines(path))
        if size < _file_size(path):
            os.truncate(path, size)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def hold_folder(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a folder that is there.

    Args:
        what: writes to it, in the error, such as "search".

    Raises:
        FolderInUse: another process holds it.
        RecordError: it cannot be written.
    """
    try:
        lock = opened_to_append(folder / ".lock")
    except OSError as error:
        raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
    with lock:
        if not _lock_folder(lock.fileno()):
            raise FolderInUse(f"another {what} is writing to {folder}: choose another folder")
        yield


def _lock_folder(file: int, tries: int = 5) -> bool:
    """Take the lock. Several tries: ``watch`` holds it for an instant to see whether it is free."""
    try:
        import fcntl
    except ImportError:  # Windows has no flock; a second writer is not noticed there
        return True
    for _ in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def _find_unreadable(name: str, line: bytes, header: Mapping[str, Any]) -> str | None:
    """Why readers would refuse a line, or None."""
    row = parse_line(line)
    if row is None:
        return "it has half of a letter, or is nested too deep"
    if len(line) > LONGEST_LINE:
        return f"it is too long: {len(line)} bytes, at most {LONGEST_LINE}"
    if why := find_fault(row, row_kinds()[name]):
        return why
    if name != "epochs.jsonl":
        return None
    return row_fault(cast("Header", header), cast("Row", row))


def _encode_row(row: Mapping[str, Any]) -> bytes:
    """A row as JSON. NaN and infinity, which JSON lacks, become null."""
    try:
        text = json.dumps(row, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(parse_line(json.dumps(row).encode()), separators=(",", ":"))
    return text.encode() + b"\n"


def _encode_header(header: Mapping[str, Any], folder: Path) -> bytes:
    """``run.json``; RecordError if it could not be read again."""
    try:
        text = json.dumps(header, indent=1, allow_nan=False).encode() + b"\n"
        parsed = parse_line(text)
        why = header_fault(parsed) if parsed else "a text in it is not UTF-8"
    except ValueError as error:
        why = str(error)
    if why:
        raise RecordError(f"cannot write {folder / 'run.json'}: {why}")
    return text
