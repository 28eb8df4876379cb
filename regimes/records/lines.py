"""The files of a record as JSON, checked for torn, damaged, oversized and misplaced lines."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from regimes.base.errors import RecordError
from regimes.records.earlier import with_present_names
from regimes.records.files import opened_to_read
from regimes.records.hook_fields import without_defaults
from regimes.records.kinds import find_fault
from regimes.records.schema import SCHEMA, Event, Header, header_fault, row_kinds

ONE_PER_EPOCH = ("epochs.jsonl", "seconds.jsonl")  # row i is epoch i, of a branch at + i
LARGEST_FILE, LONGEST_LINE = 2**31, 2**24  # bytes
DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def read_content(path: Path) -> bytes:
    """Read a file of a record; empty if there is none.

    Raises:
        RecordError: it cannot be read, is no regular file (reading a pipe or a device may never
            end), or is too large.
    """
    with _opened(path) as file:
        return file.read() if file else b""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    try:
        with opened_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise RecordError(f"{path} is too large: {size} bytes")
            yield file
    except FileNotFoundError:
        yield None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None


def complete_lines(path: Path) -> list[bytes]:
    """Read the lines of a file without a torn end: what follows the last newline, and a last line
    that is no JSON."""
    lines = read_content(path).split(b"\n")[:-1]
    return lines[:-1] if lines and parse_line(lines[-1]) is None else lines


def _ended_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines that end in a newline, without it, from a byte on; never the whole file at once."""
    with _opened(path) as file:
        if file:
            file.seek(start)
            yield from (line[:-1] for line in file if line.endswith(b"\n"))


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a table out of JSON; None of anything else. NaN and Infinity, which JSON lacks, become
    null."""
    try:
        # as `json.detect_encoding` finds at more length
        encoding = "utf-8" if text.startswith(b'{"') else json.detect_encoding(text)
        row = DECODER.decode(text.decode(encoding, "surrogatepass"))
        if b"\\ud" in text or b"\\uD" in text:  # half of a surrogate pair cannot be written again
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path, first: int | None = None) -> list[dict[str, Any]]:
    """Read the complete lines of a ``.jsonl`` file; a torn last line is left out.

    Args:
        first: the epoch that the file begins with, if the record's header has been read.

    Raises:
        RecordError: the file cannot be read, a line is not as `schema` has it, or lines are
            doubled, missing or out of order: row i of ``epochs.jsonl`` and ``seconds.jsonl`` is
            epoch i, ``instruments.jsonl`` has each instrument at most once per epoch, in order.
    """
    return Growing(path, first).read()


def read_events(folder: Path) -> list[Event]:
    """Read the event log of a record; see `read_lines`."""
    return cast("list[Event]", read_lines(folder / "events.jsonl"))


class Growing:
    """Reads the complete lines of a file that grows; ``read`` parses only what is new."""

    def __init__(self, path: Path, first: int | None = None) -> None:
        self.path, self._first, self._seen = path, first, (0, 0, 0)
        self._clear()

    def _clear(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._end, self._last = 0, b""  # of the lines, in bytes; the last one
        self._order = _Order(self.path, self._first)

    def read(self) -> list[dict[str, Any]]:
        """Return all lines, in one list that grows; see `read_lines`. A file that was replaced, or
        cut within these lines, is read anew."""
        now = file_state(self.path)
        if now == self._seen:
            return self.lines
        other = now[0] != self._seen[0] or now[2] < self._end
        if not other and self._last:  # is the last line that was read still where it was?
            start = self._end - len(self._last)
            other = next(_ended_lines(self.path, start), None) != self._last[:-1]
        if other:
            self._clear()
        self._seen = 0, 0, 0  # until all is read
        with collection_paused():
            new = self._parsed()
            self._check(new)
        self.lines += new
        self._seen = now
        return self.lines

    def _parsed(self) -> list[dict[str, Any]]:
        new: list[dict[str, Any]] = []
        before = self.lines[-1] if self.lines else {}
        damaged = ""
        for number, line in enumerate(_ended_lines(self.path, self._end), len(self.lines) + 1):
            if damaged:  # it was not the last line, which may be torn
                raise RecordError(damaged)
            row = parse_line(line)
            if len(line) > LONGEST_LINE:
                damaged = f"{self.path} line {number} is too long: {len(line)} bytes"
            elif row is None:
                damaged = f"{self.path} line {number} is damaged: no line of a record"
            if row is None:
                continue
            if damaged:
                raise RecordError(damaged)
            _share_columns(row, before)
            new.append(row)
            before = row
            self._end, self._last = self._end + len(line) + 1, line + b"\n"
        return new

    def _check(self, new: list[dict[str, Any]]) -> None:
        if self.path.name in (*ONE_PER_EPOCH, "instruments.jsonl"):
            self._order.check(new)
        kind = row_kinds().get(self.path.name)
        for number, row in enumerate(new, start=len(self.lines) + 1):
            if kind and (why := find_fault(row, kind)):
                raise RecordError(f"{self.path} line {number} is damaged: {why}")


def file_state(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file: its number, time of change and size; zeros if there is
    none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    except OSError:  # reading the file reports it
        return -1, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size


def _share_columns(row: dict[str, Any], before: dict[str, Any]) -> None:
    """Replace the columns of a row that are equal in the row before by the same lists, and the
    same of its collectives: most rows of a long run then hold little of their own."""
    counts = row.get("collectives")
    if isinstance(counts, dict) and repr(counts) == repr(before.get("collectives")):
        row["collectives"] = before["collectives"]
    columns, known = row.get("layers"), before.get("layers")
    if not (isinstance(columns, dict) and isinstance(known, dict)):
        return
    for name, values in columns.items():
        old = known.get(name)
        # 1 == 1.0 == True in Python
        if type(values) is list and values == old and _types(values) == _types(old):
            columns[name] = old


def _types(values: list[Any]) -> list[type]:
    return [*map(type, values)]


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection, which would go through all rows again and again as they are
    read."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class _Order:
    """Whether the epochs of a file's lines are in order."""

    def __init__(self, path: Path, first: int | None) -> None:
        self.path, self.count, self.first, self.last = path, 0, first, first
        self.seen: set[str] = set()

    def check(self, lines: list[dict[str, Any]]) -> None:
        """Raise RecordError at the first of the next lines that is doubled, missing or out of
        order."""
        if self.first is None or self.last is None:
            self.first = self.last = branch_table(self.path.parent).get("at", 0)
        for row in lines:
            epoch, expected = row.get("epoch"), self.first + self.count
            self.count += 1
            if self.path.name in ONE_PER_EPOCH:
                good, wanted = epoch == expected, f"{expected}"
            else:
                key = f"{epoch} {row.get('instrument')}"
                good = type(epoch) is int and epoch >= self.last and key not in self.seen
                wanted = f"{self.last} or later, each instrument once"
                self.seen.add(key)
            if not good or type(epoch) is not int:
                raise RecordError(
                    f"{self.path} line {self.count} is damaged: it has epoch {epoch!r:.20}, "
                    f"expected {wanted}; lines are doubled, missing or out of order"
                )
            self.last = epoch


def read_header(folder: Path) -> Header:
    """Read ``run.json``, of a hook's record what is known (`unknown_fields`); RecordError if it is
    missing, damaged, or of a later version."""
    path = folder / "run.json"
    if not os.path.lexists(path):
        raise RecordError(f"{folder} holds no run: expected a file run.json in it")
    table = parse_line(read_content(path))
    if table is None:
        raise RecordError(f"{path} is damaged: not a run's header")
    if type(table.get("schema")) is int and table["schema"] > SCHEMA:
        raise RecordError(
            f"{path} has schema {table['schema']}, this version reads up to {SCHEMA}: "
            "update regimes"
        )
    if why := header_fault(table):
        raise RecordError(f"{path} is damaged: {why}")
    table["config"] = with_present_names(table["config"])
    return without_defaults(cast("Header", table))


def branch_table(folder: Path) -> dict[str, Any]:
    """Read ``config.branch`` of the record in a folder; empty where it is no branch, or damaged."""
    table: Any = parse_line(read_content(folder / "run.json"))
    for key in ("config", "branch"):
        table = table.get(key) if isinstance(table, dict) else None
    complete = isinstance(table, dict) and type(table.get("at")) is int and "of" in table
    return table if complete else {}
