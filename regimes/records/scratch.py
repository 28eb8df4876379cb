"""Scratch folders that do not outlive their process by much.

Each has a file that its process keeps locked. A process that is killed cannot remove its folder;
the next one that makes such a folder finds the lock free and does. No torch.
"""

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
    """An empty folder of this process alone, removed at the end."""
    _remove_abandoned()
    place = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (place / "being-made").open("xb") as lock:
            _lock(lock)
            os.replace(place / "being-made", place / LOCK)  # seen by others only when it is locked
            (place / "content").mkdir()
            yield place / "content"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            if _lock(file):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _lock(file: BinaryIO) -> bool:
    """Take the lock of a file if it is free; Windows has none, and nothing is removed there."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
