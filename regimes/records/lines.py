"""The files of a record as JSON, checked: what is torn, damaged, too large or out of order. All
commands read them here. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from regimes.config import RunConfig, current_names
from regimes.errors import RecordError
from regimes.records.files import opened_to_read
from regimes.records.kinds import fault
from regimes.records.said import as_said
from regimes.records.schema import ROWS, SCHEMA, header_fault, misfit

Row = dict[str, Any]
ONE_PER_EPOCH = ("epochs.jsonl", "seconds.jsonl")  # row i is epoch i
LARGEST_FILE, LONGEST_LINE = 2**31, 2**24  # bytes


def content(path: Path) -> bytes:
    """A file of a record; nothing if there is none.

    Raises:
        RecordError: it cannot be read, is no regular file (a pipe would never end, nor would a
            device), or is larger than any record's.
    """
    try:
        with opened_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise RecordError(f"{path} is too large: {size} bytes")
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file without what is torn: what follows the last newline, and a last line
    that is no JSON."""
    lines = content(path).split(b"\n")[:-1]
    return lines[:-1] if lines and parse(lines[-1]) is None else lines


def parse(text: bytes) -> Row | None:
    """A table out of JSON, or None. What JSON does not know (NaN, Infinity) is null."""
    try:
        row = json.loads(text, parse_constant=lambda name: None)
        if b"\\ud" in text or b"\\uD" in text:  # half of a letter could not be written again
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> list[Row]:
    """The complete lines of a ``.jsonl`` file; a torn last line is left out.

    Raises:
        RecordError: the file cannot be read, a line is not as `schema` has it, or lines are
            doubled, missing or out of order: row i of ``epochs.jsonl`` and ``seconds.jsonl`` is
            epoch i, ``instruments.jsonl`` has each instrument at most once per epoch, in order.
    """
    rows, kind = [], ROWS.get(path.name)
    for number, line in enumerate(whole_lines(path), start=1):
        if len(line) > LONGEST_LINE:
            raise RecordError(f"{path} line {number} is too long: {len(line)} bytes")
        row = parse(line)
        if row is None:
            raise RecordError(f"{path} line {number} is damaged: no line of a record")
        rows.append(row)
    _check_order(path, rows)
    for number, row in enumerate(rows, start=1):
        if kind and (why := fault(row, kind)):
            raise RecordError(f"{path} line {number} is damaged: {why}")
    return rows


def _check_order(path: Path, rows: list[Row]) -> None:
    """Raise RecordError at the first line that is not where it belongs."""
    single = path.name in ONE_PER_EPOCH
    if not single and path.name != "instruments.jsonl":
        return
    last, seen = 0, set()
    for number, row in enumerate(rows, start=1):
        epoch = row.get("epoch")
        key = f"{epoch} {row.get('instrument')}"
        if type(epoch) is not int or (
            epoch != number - 1 if single else epoch < last or key in seen
        ):
            wanted = f"{number - 1}" if single else f"{last} or later, each instrument once"
            raise RecordError(
                f"{path} line {number} is damaged: it has epoch {epoch!r:.20}, expected {wanted}; "
                "lines are doubled, missing or out of order"
            )
        last = epoch
        seen.add(key)


def read_header(folder: Path) -> Row:
    """``run.json``, checked; of a user's own training what is known (`said`).

    Raises:
        RecordError: missing, damaged, or written by a later version.
    """
    path = folder / "run.json"
    if not os.path.lexists(path):
        raise RecordError(f"{folder} holds no run: expected a file run.json in it")
    found = parse(content(path))
    if found is None:
        raise RecordError(f"{path} is damaged: not a run's header")
    if type(found.get("schema")) is int and found["schema"] > SCHEMA:
        raise RecordError(
            f"{path} has schema {found['schema']}, this version reads up to {SCHEMA}: update "
            "regimes"
        )
    if why := header_fault(found):
        raise RecordError(f"{path} is damaged: {why}")
    found["config"] = current_names(RunConfig, found["config"])
    return as_said(found)


def check_together(header: Row, rows: list[Row], path: Path) -> None:
    """Raise RecordError unless the lines of ``epochs.jsonl``, at ``path``, go with the header."""
    if why := misfit(header, rows):
        raise RecordError(f"{path} {why}")
