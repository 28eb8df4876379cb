"""`regimes` in a process of its own, as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def read(folder: Path, *words: str) -> str:
    """What `regimes WORDS` prints in a folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "regimes", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
