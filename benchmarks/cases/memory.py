"""Peak memory of W = 4 simulated workers

Largest resident set of a fresh process that trains ResNet-18 for three steps, 4 images per worker,
against the limit: the bare loop's, and three gradients for each worker.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import replace

from benchmarks.cases.simulated import WORKERS, Bare
from benchmarks.harness import NETS, Limits, Loop, Row, child, peak_memory
from regimes.base.config import DENSE
from regimes.compression.elementwise import Dense
from regimes.compression.powersgd import PowerSGD
from regimes.compression.sparse import TopK

GRADIENT = 4 * 11_173_962 / 2**20  # MiB
WAYS = {
    "dense, worker by worker": lambda net: Loop(net, Dense(), DENSE, union=False),
    "PowerSGD rank 2, union": lambda net: Loop(net, PowerSGD(), 2, union=True),
    "PowerSGD rank 2, worker by worker": lambda net: Loop(net, PowerSGD(), 2, union=False),
    "TopK 10 %, worker by worker": lambda net: Loop(net, TopK(), 10, union=False),
    "TopK 99 %, worker by worker": lambda net: Loop(net, TopK(), 99, union=False),
}


def peak(way: str) -> float:
    """MiB of this process, after the steps."""
    net = replace(NETS["ResNet-18"], batch=4)
    step = Bare(net) if way == "bare" else WAYS[way](net)
    for _ in range(3):
        step()
    return peak_memory()


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    bare = float(child("benchmarks.cases.memory", "bare"))
    limit = bare + 3 * WORKERS * GRADIENT
    return [
        Row(
            way,
            "bare loop + 3 W gradients",
            float(child("benchmarks.cases.memory", way)),
            limit,
            1,
            unit="MiB",
            rounds=1,
            note=f"The bare loop: {bare:.0f} MiB; a gradient: {GRADIENT:.1f} MiB.",
        )
        for way in WAYS
    ]


if __name__ == "__main__":
    print(peak(sys.argv[1]))
