"""Branches and pulses. Oracle: a loop of one's own over copies of the weights, momenta and
residuals, with compression written out."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke
from runs import weights
from torch import Tensor

import regimes
from regimes.base.config import RunConfig
from regimes.base.seeding import make_generator
from regimes.training.build import prepare_run

WORKERS, SEED, MOMENTUM, DECAY = 4, 0, 0.9, 1e-4


@dataclass
class Loop:
    """Data-parallel SGD on one process, its state by the name of a layer.

    ``copy.deepcopy`` of it is a branch.
    """

    model: torch.nn.Module
    momenta: dict[str, Tensor] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)  # [workers, n, m]
    q: dict[str, Tensor] = field(default_factory=dict)  # [rank, m]

    def step(self, gradients: Mapping[str, Tensor], lr: float, rule: Rule) -> None:
        for name, parameter in self.model.named_parameters():
            stack = gradients[name]
            update = stack.mean(0) if parameter.ndim < 2 else rule(self, name, stack.flatten(2))
            g = update.view_as(parameter) + DECAY * parameter.detach()
            buffer = self.momenta[name] = MOMENTUM * self.momenta.get(name, 0) + g
            with torch.no_grad():
                parameter -= lr * (g + MOMENTUM * buffer)


Rule = Callable[[Loop, str, Tensor], Tensor]


def powersgd(rank: int) -> Rule:
    def reduce(loop: Loop, name: str, gradient: Tensor) -> Tensor:
        delta = gradient + loop.residuals.get(name, 0)
        rows = list(loop.q.get(name, []))[:rank]
        for row in range(len(rows), min(rank, *delta.shape[1:])):
            generator = make_generator(SEED, name, "q", row)
            rows.append(torch.randn(delta.shape[2], generator=generator, dtype=delta.dtype))
        p = torch.linalg.qr((delta @ torch.stack(rows).T).mean(0)).Q
        loop.q[name] = (delta.mT @ p).mean(0).T
        loop.residuals[name] = delta - p @ loop.q[name]
        return p @ loop.q[name]

    return reduce


def topk(percent: float, feedback: bool) -> Rule:
    def reduce(loop: Loop, name: str, gradient: Tensor) -> Tensor:
        loop.q.pop(name, None)  # of PowerSGD, which starts anew after it
        delta = gradient + loop.residuals.pop(name, 0) if feedback else gradient
        loop.residuals.pop(name, None)
        sent = torch.zeros_like(delta)
        for mine, out in zip(delta.flatten(1), sent.flatten(1), strict=True):
            chosen = mine.abs().topk(max(1, round(percent / 100 * mine.numel()))).indices
            out[chosen] = mine[chosen]
        if feedback:
            loop.residuals[name] = delta - sent
        return sent.mean(0)

    return reduce


def dense(loop: Loop, name: str, gradient: Tensor) -> Tensor:
    return (gradient + loop.residuals.pop(name, 0)).mean(0)


def config(*settings: str) -> RunConfig:
    """Four units without a rate that changes, each worker by itself."""
    plain = ["optimizer.decay_epochs=[]", "optimizer.warmup_from=none", "optimizer.lr=0.1"]
    given = ["union_pass=false", "checkpoint_keep=[0, 1, 2]", f"seed={SEED}", *settings]
    return smoke(*plain, *given)


def train(loop: Loop, run: Any, units: range, rule: Rule, lr: float = 0.1) -> None:
    """Continue a loop through some epochs of a run's data."""
    names = [name for name, _ in loop.model.named_parameters()]
    for epoch in units:
        for x, y in run.batches.epoch(epoch, range(WORKERS)):
            loop.model.train()
            each = [
                torch.autograd.grad(
                    run.task.loss(loop.model, x[w], y[w]),
                    list(loop.model.parameters()),
                    materialize_grads=True,
                )
                for w in range(WORKERS)
            ]
            stacks = map(torch.stack, zip(*each, strict=True))
            loop.step(dict(zip(names, stacks, strict=True)), lr, rule)


