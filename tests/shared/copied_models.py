"""Local steps, for tests: a small configuration, and what a loop over copied models needs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from configs import gpt as words
from torch import nn

from regimes.base.config import RunConfig
from regimes.training.build import prepare_run

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
    parts = prepare_run(c)

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
        step_one(c, model, optimizer, loss, x[worker], y[worker])


def step_one(c: RunConfig, model: Any, optimizer: Any, loss: Any, x: Any, y: Any) -> None:
    model.train()
    optimizer.zero_grad()
    loss(model, x, y).backward()
    clip(model, c.optimizer.clip)
    optimizer.step()


class Feedback:
    """Error feedback around what a worker sends of a matrix, ``send(delta)``; a vector travels as
    it is. The residuals are by worker and layer."""

    def __init__(
        self, send: Callable[[torch.Tensor], torch.Tensor] | None = None, decay: float = 1.0
    ) -> None:
        self.send, self.decay = send, decay
        self.residuals: dict[tuple[int, int], torch.Tensor] = {}

    def mean(self, layer: int, rows: dict[int, torch.Tensor]) -> torch.Tensor:
        """What comes back of the workers' tensors."""
        return torch.stack([self._sent(layer, w, row) for w, row in rows.items()]).mean(0)

    def _sent(self, layer: int, worker: int, row: torch.Tensor) -> torch.Tensor:
        if self.send is None or row.ndim < 2:
            return row
        before = self.residuals.get((worker, layer), torch.zeros_like(row))
        delta = row + self.decay * before
        sent = self.send(delta)
        self.residuals[worker, layer] = delta - sent
        return sent


class Streaming:
    """Algorithm 2 of Douillard et al. (2025), with a copy of the model for each worker; the whole
    model at once where ``parts`` is one."""

    def __init__(
        self, c: RunConfig, period: int, parts: list[list[int]], *, feedback: Feedback | None = None
    ) -> None:
        self.c, self.parts, self.feedback = c, parts, feedback or Feedback()
        self.loss, self.batches, self.make = steps(c)[1:]
        self.model = steps(c)[0]
        self.synced = list(self.model.parameters())
        self.velocity = [torch.zeros_like(p) for p in self.synced]
        self.workers: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self.next_sent = [-(-period * (k + 1) // len(parts)) for k in range(len(parts))]
        self.last_sent = [0] * len(parts)
        self.sent: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.period = period

    def tensors(self) -> dict[int, list[torch.Tensor]]:
        return {w: list(model.parameters()) for w, (model, _) in self.workers.items()}

    def run(self) -> dict[str, torch.Tensor]:
        """The synchronised parameters at the end."""
        todo = list(self.batches)
        for w in range(self.c.workers):
            model = copy.deepcopy(self.model)
            self.workers[w] = model, self.make(model)
        for done, (x, y) in enumerate(todo, start=1):
            for w, (model, optimizer) in self.workers.items():
                step_one(self.c, model, optimizer, self.loss, x[w], y[w])
            with torch.no_grad():
                self._exchange(done, over=done == len(todo))
        return dict(self.model.named_parameters())

    def _exchange(self, done: int, over: bool) -> None:
        for k in [k for k in self.sent if over]:
            self._arrive(k)
        for k, part in enumerate(self.parts):
            if done == self.next_sent[k] or (over and self.last_sent[k] < done):
                moved = [
                    self.feedback.mean(
                        i, {w: self.synced[i] - own[i] for w, own in self.tensors().items()}
                    )
                    for i in part
                ]
                self.sent[k] = done + self.c.outer.delay, moved
                self.next_sent[k], self.last_sent[k] = done + self.period, done
        for k in [k for k, (due, _) in self.sent.items() if over or due == done]:
            self._arrive(k)

    def _arrive(self, k: int) -> None:
        outer = self.c.outer
        for i, movement in zip(self.parts[k], self.sent.pop(k)[1], strict=True):
            self.velocity[i].mul_(outer.momentum).add_(movement)
            ahead = movement + outer.momentum * self.velocity[i]
            self.synced[i] -= outer.lr * (ahead if outer.nesterov else self.velocity[i])
            for own in self.tensors().values():
                own[i].mul_(outer.mixing).add_((1 - outer.mixing) * self.synced[i])


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], by: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=by, atol=by)
