"""Local steps, for tests: a small configuration, and what a loop over copied models needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from configs import gpt as words
from torch import nn

from regimes.config import RunConfig
from regimes.training.build import prepare

DENSE = ("policy={name='static',level='dense'}", "dtype=float64")
DILOCO = ("outer.lr=0.7", "outer.momentum=0.9", "outer.nesterov=true")
ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.clip=1.0")
SGD = ("optimizer.nesterov=true", "optimizer.momentum=0.9", "optimizer.lr=0.1")


def every(period: int) -> str:
    return f"sync_policy={{name='static',level='{period}'}}"


def text(*settings: str) -> RunConfig:
    """A GPT without BatchNorm and dropout; 17 steps of 4 workers."""
    return words(*DENSE, "epochs=1", "optimizer.decay_epochs=[]", *settings)


def steps(c: RunConfig) -> tuple[nn.Module, Callable[..., Any], Iterator[Any], Callable[..., Any]]:
    """Of a run: its model, loss, batches [L, b, ...] one after the other, and a maker of its
    optimiser over another model."""
    parts = prepare(c)

    def batches() -> Iterator[Any]:
        for epoch in range(c.epochs):
            yield from parts.batches.epoch(epoch, range(c.workers))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        o, groups = c.optimizer, [p for p in model.parameters() if p.requires_grad]
        if o.name == "sgd":
            return torch.optim.SGD(
                groups, o.lr, o.momentum, nesterov=o.nesterov, weight_decay=o.weight_decay
            )
        matrices, vectors = ([p for p in groups if (p.ndim > 1) is big] for big in (True, False))
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": o.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=o.lr,
        )

    return parts.model, parts.task.loss, batches(), optimizer


def clip(model: nn.Module, largest: float | None) -> None:
    """Without the 1e-6 that torch's function adds to the norm."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    for g in gradients:
        g *= min(1.0, (largest or math.inf) / norm)


def step_each(c: RunConfig, models: Any, optimizers: Any, loss: Any, x: Any, y: Any) -> None:
    """A local step of each model, by its own optimiser, on its own samples."""
    for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model.train()
        optimizer.zero_grad()
        loss(model, x[worker], y[worker]).backward()
        clip(model, c.optimizer.clip)
        optimizer.step()


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], by: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=by, atol=by)
