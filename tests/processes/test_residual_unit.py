"""The unit of the residual: a gradient, or a movement of the weights. Oracles: dist-EF-SGD written
out in movements; weights less what they are still owed, which no compression changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke
from ddp_scripts import group
from reducers import EVERY
from runs import same_weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.config import DENSE, Level, override
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression import Compressor, make_compressor
from regimes.compression.bucket import restart_memories
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.training import loop
from regimes.training.gradients import Gradients

F64 = torch.float64
WORKERS, SHAPE = 4, (6, 10)
RATES = (0.5, 0.5, 1.0, 0.0, 0.25, 0.25, 0.01, 0.7)  # a warm-up, a rate of zero, decays, a restart
LEVELS: dict[str, list[Level]] = {
    "topk": [5, 5, 40, 5, 5, DENSE, 5, 5],
    "powersgd": [1, 1, 2, 1, 1, DENSE, 1, 1],
    "acp-sgd": [1, 1, 2, 1, 1, DENSE, 1, 1],
    "sign": [1, 1, 1, 1, 1, DENSE, 1, 1],
    "dct-topk": [5, 5, 40, 5, 5, DENSE, 5, 5],
}


def gradients(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORKERS, *shape, generator=generator, dtype=F64)


def reducer(world: World, **table: Any) -> Reducer:
    world.meter.dtype = F64
    return Reducer(make_compressor(table), [Layer("m", SHAPE)], world, seed=3)


def step(to: Reducer, grad: Tensor, level: Level, rate: float) -> Tensor:
    to.rates = [rate]
    (update,), _ = Exchange(to).exchange_step(
        [grad], [level], torch.zeros(len(grad), dtype=F64), grad.flatten(1)
    )
    return update.clone()


@pytest.mark.parametrize("decay", [True, 0.75])
@pytest.mark.parametrize("name", LEVELS)
def test_updates_are_those_of_feedback_in_movements(name: str, decay: bool | float) -> None:
    """Zheng et al., algorithm 1, step by step: rate x gradient + what is owed is compressed by
    TopK or another method that a factor does not change. At a rate of zero the gradient counts at
    the rate before."""
    ours = reducer(World(WORKERS), name=name, residual="update", error_feedback=decay)
    plain = reducer(World(WORKERS), name=name, error_feedback=decay)
    differs, known = reducer(World(WORKERS), name=name, error_feedback=decay), RATES[0]
    apart = 0.0
    for t, (rate, level) in enumerate(zip(RATES, LEVELS[name], strict=True)):
        grad, known = gradients(t, *SHAPE), rate or known
        movement = step(plain, known * grad, level, 1.0)
        update = step(ours, grad, level, rate)
        torch.testing.assert_close(known * update, movement, rtol=1e-9, atol=1e-9)
        apart = max(apart, float((step(differs, grad, level, rate) - update).abs().max()))
    assert apart > 0.1  # with the residual in units of the gradient


def tour(world: World) -> list[Tensor]:
    """Updates and residuals, through a checkpoint before each step."""
    hosted, found = slice(world.hosted.start, world.hosted.stop), []
    for name, levels in LEVELS.items():
        to = reducer(world, name=name, residual="update")
        for t, (rate, level) in enumerate(zip(RATES, levels, strict=True)):
            fresh = reducer(world, name=name, residual="update")
            fresh.load_state_dict(*to.state_dict())
            to = fresh
            found.append(step(to, gradients(t, *SHAPE)[hosted], level, rate))
    return found


def process(rank: int) -> list[Tensor]:
    return tour(ProcessWorld(WORKERS, torch.device("cpu")))


def test_two_processes_are_the_simulation() -> None:
    simulated, answers = tour(World(WORKERS)), group.run(process, 2)
    for ours, first, second in zip(simulated, *answers, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, ours, rtol=1e-9, atol=1e-9)


def by_trainer(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Tensor, Tensor]]:
    """(weights less what they are owed, weights after the uncompressed movements) by layer."""
    take, moved, parts = loop.take_step, [], []
    last: dict[str, Any] = {}

    def watched(gradients: Gradients, exchange: Exchange, *args: Any) -> Any:
        if not parts:
            parts.extend(p.detach().clone() for p in gradients.parameters)
            moved.extend(torch.zeros_like(p) for p in parts)
        answer = take(gradients, exchange, *args)
        rates = exchange.reducer.rates or ()
        for total, layer, rate in zip(moved, gradients.layers, rates, strict=True):
            total += rate * layer.mean(0)
        last.update(reducer=exchange.reducer, weights=gradients.parameters)
        return answer

    monkeypatch.setattr(loop, "take_step", watched)
    plain = ["momentum=0.0", "weight_decay=0.0", "lr=0.05", "warmup_from=0.01", "decay_epochs=[2]"]
    table = f"compressor={{name='topk', residual='{unit}'}}"
    config = smoke("policy=static", "levels={low=20, high=5}", table, epochs=3)
    config = override(config, [f"optimizer.{one}" for one in plain])
    regimes.run(config, tmp_path / unit)
    rate = last["reducer"].rates[0]
    owed = [r if r is None else r.mean(0) for r in last["reducer"].residuals()]
    layers = zip(parts, moved, last["weights"], owed, strict=True)
    for start, movement, weights, left in layers:
        debt = 0 if left is None else rate * left.view(weights.shape)
        yield weights.detach() - debt, start - movement


@pytest.mark.parametrize("unit", ["update", "gradient"])
def test_a_run_owes_its_weights_what_was_not_sent(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD without momentum, a warm-up and a decay: in units of the update the debt is exact."""
    exact = [
        torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        for a, b in by_trainer(unit, tmp_path, monkeypatch)
    ]
    assert all(exact) == (unit == "update")


