"""Start-up

CPU time (user and system) of a fresh interpreter with its files in the page cache, which is its
wall time on an idle machine; the limit is absolute. Floor: an interpreter that does nothing.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from functools import partial

from benchmarks.harness import Limits, Row, interleaved

COMMANDS = {  # and the limit in ms
    "import regimes": (["-c", "import regimes"], 150),
    "regimes --help": (["-m", "regimes", "--help"], 300),
}


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    words = {name: words for name, (words, _) in COMMANDS.items()} | {"nothing": ["-c", ""]}
    tasks = {
        name: partial(subprocess.run, [sys.executable, *rest], check=True, capture_output=True)
        for name, rest in words.items()
    }
    seconds = interleaved(tasks, 3 if quick else 15, clock=_of_children)
    median = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
    return [
        Row(
            name,
            "the limit",
            median[name],
            limit,
            1,
            rounds=len(seconds[name]),
            floor=median["nothing"],
        )
        for name, (_, limit) in COMMANDS.items()
    ]


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
