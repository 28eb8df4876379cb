"""The hash chain, by which an edit of a record is noticed.

Before a line is appended to a file, or a file is replaced, ``chain.jsonl`` gets the number of lines
that the file will have and the SHA-256 of all of them, as of ``head -n LINES FILE``. A kill so
leaves each file as the last line of the chain states it, as the line before does, or between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from regimes.records.lines import complete_lines, read_content, read_lines
from regimes.records.schema import FileState as State

CHAIN = "chain.jsonl"
LOGS = ("epochs", "seconds", "instruments", "events", "superseded")
CHAINED = ("run.json", *(f"{name}.jsonl" for name in LOGS))


class RunningDigest:
    """Keeps the number of a file's lines and their running digest."""

    def __init__(self, lines: Iterable[bytes] = (), before: RunningDigest | None = None) -> None:
        self.lines: int = before.lines if before else 0
        self.digest: hashlib._Hash = before.digest.copy() if before else hashlib.sha256()
        for line in lines:
            self.lines += 1
            self.digest.update(line)

    @property
    def state(self) -> State:
        return {"lines": self.lines, "sha256": self.digest.hexdigest()}


def sum_files(folder: Path) -> dict[str, RunningDigest]:
    """Compute the checksum of each file of a record, by name."""
    return {name: RunningDigest(_read_complete_lines(folder / name)) for name in CHAINED}


def shorten_chain(folder: Path) -> bytes:
    """Write the text of ``chain.jsonl`` for an archive: the last state of each file alone.

    The states before it are digests of lines that the archive has, so they can be computed from it.
    The empty last line says that nothing was announced and not written. A chain stays whole if its
    files are not as it states them, so that `find_edit` still says which line is not.
    """
    text = read_content(folder / CHAIN)
    last: dict[str, State] = {}
    for row in read_lines(folder / CHAIN):
        last |= row["files"]
    there = {name: found.state for name, found in sum_files(folder).items() if found.lines}
    last = {name: state for name, state in last.items() if state["lines"]}
    if not last or there != last or find_edit(folder):
        return text
    return b"".join(json.dumps({"files": each}).encode() + b"\n" for each in (last, {}))


def split_lines(text: bytes) -> list[bytes]:
    """Split a text into lines with their ends; text after the last newline is a line, too."""
    *lines, rest = text.split(b"\n")
    return [line + b"\n" for line in lines] + [rest] * bool(rest)


def _read_complete_lines(path: Path) -> list[bytes]:
    """The lines of a file with their ends, without a torn one."""
    if path.suffix == ".json":
        return split_lines(read_content(path))
    return [line + b"\n" for line in complete_lines(path)]


def find_edit(folder: Path, growing: bool = False) -> str | None:
    """Find the first file and line that are not as they were written, in words; None if all are.

    Args:
        growing: a process is writing, so that files may be ahead of the chain as it was read.
    """
    groups = [row["files"] for row in read_lines(folder / CHAIN)]
    if not groups:  # an older version had no chain; a file of it has a line before the record
        text = read_content(folder / CHAIN)
        torn = text and b"\n" not in text  # by a kill at the first line of an older record's chain
        emptied = (folder / CHAIN).exists() and not torn
        return f"{CHAIN} is empty: its lines were removed" if emptied else None
    for name in CHAINED:
        states: list[State] = [
            RunningDigest().state,
            *(group[name] for group in groups if name in group),
        ]
        # Only what the last line of the chain announces may be unwritten or half written.
        allowed = states[-2:] if name in groups[-1] else states[-1:]
        if why := _describe_difference(folder / name, states, allowed, growing):
            return f"{name} {why}"
    return None


def _describe_difference(
    path: Path, states: list[State], allowed: list[State], growing: bool
) -> str | None:
    """How a file differs from all of the ``allowed`` states, and from what is between them."""
    lines = _read_complete_lines(path)
    if path.suffix == ".json":
        return (
            None if growing or RunningDigest(lines).state in allowed else "is not as it was written"
        )
    digests, last = {0: states[0]["sha256"]}, 0  # by number of lines
    for state in states:
        count, digest = state["lines"], state["sha256"]
        if count <= last and digests.get(count, digest) != digest:
            return f"was edited at or before line {count}, then continued"
        if count > last:  # lines announced beyond the last state were never written, or set aside
            digests = {k: known for k, known in digests.items() if k <= last}
        digests[count], last = digest, count
    counts = [state["lines"] for state in allowed]
    if why := _changed_line(lines[: max(counts)], digests):
        return why
    if len(lines) < min(counts):
        return f"ends before line {len(lines) + 1} of {min(counts)}"
    torn = len(read_content(path)) > sum(map(len, lines))
    if growing or len(lines) + torn <= max(counts):
        return None
    return f"has a line {max(counts) + 1} that was not written by the run"


def _changed_line(lines: list[bytes], digests: dict[int, str]) -> str | None:
    digest, first = hashlib.sha256(), 1
    for number, line in enumerate(lines, start=1):
        digest.update(line)
        if number in digests:
            if digest.hexdigest() != digests[number]:
                where = f"line {number}" if first == number else f"lines {first} to {number}"
                return f"{where} differs from what was written"
            first = number + 1
    return None
