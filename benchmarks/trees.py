"""The trees of commits, which benchmarks hold against the present one, and ends of processes."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Sequence
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


def ends(started: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[str, str]]:
    """What processes have written, once they have ended. If one has not within so many seconds,
    all are killed: they would take a core of what is measured next."""
    try:
        return [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
