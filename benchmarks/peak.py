"""Bytes at the peak second: DiLoCo at once, and in fragments (`benchmarks.nodes`).

    python -m benchmarks.peak               # Linux, root, iproute2; about 10 min

Four processes on four nodes train a small GPT by `regimes.local_steps` (gloo over TCP), one worker
each, 32 local steps a round. Each step begins a fixed time after the one before, as if a GPU
computed it, so that seconds do not depend on how busy the machine is, as long as a step takes less.
In each process a thread reads the kernel's counter of the bytes that its link has sent, headers
included, every 20 ms. The peak second is the largest difference over one second, of the node where
it is largest; rounds before the first synchronisation of all layers and the end, which synchronises
all at once, are left out. The links have 100 Mbit/s in each direction.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.nodes import NODES, Nodes, limit, star
from regimes.config import RunConfig, from_dict, override, to_dict
from regimes.presets import get_preset
from regimes.records import provenance, write_output

PERIOD, RATE, EVERY = 32, 100, 0.02  # steps; Mbit/s; seconds between two readings
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMED = {**DILOCO, "fragments": 4}
DELAYED = {**STREAMED, "delay": 4, "mixing": 0.5}
SPARSE = {"compressor": {"name": "chunked-topk"}, "level": 1.56}
FEW_BITS = {
    "compressor": {"name": "quantised-all-reduce", "stochastic": False, "error_feedback": True},
    "level": 4,
}
METHODS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"outer": DILOCO},
    "4 fragments": {"outer": STREAMED},
    "4 fragments, delay 4": {"outer": DELAYED},
    "4 fragments, delay 4, 4 bits": {"outer": DELAYED, **FEW_BITS},
    "4 fragments, delay 4, SparseLoCo": {"outer": DELAYED, **SPARSE},
}
Reading = tuple[float, int]  # seconds, bytes so far


def sent() -> int:
    """Bytes that this namespace has sent over its link so far, by the kernel's count."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


class Counter(threading.Thread):
    """Reads the counter until ``end``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.readings: list[Reading] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(EVERY):
            self.readings.append((time.monotonic(), sent()))

    def end(self) -> list[Reading]:
        self.over.set()
        self.join()
        return self.readings


def peak(readings: Sequence[Reading], window: float = 1.0) -> int:
    """The most bytes between two readings that are at least a window apart, and at most one reading
    more.

    >>> peak([(0.0, 0), (0.5, 10), (1.0, 30), (1.5, 90), (2.0, 91)])
    80
    """
    times = [at for at, _ in readings]
    most = 0
    for at, before in readings:
        stop = bisect_left(times, at + window)
        if stop < len(readings):
            most = max(most, readings[stop][1] - before)
    return most


def train(config: dict[str, Any], options: dict[str, Any], rounds: int, pace: float) -> Any:
    """On a node: its readings between the first round and the last, and the test loss."""
    import torch

    import regimes
    from regimes.training.build import prepare_run

    parts = prepare_run(from_dict(RunConfig, config))
    (optimizer,) = parts.optimizer.parts
    local = regimes.local_steps(parts.model, optimizer, policy=PERIOD, **options)
    batches = parts.batches.epoch(0, parts.world.hosted)
    counter = Counter()
    planned = time.monotonic()
    for step, (x, y) in enumerate(islice(batches, PERIOD * rounds)):
        if step == PERIOD:
            counter.start()
        optimizer.zero_grad()
        parts.task.loss(parts.model, x[0], y[0]).backward()
        optimizer.step()
        local.step()
        planned += pace
        time.sleep(max(0.0, planned - time.monotonic()))
        planned = max(planned, time.monotonic())  # what is late stays late
    found = counter.end()
    local.close()
    loss = float(parts.task.evaluate(parts.model, torch.device("cpu"), torch.float32)[0])
    parts.close()
    return {"readings": found, "loss": loss}


def configuration(rounds: int) -> RunConfig:
    """A GPT of 0.4 M parameters on a text, in batches of one short window."""
    return override(
        get_preset("lm-smoke"),
        [
            "model.width=128",
            "data.sequence=32",
            "batch_size=1",
            f"steps={PERIOD * rounds}",
            f"workers={NODES}",
            "optimizer.decay_steps=[]",
        ],
    )


def measure(rounds: int, pace: float, times: int) -> dict[str, Any]:
    """All methods in turn, so often."""
    config = configuration(rounds)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    with star() as names, Nodes(names, deadline=900.0) as nodes:
        limit(names, RATE)
        for _ in range(times):
            for name, options in METHODS.items():
                details = {"options": options, "rounds": rounds, "pace": pace}
                found = nodes.ask("peak", config=to_dict(config), **details)
                rows[name].append(
                    {
                        "peak": max(peak(node["readings"]) for node in found),
                        "bytes": max(n["readings"][-1][1] - n["readings"][0][1] for n in found),
                        "loss": found[0]["loss"],
                    }
                )
                print(name, rows[name][-1], f"load {os.getloadavg()[0]:.0f}", flush=True)
    return {
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "processor": provenance.processor_name(),
            "load": os.getloadavg()[0],
        },
        "rounds": rounds,
        "pace": pace,
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    rows, machine = result["rows"], result["machine"]
    base = [row["peak"] for row in rows["DiLoCo"]]
    text = [
        "This page compares the bytes that a node sends in its busiest second: DiLoCo, which "
        "synchronises the whole model at once, and Streaming DiLoCo. `python -m benchmarks.peak` "
        "measures; its docstring describes the method.",
        "",
        "| method | peak second, MB | of DiLoCo's (range) | per round, MB |",
        "|---|---:|---|---:|",
    ]
    for name, runs in rows.items():
        shares = sorted(row["peak"] / whole for row, whole in zip(runs, base, strict=True))
        total = statistics.median(run["bytes"] for run in runs) / (result["rounds"] - 1)
        text.append(
            f"| {name} | {statistics.median(run['peak'] for run in runs) / 1e6:.2f} "
            f"| {statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f}) "
            f"| {total / 1e6:.2f} |"
        )
    return "\n".join(
        [
            *text,
            "",
            f"n = {len(base)} runs of {result['rounds'] - 1} counted rounds of {PERIOD} steps, one "
            f"step every {result['pace']:g} s; medians, and ratios within a turn of all methods. "
            f"{NODES} processes on {machine['cores']} cores of a {machine['processor']} "
            f"(load average {machine['load']:.0f}). The four fragments are not equal: a layer "
            "is never divided.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--pace", type=float, default=0.25, help="seconds from step to step")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = measure(chosen.rounds, chosen.pace, chosen.times)
    write_output(chosen.out / "peak.json", json.dumps(result, indent=1) + "\n")
    write_output(chosen.out / "peak.md", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
