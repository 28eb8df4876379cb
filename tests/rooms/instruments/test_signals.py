"""What a run records of its gradients and steps, for optimisers, local steps and units in
combination. Oracle: plain torch over a copy of the model for each worker."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from configs import gpt as words
from torch import Tensor, nn

import regimes
from regimes.base.config import RunConfig
from regimes.training.build import prepare_run

SIGNALS = ("update", "global", "local-mean", "worker0", "movement", "movement/lr")
OPTIMIZERS = {
    "sgd": ("optimizer.momentum=0.9", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.02", "optimizer.weight_decay=0.3"),
    "rmsprop": (
        "optimizer.name=torch.optim:RMSprop",
        "optimizer.lr=0.01",
        "optimizer.options.alpha=0.9",
        "optimizer.weight_decay=0.1",
    ),
}


class Case(NamedTuple):
    """``period``: None for the shared step; ``unit``: steps, None for an epoch."""

    optimizer: str
    period: int | None
    unit: int | None


CASES = [
    Case(optimizer, period, unit)
    for i, optimizer in enumerate(OPTIMIZERS)
    for j, period in enumerate((None, 1, 3))
    for unit in [(None, 4)[(i + j) % 2]]
]


def config(case: Case) -> RunConfig:
    """34 steps of 4 workers at a rate that falls in each of them."""
    local = (f"sync_policy={{name='static',level='{case.period}'}}", "outer.period_one=parameters")
    return words(
        "policy={name='static',level='dense'}",
        "dtype=float64",
        "union_pass=false",
        "optimizer.per=step",
        "optimizer.schedule=linear",
        *OPTIMIZERS[case.optimizer],
        f"instruments.norms.readings={list(SIGNALS)}",
        *(local if case.period else ()),
        *([f"unit_steps={case.unit}"] if case.unit else []),
    )


def made(c: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    o, every = c.optimizer, list(model.parameters())
    if o.name == "sgd":
        return torch.optim.SGD(every, o.lr, o.momentum, nesterov=True, weight_decay=o.weight_decay)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0},
    ]
    if o.name == "adamw":
        return torch.optim.AdamW(groups, lr=o.lr)
    return torch.optim.RMSprop(groups, lr=o.lr, alpha=0.9)


class Signals:
    """The six readings of a unit, summed as their definitions say."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.start = [p.clone() for p in parameters]
        self.update, self.lost = ([torch.zeros_like(p) for p in self.start] for _ in range(2))
        self.workers: list[list[Tensor]] = []  # by worker and layer
        self.rates = 0.0

    def see(self, rows: list[list[Tensor]], now: list[Tensor], rate: float, decay: float) -> None:
        """A step, or a round of local ones, whose rates are summed; ``rows`` is what each worker
        hands over."""
        self.workers = [
            list(map(torch.add, a, b))
            for a, b in zip(
                self.workers or [[torch.zeros_like(p) for p in now] for _ in rows],
                rows,
                strict=True,
            )
        ]
        for i, p in enumerate(now):
            self.update[i] += torch.stack([row[i] for row in rows]).mean(0)
            self.lost[i] += rate * decay * p * (p.ndim > 1)
        self.rates += rate

    def read(self, parameters: list[Tensor]) -> dict[str, list[float]]:
        moved = [
            p - start + lost
            for p, start, lost in zip(parameters, self.start, self.lost, strict=True)
        ]
        squares = [[float(x.square().sum()) for x in row] for row in self.workers]
        means = [math.sqrt(sum(column) / len(column)) for column in zip(*squares, strict=True)]
        summed = [float(x.norm()) for x in self.update]
        movement = [float(x.norm()) for x in moved]
        return {
            "update": summed,
            "global": summed,
            "local-mean": means,
            "worker0": [math.sqrt(x) for x in squares[0]],
            "movement": movement,
            "movement/lr": [x / self.rates for x in movement],
        }


