"""The input files of a command, which its output files must not replace.

A command runs inside ``track_inputs``. Each place that reads a file calls ``add_input``;
``records.files.check_output`` asks ``was_read`` before it writes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Identity = tuple[int, int]  # device and inode: the same for every name of a file

_read: set[Identity] | None = None


@contextmanager
def track_inputs() -> Iterator[None]:
    """Collect the files that are read inside; a nested call adds to the outer collection."""
    global _read
    before = _read
    _read = set() if before is None else before
    try:
        yield
    finally:
        _read = before


def add_input(path: Path) -> None:
    """Register a file as input of the command."""
    identity = _identity(path)
    if _read is not None and identity:
        _read.add(identity)


def was_read(path: Path) -> bool:
    """Answer whether this file is an input of the command."""
    return _read is not None and _identity(path) in _read


def _identity(path: Path) -> Identity | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None
