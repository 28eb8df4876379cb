"""A step of a language model against a bare AdamW loop

``lm-small``: a GPT of 115 k parameters, W = 4 x 8 windows of 64 bytes, AdamW. The bare loop: one
forward and backward pass over all 32 windows, one step of ``torch.optim.AdamW`` over the same two
groups. Ours: the step of ``regimes run`` with PowerSGD rank 4, error feedback and traffic counted,
without and with the gradient-norm instrument. Floor: the bare loop's own pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Limits, Row, compare, interleaved
from regimes.base.config import override
from regimes.job.clock import Clock
from regimes.presets import get_preset
from regimes.training.build import prepare_run
from regimes.training.gradients import set_gradients
from regimes.training.loop import Minibatch, take_step

SETTINGS = [
    "policy=static",
    "data.train_size=4097",
    "epochs=1",
    "data.test_size=1025",
    "unit_steps=none",
]


def ours(measured: bool) -> Callable[[], None]:
    """A step as the trainer takes it."""
    run = prepare_run(override(get_preset("lm-small"), [*SETTINGS, "device=cpu"]))
    batch = Minibatch(0, 0, 0, 1e-4, False, *next(iter(run.batches.epoch(0, run.world.hosted))))
    levels: list[Any] = [
        run.level_value("low") if layer.compressed else "dense" for layer in run.layers
    ]
    clock, optimizer = Clock(run.device), run.optimizer
    optimizer.lr = 1e-4

    def step() -> None:
        updates, loss, *_ = take_step(run.gradients, run.exchange, batch, levels, clock)
        loss.item()
        if measured:
            run.panel.step(run.gradients.stack, updates)
        set_gradients(run.gradients.parameters, updates)
        optimizer.step()

    return step


class Bare:
    """What one would write without any of this."""

    def __init__(self) -> None:
        run = prepare_run(override(get_preset("lm-small"), [*SETTINGS, "device=cpu"]))
        self.model, self.loss = run.model.train(), run.task.loss
        x, y = next(iter(run.batches.epoch(0, run.world.hosted)))
        self.batch = x.flatten(0, 1).contiguous(), y.flatten(0, 1).contiguous()
        every = list(self.model.parameters())
        groups = [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, foreach=True)

    def passes(self) -> None:
        self.loss(self.model, *self.batch).backward()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.passes()
        self.optimizer.step()


def measure(limits: Limits, *, quick: bool) -> list[Row]:
    bare = Bare()
    tasks = {"bare loop": bare, "ours": ours(False), "measured": ours(True), "pass": bare.passes}
    clear = bare.optimizer.zero_grad  # or the floor's pass would add to what is there
    seconds = interleaved(tasks, 12 if quick else 60, before=clear)
    least = 1e3 * statistics.median(seconds["pass"])
    return [
        compare("lm-small, PowerSGD rank 4", seconds, "ours", "bare loop", 1.02, floor=least),
        compare("lm-small, with the norm", seconds, "measured", "ours", 1.01),
    ]