def gradients(
    model: nn.Module, loss: Any, x: Tensor, y: Tensor, largest: float
) -> tuple[float, list[Tensor]]:
    """(loss, gradient of at most that norm)."""
    model.train()
    value = loss(model, x, y)
    found = list(torch.autograd.grad(value, list(model.parameters())))
    norm = math.sqrt(sum(float(g.square().sum()) for g in found))
    return float(value.detach()), [g * min(1.0, largest / norm) for g in found]


@torch.no_grad()
def moved(model: nn.Module, optimizer: torch.optim.Optimizer, by: list[Tensor], lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for p, g in zip(model.parameters(), by, strict=True):
        p.grad = g
    optimizer.step()


def naive(c: RunConfig, case: Case) -> list[dict[str, Any]]:
    """By unit: the readings, absent where no round ended, and the mean training loss."""
    parts = prepare_run(c)
    shared = parts.model
    own = [copy.deepcopy(shared) for _ in range(c.workers if case.period else 1)]
    optimizers = [made(c, model) for model in own]
    batches = [b for epoch in range(c.epochs) for b in parts.batches.epoch(epoch, range(4))]
    decay = c.optimizer.weight_decay if c.optimizer.name == "adamw" else 0.0
    unit, loss = case.unit or len(batches) // c.epochs, parts.task.loss

    def now() -> list[Tensor]:
        return [p.detach().clone() for p in shared.parameters()]

    found: list[dict[str, Any]] = []
    signals, losses, rates = Signals(now()), [], 0.0
    for step, (x, y) in enumerate(batches):
        lr, last = c.optimizer.lr * (1 - step / len(batches)), step + 1 == len(batches)
        values = []
        if case.period is None:
            both = [gradients(shared, loss, x[w], y[w], 1.0) for w in range(c.workers)]
            values, rows = [value for value, _ in both], [grads for _, grads in both]
            signals.see(rows, now(), lr, decay)
            mean = [torch.stack(layer).mean(0) for layer in zip(*rows, strict=True)]
            moved(own[0], optimizers[0], mean, lr)
            shared.load_state_dict(own[0].state_dict())
        else:
            for w, (model, optimizer) in enumerate(zip(own, optimizers, strict=True)):
                value, grads = gradients(model, loss, x[w], y[w], 1.0)
                moved(model, optimizer, grads, lr)
                values.append(value)
            rates += lr
            if (step + 1) % case.period == 0 or last:
                before = now()
                rows = [
                    [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]
                    for model in own
                ]
                signals.see(rows, before, rates, decay)
                with torch.no_grad():
                    for p, *theirs in zip(*(m.parameters() for m in (shared, *own)), strict=True):
                        p.copy_(torch.stack(theirs).mean(0))
                for model in own:
                    model.load_state_dict(shared.state_dict())
                rates = 0.0
        losses.append(sum(values) / len(values))
        if (step + 1) % unit == 0 or last:
            readings = signals.read(now()) if signals.workers else {}
            found.append({"readings": readings, "loss": sum(losses) / len(losses), "lr": lr})
            signals, losses = Signals(now()), []
    return found


# shared steps alone are those of `test_norms` and of the optimisers' movement, too
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.period else pytest.mark.slow) for case in CASES],
    ids=["-".join(map(str, case)) for case in CASES],
)
def test_a_record_has_the_signals_of_the_naive_loop(case: Case, tmp_path: Path) -> None:
    c = config(case)
    record, wanted = regimes.run(c, tmp_path), naive(c, case)
    assert len(record.rows) == len(wanted) == (9 if case.unit else 2)
    for row, unit in zip(record.rows, wanted, strict=True):
        assert row["train_loss"] == pytest.approx(unit["loss"], rel=1e-6)
        assert row["statistics"].keys() == {f"norm:{name}" for name in unit["readings"]}
        for name, values in unit["readings"].items():
            assert row["statistics"][f"norm:{name}"] == pytest.approx(values, rel=1e-8), name