class Straight(nn.Module):
    """Two layers whose gradients are what is given, wherever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Parameter(torch.randn(SHAPE, dtype=F64))
        self.second = nn.Parameter(torch.randn(SHAPE, dtype=F64))

    def forward(self, slopes: Tensor) -> Tensor:
        return (self.first * slopes[0]).sum() + (self.second * slopes[1]).sum()


def hooked(rank: int, unit: str) -> tuple[Tensor, Tensor]:
    """As `by_trainer`, of a hook, with a rate for each of two parameter groups."""
    model = DistributedDataParallel(Straight())
    net = model.module
    start = torch.stack([net.first.detach().clone(), net.second.detach().clone()])
    sgd = torch.optim.SGD([{"params": [net.first]}, {"params": [net.second]}], lr=1.0)
    levels, table = {"low": 40, "high": 5}, {"name": "topk", "residual": unit}
    policy = {"name": "static", "level": "high"}
    hook = regimes.attach(
        model, sgd, policy=policy, compressor={**table, "levels": levels}, every=4
    )
    moved, rates = torch.zeros(2, *SHAPE, dtype=F64), [1.0, 1.0]
    for t, rate in enumerate(RATES):
        rates = [rate or rates[0], 0.3 * (t + 1)]
        for one, group_ in zip(rates, sgd.param_groups, strict=True):
            group_["lr"] = one
        slopes = gradients(t, 2, *SHAPE)
        sgd.zero_grad()
        model(slopes[rank]).backward()
        sgd.step()
        moved += torch.tensor(rates, dtype=F64)[:, None, None] * slopes[:2].mean(0)
    own = torch.stack([r for r in hook.reducer.residuals() if r is not None])[:, 0]
    hook.close()
    weights = torch.stack([net.first.detach(), net.second.detach()])
    debt = torch.tensor(rates, dtype=F64)[:, None, None] * own
    return torch.stack([weights, debt]), start - moved


@pytest.mark.parametrize("unit", ["update", "gradient"])
def test_a_hook_reads_the_rate_of_each_group(unit: str) -> None:
    answers = group.run(hooked, 2, unit)
    debt = torch.stack([own[1] for own, _ in answers]).mean(0)
    (weights, _), wanted = answers[0]
    assert torch.allclose(weights - debt, wanted, rtol=1e-9, atol=1e-9) == (unit == "update")


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="residual = 'weights': Known: gradient, update"):
        make_compressor({"name": "topk", "residual": "weights"})
    with pytest.raises(ConfigError, match="has no effect without error feedback"):
        make_compressor({"name": "topk", "residual": "update", "error_feedback": False})


# -- a branch to the other unit --------------------------------------------------------------

UNITS = ("gradient", "update")
FED: dict[Any, Any] = {c.id: c.values for c in EVERY if c.values[0].error_feedback}  # type: ignore
FED["threshold"] = (FED["threshold"][0], 0.01, 0.05)  # of which some entries are above


def branched(
    trunk: Compressor, own: Compressor, levels: tuple[Any, Any], rates: list[float]
) -> Any:
    """Updates of a trunk's three steps at the first rate, and of a branch's at the others."""
    old = one_layer(trunk)
    found = [step(old, gradients(t, *SHAPE), levels[0], rates[0]) for t in range(3)]
    memories, residuals = old.state_dict()
    assert residuals["m"] is not None
    new = one_layer(own)
    if type(own) is not type(trunk):
        memories = restart_memories(memories, new.state_dict()[0])
    new.load_state_dict(memories, residuals)
    for t, rate in enumerate(rates[1:], start=3):
        found.append(step(new, gradients(t, *SHAPE), levels[1], rate))
    return torch.stack(found)


def one_layer(of: Compressor) -> Reducer:
    world = World(WORKERS)
    world.meter.dtype = F64
    return Reducer(of, [Layer("m", SHAPE)], world, seed=3)


@pytest.mark.parametrize("trunk", FED)
def test_a_branch_at_a_constant_rate_has_the_same_bits_in_any_unit(trunk: str) -> None:
    """For each compressor that a branch may have, and each unit of trunk and branch."""
    (first, _, sent), rates = FED[trunk], [0.25] * 4
    for own, (second, _, level) in FED.items():
        ends = [
            branched(
                replace(first, residual=old), replace(second, residual=new), (sent, level), rates
            )
            for old, new in itertools.product(UNITS, UNITS)
        ]
        assert all(torch.equal(ends[0], end) for end in ends[1:]), (trunk, own)


@pytest.mark.parametrize("name", FED)
@pytest.mark.parametrize("rate", [0.125, 0.5, 0.0])
def test_the_first_step_of_a_branch_to_the_other_unit_is_its_trunks(name: str, rate: float) -> None:
    """Whatever the rate: a gradient counts at the rate of this step, a movement stays as long."""
    kind, _, level = FED[name]
    for old, new in (UNITS, UNITS[::-1]):
        units = replace(kind, residual=old), replace(kind, residual=new)
        rates = [0.25, rate, rate or 0.25, 0.0625]
        trunk = branched(units[0], units[0], (level, level), rates)
        branch = branched(*units, (level, level), rates)
        same = len(trunk) - (1 if rate else 2)  # at a rate of zero the conversion waits
        assert torch.equal(branch[:same], trunk[:same])
        assert not torch.equal(branch, trunk)  # its own unit from the next change on


LOW = {"topk": 4, "threshold": 1e-3, "powersgd": 2}


def test_a_trained_pulse_has_the_same_bits_in_any_unit(tmp_path: Path) -> None:
    """A branch to a threshold, which ends in its trunk's configuration, whose residual has its own
    unit again."""

    def table(name: str, unit: str) -> dict[str, Any]:
        levels = {"low": LOW[name], "high": LOW[name]}
        return {"compressor": {"name": name, "residual": unit}, "levels": levels}

    constant = ["lr=0.0078125", "warmup_from=none", "decay_epochs=[]", "name=sgd"]
    plain = [f"optimizer.{one}" for one in constant]
    plain += ["policy={name='static', level='low'}", "checkpoint_keep=[1]", "data.train_size=60"]
    plain += ["union_pass=false"]
    ends = []
    for old, new in itertools.product(UNITS, UNITS):
        of = tmp_path / old
        if not of.exists():
            words = f"compressor={{name='topk', residual='{old}'}}", "levels={low=4, high=4}"
            regimes.run(smoke(*plain, *words, epochs=3), of)
        ends.append(tmp_path / f"{old} {new}")
        regimes.branch(of, at=1, length=1, out=ends[-1], set=table("threshold", new))
    for end in ends[1:]:
        same_weights(end, ends[0])


def branches_of_a_hook(rank: int) -> list[Any]:
    return [
        branch_of_a_hook(
            rank, {"name": name, "residual": old}, {"name": name, "residual": new}, rate
        )
        for name in ("topk", "powersgd")
        for old, new in (UNITS, UNITS[::-1])
        for rate in (0.25, 0.5)
    ]


def branch_of_a_hook(rank: int, trunk: dict[str, Any], own: dict[str, Any], last: float) -> Any:
    """Weights after three steps of a trunk at a rate of 0.25, one more at the last rate, and one of
    a branch in place of it."""
    saved: list[Any] = []

    def job(table: dict[str, Any], rate: float, steps: range, optimizer: bool = True) -> Tensor:
        model = DistributedDataParallel(Straight())
        sgd = torch.optim.SGD(model.module.parameters(), lr=rate)
        hook = regimes.attach(
            model,
            policy={"name": "static", "level": "low"},
            compressor={**table, "levels": {"low": LOW[table["name"]]}},
            **({"optimizer": sgd} if optimizer else {}),
        )
        if steps.start:
            model.module.load_state_dict(saved[0])
            hook.load_state_dict(saved[1], branch=True)
        for t in steps:
            sgd.zero_grad()
            model(gradients(t, 2, *SHAPE)[rank]).backward()
            sgd.step()
        if not saved:
            hook.epoch_end()
            saved.extend(copy.deepcopy([model.module.state_dict(), hook.state_dict()]))
        hook.close()
        return torch.stack([p.detach() for p in model.parameters()])

    job(trunk, 0.25, range(3))
    found = [job(table, last, range(3, 4)) for table in (trunk, own)]
    if trunk["residual"] == "update" and own["residual"] == "gradient":
        with pytest.raises(ConfigError, match=r"movements of the weights.*optimizer=optimizer"):
            job(own, last, range(3, 4), optimizer=False)
    return found


def test_a_hooks_branch_to_the_other_unit_takes_its_trunks_step() -> None:
    for found in group.run(branches_of_a_hook, 2):
        assert [torch.equal(trunk, branch) for trunk, branch in found] == [True] * 8
