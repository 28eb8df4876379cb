"""Every combination of a compressor's options, each through levels and gradients drawn by seed.
Oracles: what is sent and owed adds up, the mean in place of the workers, the formula of traffic,
several processes."""

from __future__ import annotations

import copy
import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from ddp_scripts import group

from regimes.base.config import DENSE, Level
from regimes.collectives.layers import Layer
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import World
from regimes.compression import Compressor, make_compressor
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer

F64 = torch.float64
WORKERS, STEPS = 4, 8
SHAPES = [(9, 10), (8, 3, 2, 2), (5,), (7, 9)]  # three halves of rank 2 do not exhaust a matrix
FEEDBACK: tuple[bool | float, ...] = (True, 0.75, False)


class Options(NamedTuple):
    """Levels and option values of a compressor."""

    levels: tuple[Level, ...]
    values: dict[str, tuple[Any, ...]]


FAMILIES = {
    "powersgd": Options(
        (1, 2, 4), {"wire": ("full", "bf16", "fp16"), "reset_on_change": (False, True)}
    ),
    "acp-sgd": Options((1, 2), {"iterations": (1, 2, 3)}),
    "topk": Options((5, 40, 80), {"reduction": ("mean", "sum"), "count": ("round", "truncate")}),
    "randomk": Options((5, 40, 80), {}),
    "dct-topk": Options((5, 40, 80), {"chunk": (2, 3, 64)}),
    "sign": Options((1,), {}),
    "quantise": Options((2, 4, 8, 16), {"stochastic": (False, True)}),
    "quantised-all-reduce": Options((4, 8), {"stochastic": (False, True), "block": (3, 256)}),
    "chunked-topk": Options((5, 40, 80), {"chunk": (3, 64), "bits": (2, 4, 32)}),
    "threshold": Options((0.5, 1.0, 2.0), {}),
    "cast": Options(("fp16", "bf16"), {}),
    "low-pass": Options((0.3, 0.9), {}),
}


def tables() -> list[dict[str, Any]]:
    """All combinations, but random rounding with feedback, which is refused."""
    found = []
    for name, family in FAMILIES.items():
        options = {"error_feedback": FEEDBACK, **family.values}
        for values in itertools.product(*options.values()):
            table = {"name": name, **dict(zip(options, values, strict=True))}
            if not (table.get("stochastic") and table["error_feedback"]):
                found.append(table)
    return found


TABLES = tables()
EACH = pytest.mark.parametrize("table", TABLES, ids=lambda t: "-".join(map(str, t.values())))


def levels(table: dict[str, Any]) -> list[Level]:
    """Of the steps: drawn, with changes of level and one dense step among them."""
    draw = random.Random(str(table))
    found: list[Level] = [draw.choice(FAMILIES[table["name"]].levels) for _ in range(STEPS)]
    found[draw.randrange(1, STEPS - 1)] = DENSE
    return found


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(WORKERS, *shape, generator=generator, dtype=F64) for shape in SHAPES]


def reducer(table: dict[str, Any], world: World) -> Reducer:
    world.meter.dtype = F64
    layers = [Layer(f"layer{i}", shape) for i, shape in enumerate(SHAPES)]
    return Reducer(make_compressor(table), layers, world, seed=1)


def step(to: Reducer, grads: list[torch.Tensor], level: Level) -> list[torch.Tensor]:
    wanted = [level if layer.compressed else DENSE for layer in to.layers]
    stack = torch.cat([grad.flatten(1) for grad in grads], dim=1)
    losses = torch.zeros(len(stack), dtype=F64)
    return [
        update.clone() for update in Exchange(to).exchange_step(grads, wanted, losses, stack)[0]
    ]


def owed(to: Reducer) -> list[torch.Tensor]:
    """The mean residual of each layer."""
    return [
        torch.zeros(shape, dtype=F64) if residual is None else residual.mean(0).view(shape).clone()
        for shape, residual in zip(SHAPES, to.residuals(), strict=True)
    ]


def by_half(chosen: Compressor) -> bool:
    """Does it round to half precision on the way?"""
    return getattr(chosen, "wire", "full") != "full" or type(chosen).__name__ == "Cast"


