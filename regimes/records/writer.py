"""The one who writes a record: appends line by line, and goes back to a checkpoint on a resume."""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from regimes.errors import RecordError
from regimes.records import chain
from regimes.records.files import append, check_regular, opened_to_append, write_atomically
from regimes.records.kinds import fault
from regimes.records.lines import (
    LONGEST_LINE,
    ONE_PER_EPOCH,
    content,
    parse,
    read_header,
    read_lines,
    whole_lines,
)
from regimes.records.schema import ROWS, SCHEMA, header_fault, row_misfit

REWOUND = ("epochs.jsonl", "seconds.jsonl", "instruments.jsonl")  # by a resume


class RecordWriter:
    """Appends to one run's record; holds the folder's lock until ``close``.

    Raises:
        RecordError: the folder cannot be written, is in use, holds a run already (``create``) or
            none (``resume``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._header: dict[str, Any] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = opened_to_append(folder / ".lock")
        except OSError as error:
            raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        if not _locked(self._lock.fileno()):
            self._lock.close()
            raise RecordError(f"another run is writing to {folder}: choose another --out")
        try:
            for path in sorted(folder.glob("*.jsonl")):
                _cut_torn_line(path)
            self._sums = chain.sums(folder)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path, header: dict[str, Any]) -> RecordWriter:
        """Start a record with its provenance; in place of one that has no epoch yet."""
        writer = cls(folder)
        try:
            if (folder / "run.json").exists() and read_lines(folder / "epochs.jsonl"):
                raise RecordError(
                    f"{folder} already holds a run: continue it with --resume or choose another "
                    "--out"
                )
            content = _header({"schema": SCHEMA, **header}, folder)
            writer._header = json.loads(content)
            writer._restate()
            writer._rewind(0)
            writer._replace({"run.json": content})
            writer.event("start")
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def resume(cls, folder: Path, epochs: int, **details: Any) -> RecordWriter:
        """Continue a record after its first ``epochs`` epochs; later lines are set aside.

        Killed at any point, it leaves a record that reads, and that the next resume continues.

        Args:
            details: what the event log says of the process that continues it.
        """
        if not (folder / "run.json").exists():
            raise RecordError(f"{folder} holds no run to resume: start one without --resume")
        writer = cls(folder)
        try:
            writer._header = read_header(folder)
            for name in ONE_PER_EPOCH:
                there = len(read_lines(folder / name))
                if there < epochs:
                    raise RecordError(
                        f"{folder / name} ends before epoch {there}, the checkpoint "
                        f"before epoch {epochs}: was it edited?"
                    )
            writer._restate()
            writer._rewind(epochs)
            writer.event("resume", epoch=epochs, **details)
        except BaseException:
            writer.close()
            raise
        return writer

    def _restate(self) -> None:
        """What a kill, or a version without a chain, has left is what there is."""
        known = (self.folder / chain.CHAIN).exists()
        if there := {name: x for name, x in self._sums.items() if x.lines or known}:
            self._announce(there)

    def _rewind(self, epochs: int) -> None:
        """Set aside what the files have of later epochs, then write them anew without;
        epochs.jsonl first: it never gets ahead."""
        aside, kept = [], {}
        for name in REWOUND:
            rows = read_lines(self.folder / name)
            later = [{"file": name, **row} for row in rows if row["epoch"] >= epochs]
            if later:
                aside += later
                whole = chain.split(content(self.folder / name))
                kept[name] = b"".join(whole[: len(rows) - len(later)])
        if kept:
            self._append([("superseded.jsonl", row) for row in aside])
            self._replace(kept)

    def amend(self, **fields: Any) -> None:
        """Change fields of the header."""
        text = _header({**read_header(self.folder), **fields}, self.folder)
        self._replace({"run.json": text})
        self._header = json.loads(text)

    def _replace(self, files: dict[str, bytes]) -> None:
        sums = {name: chain.Sum(chain.split(text)) for name, text in files.items()}
        self._announce(sums)
        try:
            for name, text in files.items():
                write_atomically(self.folder / name, text)
        except OSError as error:
            raise RecordError(f"cannot write to {self.folder}: {error.strerror}") from None
        self._sums |= sums

    def epoch(
        self, row: dict[str, Any], seconds: dict[str, float], details: dict[str, Any] | None = None
    ) -> None:
        """Append one epoch; on the disk when this returns, and nowhere if it cannot be written."""
        at = {"epoch": row["epoch"]}
        found = [
            ("instruments.jsonl", {**at, "instrument": name, **detail})
            for name, detail in (details or {}).items()
        ]
        # epochs.jsonl last: an epoch that is there is there with all it has
        self._append([("seconds.jsonl", {**at, **seconds}), *found, ("epochs.jsonl", row)])

    def event(self, what: str, **details: Any) -> None:
        """Append to the run's event log."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._append([("events.jsonl", {"time": now, "event": what, **details})])

    def _append(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """Lines to files, announced in the chain; all of them or none."""
        lines: dict[str, list[bytes]] = {}
        for name, row in rows:
            lines.setdefault(name, []).append(self._checked(name, row))
        sums = {name: chain.Sum(new, self._sums[name]) for name, new in lines.items()}
        sizes = {path: _size(path) for path in (self.folder / n for n in (chain.CHAIN, *lines))}
        try:
            self._announce(sums)
            for name, new in lines.items():
                self._write(name, b"".join(new))
        except RecordError:
            for path, size in sizes.items():
                if _size(path) > size:
                    os.truncate(path, size)
            raise
        self._sums |= sums

    def _checked(self, name: str, row: dict[str, Any]) -> bytes:
        """The line of a row, as readers would take it; RecordError if they would not."""
        try:
            line = _line(row)
            why = _unreadable(name, line, parse(line), self._header)
        except (TypeError, ValueError, RecursionError) as error:
            line, why = b"", f"it is no JSON ({error})"
        if why:
            of = f" of the instrument {row['instrument']}" if "instrument" in row else ""
            raise RecordError(f"cannot write a line{of} to {self.folder / name}: {why}")
        return line

    def _announce(self, sums: dict[str, chain.Sum]) -> None:
        self._write(chain.CHAIN, _line(chain.announcement(sums)))

    def _write(self, name: str, lines: bytes) -> None:
        try:
            append(self.folder / name, lines)
        except OSError as error:
            raise RecordError(
                f"cannot write {self.folder / name}: {error.strerror}; all earlier lines are intact"
            ) from None

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _cut_torn_line(path: Path) -> None:
    """Cut off what readers take for torn, so that the next line starts a line."""
    try:
        check_regular(path)
        whole = sum(len(line) + 1 for line in whole_lines(path))
        if whole < _size(path):
            os.truncate(path, whole)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


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


def _unreadable(
    name: str, line: bytes, row: dict[str, Any] | None, header: dict[str, Any]
) -> str | None:
    """Why no reader would take a line, or None."""
    if row is None:
        return "it has half of a letter, or is nested too deep"
    if len(line) > LONGEST_LINE:
        return f"it is too long: {len(line)} bytes, at most {LONGEST_LINE}"
    why = fault(row, ROWS[name]) if name in ROWS else None
    return why or (row_misfit(header, row) if name == "epochs.jsonl" else None)


def _line(row: dict[str, Any]) -> bytes:
    """As JSON, which knows no NaN and no infinity: null is what could not be formed."""
    try:
        text = json.dumps(row, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(parse(json.dumps(row).encode()), separators=(",", ":"))
    return text.encode() + b"\n"


def _header(header: dict[str, Any], folder: Path) -> bytes:
    """``run.json``, which can be read again; RecordError if it could not."""
    try:
        text = json.dumps(header, indent=1, allow_nan=False).encode() + b"\n"
        found = parse(text)
        why = header_fault(found) if found else "a text in it is not UTF-8"
    except ValueError as error:
        why = str(error)
    if why:
        raise RecordError(f"cannot write {folder / 'run.json'}: {why}")
    return text
