"""The trees of commits, which benchmarks hold against the present one."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]


def unpack(commit: str, place: Path) -> None:
    """The tree of a commit."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(place, filter="data")
