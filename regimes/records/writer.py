"""The one who writes a record: appends line by line, and goes back to a checkpoint on a resume."""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from regimes.errors import RecordError
from regimes.records.files import check_regular, write_atomically
from regimes.records.reader import ONE_PER_EPOCH, SCHEMA, parse_line, read_header, read_lines

REWOUND = ("epochs.jsonl", "seconds.jsonl", "instruments.jsonl")  # by a resume


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
            self._lock = _open_lock(folder / ".lock")
        except OSError as error:
            raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        if not _locked(self._lock.fileno()):
            self._lock.close()
            raise RecordError(f"another run is writing to {folder}: choose another --out")
        for path in sorted(folder.glob("*.jsonl")):
            try:
                _cut_torn_line(path)
            except OSError as error:
                self.close()
                raise RecordError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def create(cls, folder: Path, header: dict[str, Any]) -> Writer:
        """Start a record with its provenance."""
        writer = cls(folder)
        try:
            if (folder / "run.json").exists():
                raise RecordError(
                    f"{folder} already holds a run: continue it with --resume or choose another "
                    "--out"
                )
            content = json.dumps({"schema": SCHEMA, **header}, indent=1) + "\n"
            writer._replace("run.json", content)
            writer.event("start")
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def resume(cls, folder: Path, epochs: int, **details: Any) -> Writer:
        """Continue a record after its first ``epochs`` epochs; later lines are set aside.

        Killed at any point, it leaves a record that reads, and that the next resume continues.

        Args:
            details: what the diary should say about who continues it.
        """
        if not (folder / "run.json").exists():
            raise RecordError(f"{folder} holds no run to resume: start one without --resume")
        writer = cls(folder)
        try:
            found = {name: read_lines(folder / name) for name in REWOUND}
            for name in ONE_PER_EPOCH:
                if len(found[name]) < epochs:
                    raise RecordError(
                        f"{folder / name} ends before epoch {len(found[name])}, the checkpoint "
                        f"before epoch {epochs}: was it edited?"
                    )
            for name, rows in found.items():  # epochs.jsonl first: it never gets ahead
                writer._rewind(name, rows, epochs)
            writer.event("resume", epoch=epochs, **details)
        except BaseException:
            writer.close()
            raise
        return writer

    def _rewind(self, name: str, rows: list[dict[str, Any]], epochs: int) -> None:
        """Set aside what the file has of later epochs, then write it anew without."""
        keep = [r for r in rows if r["epoch"] < epochs]
        if len(keep) == len(rows):
            return
        for row in rows[len(keep) :]:
            self._append("superseded.jsonl", {"file": name, **row})
        self._replace(name, "".join(_line(r) for r in keep))

    def amend(self, **fields: Any) -> None:
        """Change fields of the header."""
        header = {**read_header(self.folder), **fields}
        self._replace("run.json", json.dumps(header, indent=1) + "\n")

    def _replace(self, name: str, text: str) -> None:
        try:
            write_atomically(self.folder / name, text.encode())
        except OSError as error:
            raise RecordError(f"cannot write to {self.folder}: {error.strerror}") from None

    def epoch(
        self, row: dict[str, Any], seconds: dict[str, float], details: dict[str, Any] | None = None
    ) -> None:
        """Append one epoch; on the disk when this returns, and nowhere if it cannot be written."""
        lines = [("seconds.jsonl", {"epoch": row["epoch"], **seconds})]
        for name, detail in (details or {}).items():
            lines.append(
                ("instruments.jsonl", {"epoch": row["epoch"], "instrument": name, **detail})
            )
        lines.append(("epochs.jsonl", row))  # last: an epoch that is there is there with all it has
        sizes = {self.folder / name: _size(self.folder / name) for name, _ in lines}
        try:
            for name, line in lines:
                self._append(name, line)
        except RecordError:
            for path, size in sizes.items():
                if _size(path) > size:
                    os.truncate(path, size)
            raise

    def event(self, what: str, **details: Any) -> None:
        """Append to the run's diary."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._append("events.jsonl", {"time": now, "event": what, **details})

    def _append(self, name: str, row: dict[str, Any]) -> None:
        path = self.folder / name
        start = None
        try:
            check_regular(path)
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


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _open_lock(path: Path) -> TextIO:
    check_regular(path)  # a foreign folder's lock may be a link
    return path.open("a")


def _cut_torn_line(path: Path) -> None:
    """Cut off what readers take for torn, so that the next line starts a line."""
    check_regular(path)
    content = path.read_bytes()
    lines = content.split(b"\n")[:-1]
    if lines and parse_line(lines[-1]) is None:
        lines.pop()
    whole = sum(len(line) + 1 for line in lines)
    if whole < len(content):
        os.truncate(path, whole)


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
