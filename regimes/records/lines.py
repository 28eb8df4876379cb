"""The files of a record as JSON, checked for torn, damaged, oversized and misplaced lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from regimes.config import RunConfig, current_names
from regimes.errors import RecordError
from regimes.records.files import opened_to_read
from regimes.records.hooked import without_defaults
from regimes.records.kinds import fault
from regimes.records.schema import SCHEMA, Header, header_fault, rows

ONE_PER_EPOCH = ("epochs.jsonl", "seconds.jsonl")  # row i is epoch i, of a branch at + i
LARGEST_FILE, LONGEST_LINE = 2**31, 2**24  # bytes


def content(path: Path) -> bytes:
    """A file of a record; empty if there is none.

    Raises:
        RecordError: it cannot be read, is no regular file (reading a pipe or a device may never
            end), or is too large.
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


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file without a torn end: what follows the last newline, and a last line that
    is no JSON."""
    lines = content(path).split(b"\n")[:-1]
    return lines[:-1] if lines and parse(lines[-1]) is None else lines


def parse(text: bytes) -> dict[str, Any] | None:
    """A table out of JSON, or None. NaN and Infinity, which JSON lacks, become null."""
    try:
        row = json.loads(text, parse_constant=lambda name: None)
        if b"\\ud" in text or b"\\uD" in text:  # half of a surrogate pair cannot be written again
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a ``.jsonl`` file; a torn last line is left out.

    Raises:
        RecordError: the file cannot be read, a line is not as `schema` has it, or lines are
            doubled, missing or out of order: row i of ``epochs.jsonl`` and ``seconds.jsonl`` is
            epoch i, ``instruments.jsonl`` has each instrument at most once per epoch, in order.
    """
    found, kind = [], rows().get(path.name)
    for number, line in enumerate(complete_lines(path), start=1):
        if len(line) > LONGEST_LINE:
            raise RecordError(f"{path} line {number} is too long: {len(line)} bytes")
        row = parse(line)
        if row is None:
            raise RecordError(f"{path} line {number} is damaged: no line of a record")
        found.append(row)
    if path.name in (*ONE_PER_EPOCH, "instruments.jsonl"):
        _check_order(path, found)
    for number, row in enumerate(found, start=1):
        if kind and (why := fault(row, kind)):
            raise RecordError(f"{path} line {number} is damaged: {why}")
    return found


def _check_order(path: Path, rows: list[dict[str, Any]]) -> None:
    first = branch_table(path.parent).get("at", 0)
    last, seen = first, set()
    for number, row in enumerate(rows, start=first + 1):
        epoch, key = row.get("epoch"), f"{row.get('epoch')} {row.get('instrument')}"
        if path.name in ONE_PER_EPOCH:
            good, wanted = epoch == number - 1, f"{number - 1}"
        else:
            good = type(epoch) is int and epoch >= last and key not in seen
            wanted = f"{last} or later, each instrument once"
        number -= first
        if not good or type(epoch) is not int:
            raise RecordError(
                f"{path} line {number} is damaged: it has epoch {epoch!r:.20}, expected {wanted}; "
                "lines are doubled, missing or out of order"
            )
        last = epoch
        seen.add(key)


def read_header(folder: Path) -> Header:
    """``run.json``, of a hook's record what is known (`hooked`); RecordError if it is missing,
    damaged, or of a later version."""
    path = folder / "run.json"
    if not os.path.lexists(path):
        raise RecordError(f"{folder} holds no run: expected a file run.json in it")
    found = parse(content(path))
    if found is None:
        raise RecordError(f"{path} is damaged: not a run's header")
    if type(found.get("schema")) is int and found["schema"] > SCHEMA:
        raise RecordError(
            f"{path} has schema {found['schema']}, this version reads up to {SCHEMA}: "
            "update regimes"
        )
    if why := header_fault(found):
        raise RecordError(f"{path} is damaged: {why}")
    found["config"] = current_names(RunConfig, found["config"])
    return without_defaults(cast("Header", found))


def branch_table(folder: Path) -> dict[str, Any]:
    """``config.branch`` of the record in a folder; empty where it is no branch, or damaged."""
    table: Any = parse(content(folder / "run.json"))
    for key in ("config", "branch"):
        table = table.get(key) if isinstance(table, dict) else None
    whole = isinstance(table, dict) and type(table.get("at")) is int and "of" in table
    return table if whole else {}
