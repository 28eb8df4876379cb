"""The chain: what each file of a record has come to, so that an edited record is told from a whole
one. No torch.

Before a line is appended to a file, or a file replaced, ``chain.jsonl`` gets the number of lines
that the file will have and the SHA-256 of all of them: that of ``head -n LINES FILE``. So a kill
leaves files that are as the last line of the chain has them, or as the one before, or between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regimes.records.lines import content, read_lines, whole_lines

CHAIN = "chain.jsonl"
CHAINED = (
    "run.json",
    "epochs.jsonl",
    "seconds.jsonl",
    "instruments.jsonl",
    "events.jsonl",
    "superseded.jsonl",
)
State = dict[str, Any]
EMPTY: State = {"lines": 0, "sha256": hashlib.sha256().hexdigest()}


class Sum:
    """A file's lines and their running digest, as far as it is written."""

    def __init__(self, lines: Iterable[bytes] = (), before: Sum | None = None) -> None:
        self.lines: int = before.lines if before else 0
        self.digest: Any = before.digest.copy() if before else hashlib.sha256()
        for line in lines:
            self.lines += 1
            self.digest.update(line)

    @property
    def state(self) -> State:
        return {"lines": self.lines, "sha256": self.digest.hexdigest()}


def sums(folder: Path) -> dict[str, Sum]:
    """Of all files of a record, as they are."""
    return {name: Sum(_lines(folder / name)) for name in CHAINED}


def announcement(sums: dict[str, Sum]) -> dict[str, Any]:
    """The line of the chain that says what some files will be."""
    return {"files": {name: to_be.state for name, to_be in sums.items()}}


def split(text: bytes) -> list[bytes]:
    """Lines with their ends; what follows the last one is a line, too."""
    *lines, rest = text.split(b"\n")
    return [line + b"\n" for line in lines] + [rest] * bool(rest)


def _lines(path: Path) -> list[bytes]:
    if path.suffix == ".json":
        return split(content(path))
    return [line + b"\n" for line in whole_lines(path)]


# -- is a record as it was written? ----------------------------------------------------------


def edited(folder: Path, growing: bool = False) -> str | None:
    """The first file and line that are not as they were written, in words, or None.

    Args:
        growing: somebody is writing, so that files may be ahead of what is read of the chain.
    """
    groups = [row["files"] for row in read_lines(folder / CHAIN)]
    if not groups:  # an older version had no chain
        return None
    for name in CHAINED:
        states = [group[name] for group in groups if name in group]
        settled = bool(groups) and name not in groups[-1]
        if why := _changed(folder / name, [EMPTY, *states], settled, growing):
            return f"{name} {why}"
    return None


def _changed(path: Path, states: list[State], settled: bool, growing: bool) -> str | None:
    """How a file differs from its last state, and, unless that is settled, from all between it and
    the one before."""
    lines, allowed = _lines(path), states[-1:] if settled else states[-2:]
    if path.suffix == ".json":
        right = Sum(lines).state["sha256"] in [state["sha256"] for state in allowed]
        return None if right or growing else "is not as it was written"
    known, last = {0: EMPTY["sha256"]}, 0
    for state in states:
        now, digest = state["lines"], state["sha256"]
        if now <= last and known.get(now, digest) != digest:
            return f"was edited at or before line {now}, then continued"
        if now > last:  # what was announced beyond, and never written or set aside, is no more
            known = {count: before for count, before in known.items() if count <= last}
        known[now], last = digest, now
    counts = [state["lines"] for state in allowed]
    return _different(lines, known, max(counts)) or _miscounted(path, lines, counts, growing)


def _different(lines: list[bytes], known: dict[int, str], most: int) -> str | None:
    digest, right = hashlib.sha256(), 0
    for number, line in enumerate(lines[:most], start=1):
        digest.update(line)
        if number in known:
            if digest.hexdigest() != known[number]:
                where = (
                    f"line {number}" if right == number - 1 else f"lines {right + 1} to {number}"
                )
                return f"{where} differs from what was written"
            right = number
    return None


def _miscounted(path: Path, lines: list[bytes], counts: list[int], growing: bool) -> str | None:
    if len(lines) < min(counts):
        return f"ends before line {len(lines) + 1} of {min(counts)}"
    torn = len(content(path)) > sum(map(len, lines))
    if growing or len(lines) + torn <= max(counts):
        return None
    return f"has a line {max(counts) + 1} that was not written by the run"
