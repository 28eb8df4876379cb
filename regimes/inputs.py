"""The files that a command has read: no file that it writes may replace one of them.

``noted`` opens the list of a command, ``note`` adds to it where a file is read, ``is_one`` asks
before a file is written (``records.files.check_output``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Identity = tuple[int, int]  # device and inode: the same file by any name

_read: set[Identity] | None = None


@contextmanager
def noted() -> Iterator[None]:
    """Note what is read inside; of one within another, in the outer one's list."""
    global _read
    before = _read
    _read = set() if before is None else before
    try:
        yield
    finally:
        _read = before


def note(path: Path) -> None:
    """This file is being read."""
    found = _identity(path)
    if _read is not None and found:
        _read.add(found)


def is_one(path: Path) -> bool:
    """Has the command read this file?"""
    return _read is not None and _identity(path) in _read


def _identity(path: Path) -> Identity | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None
