"""A local step of W = 4 simulated workers against four loops of bare torch

Each bare loop has its own model and SGD with momentum: forward, backward, step on a worker's batch.
Ours: the same by one module that is lent each worker's tensors; the seconds of a synchronisation
(all workers' mean, dense) are given as a share of a local step. Memory: the largest resident set
of a fresh process after three steps of ResNet-18 with 4 images per worker.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness import NETS, Limits, Net, Row, child, compare, interleaved, peak_memory, sgd
from regimes.base.config import DENSE, OuterConfig
from regimes.collectives.world import World
from regimes.compression.elementwise import Dense
from regimes.compression.exchange import loss_with_flag
from regimes.compression.reducer import Reducer
from regimes.data.classification import classification_loss
from regimes.instruments.panel import Panel
from regimes.job.clock import Clock
from regimes.training.gradients import Gradients, layer_table, set_gradients
from regimes.training.local_rounds import Rounds
from regimes.training.optimizers import Optimizers
from regimes.training.replicas import Replicas

WORKERS, FAR = 4, 10**9


class Bare:
    """Four models, each with its optimiser."""

    def __init__(self, net: Net) -> None:
        self.models = [net.build().train() for _ in range(WORKERS)]
        self.optimizers = [sgd(model.parameters()) for model in self.models]
        x, y = net.images(WORKERS)
        self.batches = [(a.contiguous(), b.contiguous()) for a, b in zip(x, y, strict=True)]

    def __call__(self) -> None:
        for model, own, (x, y) in zip(self.models, self.optimizers, self.batches, strict=True):
            own.zero_grad()
            classification_loss(model, x, y).backward()
            own.step()


class Local:
    """Ours, from the batch to each worker's next parameters."""

    def __init__(self, net: Net) -> None:
        self.x, self.y = net.images(WORKERS)
        model, world = net.build(), World(WORKERS)
        gradients = Gradients(
            model, classification_loss, world, union=False, seed=0, micro_batch=net.batch
        )

        own = [Optimizers([sgd(gradients.parameters)], 0.01) for _ in range(WORKERS)]
        layers, parameters = layer_table(model), gradients.parameters
        reducer = Reducer(Dense(), layers, world, 0)
        self.levels = [DENSE] * len(layers)
        storage = gradients.stack, gradients.layers
        self.rounds = Rounds(parameters, reducer, OuterConfig(), storage, inner=own[0])
        replicas = Replicas(parameters, list(model.buffers()), own)
        self.rounds.replicas = gradients.replicas = replicas
        self.gradients, self.replicas = gradients, replicas
        self.clock = Clock(torch.device("cpu"))

    def __call__(self) -> None:
        self.rounds.begin_step(FAR)
        g = self.gradients
        loss_with_flag(g.compute_gradients(self.x, self.y, 0, 1), g.stack)
        for row, optimizer in enumerate(self.replicas.each_worker()):
            set_gradients(g.parameters, [layer[row] for layer in g.layers], g.unused[row])
            optimizer.step()
        self.rounds.advance_step()

    def synchronize(self) -> None:
        self()
        for fragment in self.rounds.fragments:
            fragment.period = 1
        self.rounds.pending = [(torch.zeros(WORKERS), 0, 0)]
        for _ in self.rounds.synchronize(self.levels, Panel({}), self.clock):
            pass


def peak(way: str) -> float:
    """MiB of this process, after the steps."""
    net = replace(NETS["ResNet-18"], batch=4)
    step = Bare(net) if way == "bare" else Local(net)
    for _ in range(3):
        step()
    return peak_memory()


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    rows = []
    for name, net in NETS.items():
        local = Local(net)
        rounds = {"smoke": 60, "small": 30}.get(name, 7)
        whole_round = local.synchronize
        tasks = {"four bare loops": Bare(net), "a local step": local, "with its end": whole_round}
        seconds = interleaved(tasks, rounds // 3 if quick else rounds)
        medians = {task: statistics.median(taken) for task, taken in seconds.items()}
        end = medians["with its end"] / medians["a local step"] - 1
        row = partial(compare, f"{name}, a local step", seconds, "a local step")
        rows.append(row("four bare loops", 1.05, note=f"A synchronisation: {end:+.0%} of a step."))
    sizes = [float(child("benchmarks.cases.local", way)) for way in ("local", "bare")]
    rows.append(Row("ResNet-18, memory", "four bare loops", *sizes, 1.10, unit="MiB", rounds=1))
    return rows


if __name__ == "__main__":
    print(peak(sys.argv[1]))