P2 = ["levels={low=2, high=1}", "policy={name='static', level='low'}"]
T20 = ["compressor=topk", "levels={low=20, high=5}", "policy={name='static', level='low'}"]
USUAL = {"P2": (P2, powersgd(2)), "T20": (T20, topk(20, True))}
CASES: dict[str, tuple[str, dict[str, Any], Rule]] = {
    "rank 1": ("P2", {"policy.level": "high"}, powersgd(1)),
    "dense": ("P2", {"policy.level": "dense"}, dense),
    "topk": ("T20", {"policy.level": "high"}, topk(5, True)),
    "no feedback": ("T20", {"compressor.error_feedback": False}, topk(20, False)),
    "from powersgd to topk": (
        "P2",
        {"compressor": "topk", "levels.low": 20, "levels.high": 5},
        topk(20, True),
    ),
}


class Trunk:
    """A run of four units, and the loop before each of them and at the end."""

    def __init__(self, settings: list[str], rule: Rule, out: Path) -> None:
        self.rule, self.record = rule, regimes.run(config(*settings), out)
        self.run = prepare_run(config(*settings))
        loop = Loop(self.run.task.build(self.run.config).double())
        self.before = [copy.deepcopy(loop)]
        for unit in range(4):
            train(loop, self.run, range(unit, unit + 1), rule)
            self.before.append(copy.deepcopy(loop))


@pytest.fixture(scope="module")
def trunk_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trunk]:
    out = tmp_path_factory.mktemp("trunks")
    return functools.cache(lambda name: Trunk(*USUAL[name], out / name))


def has_the_weights_of(folder: Path, loop: Loop) -> None:
    saved = weights(folder)
    for layer, parameter in loop.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), saved[layer], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_pulse_is_a_loop_that_copies_its_state(
    name: str, at: int, trunk_of: Callable[[str], Trunk], tmp_path: Path
) -> None:
    usual, changed, pulse = CASES[name]
    trunk = trunk_of(usual)
    record = regimes.branch(trunk.record, at=at, length=1, set=changed, out=tmp_path)
    assert len(record.rows) == 4
    branch = copy.deepcopy(trunk.before[at])
    train(branch, trunk.run, range(at, at + 1), pulse)
    train(branch, trunk.run, range(at + 1, 4), trunk.rule)
    has_the_weights_of(tmp_path, branch)
    has_the_weights_of(trunk.record.folder, trunk.before[-1])  # and it has another result
    assert record.rows[-1]["train_loss"] != trunk.record.rows[-1]["train_loss"]


def test_another_rate(trunk_of: Callable[[str], Trunk], tmp_path: Path) -> None:
    trunk = trunk_of("P2")
    regimes.branch(trunk.record, at=2, set={"optimizer.lr": 0.05}, out=tmp_path)
    loop = copy.deepcopy(trunk.before[2])
    train(loop, trunk.run, range(2, 4), trunk.rule, lr=0.05)
    has_the_weights_of(tmp_path, loop)


def test_the_rate_after_a_unit_is_the_next_units(tmp_path: Path) -> None:
    """Oracle: the next row, within a pulse at another rate, at its ends and beside it."""
    falling = ("optimizer.schedule=cosine", "optimizer.per=step")
    trunk = regimes.run(config(*P2, *falling), tmp_path / "trunk")
    pulses = [
        regimes.branch(
            trunk, at=at, length=2, set={"optimizer.lr": 0.05}, out=tmp_path / f"from {at}"
        )
        for at in (1, 2)
    ]
    for record in (trunk, *pulses):
        rates, following = ([row[name] for row in record.rows] for name in ("lr", "next_lr"))
        assert following[:-1] == rates[1:]
        assert (rates == [row["lr"] for row in trunk.rows]) == (record is trunk)