@EACH
def test_what_is_sent_and_what_is_owed_add_up(table: dict[str, Any]) -> None:
    """update + mean residual = share * the residual before + mean gradient, in every step; nothing
    is owed without feedback; gradients are left as they are. The meter agrees with the formula."""
    world = World(WORKERS)
    to = reducer(table, world)
    share = float(table["error_feedback"])
    by = 1e-2 if by_half(make_compressor(table)) else 1e-12
    before = owed(to)
    steps = 2 if table.get("iterations", 0) % 2 else 1  # of which one sends P, the other Q
    for t, level in enumerate(level for level in levels(table) for _ in range(steps)):
        grads = gradients(t)
        updates = step(to, grads, level)
        assert all(map(torch.equal, grads, gradients(t)))
        if (t + 1) % steps == 0:
            check_meter(to, table, level, steps)
        if not share or level == DENSE:
            assert not any(residual is not None for residual in to.residuals())
        left = owed(to)
        for i, update in enumerate(updates):
            compressed = to.layers[i].compressed and level != DENSE
            sent = update / WORKERS if compressed and table.get("reduction") == "sum" else update
            kept = 0 if table.get("reset_on_change") and level == DENSE else share * before[i]
            if share or not compressed:
                wanted = kept + grads[i].mean(0)
                torch.testing.assert_close(sent + left[i], wanted, rtol=by, atol=by)
        before = left


def check_meter(to: Reducer, table: dict[str, Any], level: Level, steps: int) -> None:
    chosen, met = make_compressor(table), to.world.meter.take_counts().layers
    for i, layer in enumerate(to.layers):
        once = chosen.cost(layer, level, WORKERS, F64.itemsize)
        for sent, most in ((met[i].bytes, once.bytes), (met[i].floats, once.floats)):
            if chosen.data_dependent and level != DENSE and layer.compressed:
                assert 0 < sent <= steps * most, (layer, level)
            else:
                assert sent == steps * most, (layer, level)


@EACH
def test_linear_means_the_mean_in_place_of_the_workers(table: dict[str, Any]) -> None:
    many, one = reducer(table, World(WORKERS)), reducer(table, World(1))
    alike = True
    for t, level in enumerate(levels(table)):
        grads = gradients(t)
        ours = [*step(many, grads, level), *owed(many)]
        theirs = [*step(one, [grad.mean(0, keepdim=True) for grad in grads], level), *owed(one)]
        alike &= all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(ours, theirs, strict=True)
        )
    assert alike == make_compressor(table).linear


@EACH
def test_without_feedback_or_factors_no_step_depends_on_those_before(table: dict[str, Any]) -> None:
    """Random-K and random rounding draw anew by the number of the step."""
    drawn = table["name"] == "randomk" or table.get("stochastic")
    remembers = table["error_feedback"] or table["name"] in ("powersgd", "acp-sgd")
    used, level = reducer(table, World(WORKERS)), FAMILIES[table["name"]].levels[0]
    for t in range(3):
        step(used, gradients(t), level)
    fresh = reducer(table, World(WORKERS))
    if drawn:
        for ours, theirs in zip(fresh.states, used.states, strict=True):
            ours.step = theirs.step
    same = all(map(torch.equal, step(used, gradients(3), level), step(fresh, gradients(3), level)))
    assert same == (not remembers)


def tour(world: World) -> list[torch.Tensor]:
    """Updates and residuals of this process's workers, by each table."""
    hosted = slice(world.hosted.start, world.hosted.stop)
    found = []
    for table in TABLES:
        to, parts = reducer(table, world), []
        for t, level in enumerate(levels(table)[:5]):
            parts += [
                update.flatten() for update in step(to, [g[hosted] for g in gradients(t)], level)
            ]
            to.load_state_dict(*copy.deepcopy(to.state_dict()))
        rows = [x.flatten(1) for x in to.residuals() if x is not None]
        found.append(torch.cat(parts))
        found.append(torch.cat([torch.zeros(len(world.hosted), 1, dtype=F64), *rows], 1))
    return found


def process(rank: int) -> list[torch.Tensor]:
    return tour(ProcessWorld(WORKERS, torch.device("cpu")))


@pytest.mark.slow
def test_two_processes_are_the_simulation() -> None:
    """Updates alike on both, and the residuals of either's workers. Where processes add in half
    precision, the first step's updates are compared: later ones start from what it has rounded."""
    simulated, (first, second) = tour(World(WORKERS)), group.run(process, 2)
    size = sum(map(math.prod, SHAPES))
    for i, table in enumerate(TABLES):
        updates, residuals = simulated[2 * i : 2 * i + 2]
        assert torch.equal(first[2 * i], second[2 * i]), table
        if by_half(make_compressor(table)):
            torch.testing.assert_close(first[2 * i][:size], updates[:size], rtol=0.02, atol=0.02)
            continue
        both = torch.cat([first[2 * i + 1], second[2 * i + 1]])
        torch.testing.assert_close(first[2 * i], updates, rtol=1e-9, atol=1e-9, msg=str(table))
        torch.testing.assert_close(both, residuals, rtol=1e-9, atol=1e-9, msg=str(table))
