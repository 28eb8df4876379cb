"""The trees of commits, which benchmarks hold against the present one, and processes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def unpack(commit: str, place: Path) -> None:
    """The tree of a commit."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(place, filter="data")


def run_script(tree: Path, processes: int, script: str, words: Sequence[str]) -> list[Any]:
    """The last line that each process prints, as JSON. All run a script with the code of a tree, on
    one thread each; its arguments are the process's place, the number of processes, a folder in
    which they can meet, and ``words``."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-W", "ignore", "-P", "-c", script]
    with tempfile.TemporaryDirectory() as meeting:
        started = [
            subprocess.Popen(
                [*command, str(place), str(processes), meeting, *words],
                env=env,
                cwd=tree,
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in range(processes)
        ]
        said = ends(started, 300)
    return [json.loads(answer.splitlines()[-1]) for answer, _ in said]


def ends(started: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[str, str]]:
    """What processes have written, once they have ended. If one has not within so many seconds,
    all are killed: they would take a core of what is measured next."""
    try:
        return [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
