"""One function measured in several processes of a gloo group, over loopback on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Seconds
from benchmarks.trees import ends


def processes(module: str, count: int, *words: object) -> list[Any]:
    """What each of ``count`` processes has measured, by `run_process` in ``python -m module``; one
    thread each.

    Args:
        words: further arguments of the function that they run.

    Raises:
        RuntimeError: one of them failed; the last line that it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module]
                + [str(word) for word in (place, count, folder, *words)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for place in range(count)
        ]
        written = [errors for _, errors in ends(started, 1200)]
        for process, lines in zip(started, written, strict=True):
            if process.returncode:
                raise RuntimeError((lines.strip().splitlines() or ["no message"])[-1])
        return [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(count)]


def run_process(function: Callable[..., Any]) -> None:
    """In a process that `processes` started: join the others' group, and leave what
    ``function(place, *words)`` returns to it; ``words`` are whole numbers."""
    place, count, folder, *words = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=int(place), world_size=int(count)
    )
    measured = function(int(place), *map(int, words))
    dist.destroy_process_group()
    Path(folder, f"{place}.json").write_text(json.dumps(measured))


def added(of_processes: Sequence[Seconds]) -> Seconds:
    """Seconds of all processes together, round by round."""
    return {
        name: [sum(taken) for taken in zip(*(one[name] for one in of_processes), strict=True)]
        for name in of_processes[0]
    }
