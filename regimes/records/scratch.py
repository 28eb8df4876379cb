"""Scratch folders that do not outlive their process by much. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PREFIX, LOCK = "regimes-archive-", ".lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder, removed at the end. A killed process leaves it, but not its lock, by which
    the next process knows that it may remove it."""
    for abandoned in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), abandoned.open("rb") as file:
            if _lock(file):
                shutil.rmtree(abandoned.parent, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (place / "being-made").open("xb") as lock:
            _lock(lock)  # before it has its name, by which other processes find it
            os.replace(place / "being-made", place / LOCK)
            (place / "content").mkdir()
            yield place / "content"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _lock(file: BinaryIO) -> bool:
    """Take a file's lock if it is free. Windows has none, so that nothing is removed there."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
