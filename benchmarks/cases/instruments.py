"""The gradient-norm instrument and ACCORDION's decision

Seconds of an epoch with both, against the same epoch without, from the same steps: the instrument
is timed within each step of our loop (W = 4, PowerSGD rank 2, union pass), the reading and the
decision (over 24 past epochs) at the end, and shared out among the steps of the preset's epoch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.harness import NETS, Limits, Loop, Net, Row
from regimes.compression.powersgd import PowerSGD
from regimes.data.classification import classification_loss
from regimes.instruments.base import MeasurementContext
from regimes.instruments.gradient_norm import NormsGauge
from regimes.policies import Accordion
from regimes.policies.history import PastEpoch

TARGET = 1.01


def epoch(net: Net, steps: int) -> tuple[list[float], list[float], float]:
    """Seconds of each step's work, of each step's instrument, and of the epoch's end."""
    loop = Loop(net, PowerSGD(), 2, union=True)
    nothing: Any = None  # the instrument looks at no data
    context = MeasurementContext(
        loop.model, classification_loss, loop.world, loop.layers, 0, True, nothing, nothing
    )
    gauge, clock = NormsGauge(["update"], context), time.process_time
    work, extra = [], []
    for _ in range(steps + 2):
        began = clock()
        loop()
        between = clock()
        gauge.step(loop.gradients.stack, loop.updates)
        work.append(between - began)
        extra.append(clock() - between)
    began = clock()
    norms = gauge.read(0).layers["norm:update"]
    past = [PastEpoch(0.1, 0.1, {"norm": list(norms)}, ["low"] * len(norms))] * 24
    Accordion(interval=3).decide(past, [layer.name for layer in loop.layers])
    return work[2:], extra[2:], clock() - began


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    rows = []
    for name, net in NETS.items():
        steps = {"smoke": 200, "small": 100}.get(name, 8)
        work, extra, end = epoch(net, steps // 4 if quick else steps)
        without = 1e3 * net.steps * statistics.median(work)
        added = 1e3 * (net.steps * statistics.median(extra) + end)
        rows.append(
            Row(
                f"{name}, an epoch of {net.steps} steps",
                "without",
                without + added,
                without,
                TARGET,
                rounds=len(work),
            )
        )
    return rows
