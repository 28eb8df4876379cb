"""A simulated step of W = 4 workers against a bare torch loop

The bare loop: four forward and backward passes of a worker's batch, their gradients added up, one
SGD step. *One pass*: a loop that knows no workers, with one pass over all their batches and
BatchNorm over all of them. Ours: the same batches with PowerSGD rank 2, error feedback, traffic
counted, one SGD step; *union*: in one pass over the four batches, BatchNorm per worker, as `regimes
run` does for linear compressors; *worker by worker*: in four, as it does for the others. Batch per
worker: smoke 8, small 16, ResNet-18 8 images of 32 x 32. Floor: the bare loop's own passes. The
last rows are of TopK, which needs each worker's gradient, with 64 workers of smoke and 16 of small,
against a step of PowerSGD in one union pass.
"""

from __future__ import annotations

import statistics

from benchmarks.harness import NETS, Limits, Loop, Net, Row, compare, interleaved, sgd
from regimes.compression.powersgd import PowerSGD
from regimes.compression.sparse import TopK
from regimes.data.classification import classification_loss

TARGETS = {"smoke": 1.10, "small": 1.10, "ResNet-18": 1.05}
ONE_PASS = {"smoke": 1.15, "small": 1.08, "ResNet-18": None}
WORKERS = 4
MANY = {"smoke": (64, 40), "small": (16, 20)}  # workers and rounds


class Bare:
    """What one would write without any of this."""

    def __init__(self, net: Net, *, one_pass: bool = False) -> None:
        self.model = net.build().train()
        x, y = net.images(WORKERS)
        pairs = [(x.flatten(0, 1), y.flatten())] if one_pass else zip(x, y, strict=True)
        self.batches = [(a.contiguous(), b.contiguous()) for a, b in pairs]
        self.optimizer = sgd(self.model.parameters())

    def passes(self) -> None:
        for x, y in self.batches:
            (classification_loss(self.model, x, y) / len(self.batches)).backward()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.passes()
        self.optimizer.step()


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    rows = []
    for name, net in NETS.items():
        bare = Bare(net)
        tasks = {
            "bare loop": bare,
            "one pass": Bare(net, one_pass=True),
            "union": Loop(net, PowerSGD(), 2, union=True),
            "worker by worker": Loop(net, PowerSGD(), 2, union=False),
            "passes": bare.passes,
        }
        rounds = {"smoke": 60, "small": 30}.get(name, 7)
        clear = bare.optimizer.zero_grad  # or the floor's passes would add to what is there
        seconds = interleaved(tasks, rounds // 3 if quick else rounds, before=clear)
        least = 1e3 * statistics.median(seconds["passes"])
        rows += [
            compare(f"{name}, {way}", seconds, way, "bare loop", target, floor=least)
            for way, target in (("union", TARGETS[name]), ("worker by worker", None))
        ]
        rows.append(compare(f"{name}, union", seconds, "union", "one pass", ONE_PASS[name]))
    return rows + [row for name in MANY for row in _many(name, quick)]


def _many(name: str, quick: bool) -> list[Row]:
    """Many workers, each with a gradient of its own."""
    net, (workers, rounds) = NETS[name], MANY[name]
    tasks = {
        "union": Loop(net, PowerSGD(), 2, workers=workers, union=True),
        "worker by worker": Loop(net, TopK(), 0.1, workers=workers, union=False),
    }
    seconds = interleaved(tasks, rounds // 3 if quick else rounds)
    way = "worker by worker"
    return [compare(f"{name}, {workers} workers, TopK, {way}", seconds, way, "union")]
