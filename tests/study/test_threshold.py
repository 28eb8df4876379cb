"""A constant threshold (oracles: algorithm 1 of Sahu et al. in Python's floats; processes)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from analysis.plugins.threshold import Threshold
from regimes.base.config import DENSE, Level
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.compression.traffic import check_order

F64, WORKERS, SHAPE = torch.float64, 4, (5, 7)
RATES = (0.25, 0.5, 1.0, 0.125, 0.125)
LEVEL = 0.75  # of the movements


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    sizes = torch.arange(1, WORKERS + 1, dtype=F64)[:, None, None]  # unlike numbers of coordinates
    return sizes * torch.randn(WORKERS, *SHAPE, generator=generator, dtype=F64)


def reducer(world: World, feedback: bool = True) -> Reducer:
    world.meter.dtype = F64
    return Reducer(Threshold(error_feedback=feedback), [Layer("m", SHAPE)], world, seed=0)


def step(to: Reducer, t: int, level: Level = LEVEL) -> Tensor:
    world, to.rates = to.world, [RATES[t]]
    grad = gradient(t)[world.hosted.start : world.hosted.stop]
    losses = torch.zeros(len(grad), dtype=F64)
    return Exchange(to).exchange_step([grad], [level], losses, grad.flatten(1))[0][0].clone()


@pytest.mark.parametrize("feedback", [True, False])
def test_it_is_the_published_algorithm(feedback: bool) -> None:
    """Movements of the weights, message sizes among them: the most coordinates of a worker, eight
    bytes and an index each."""
    to, owed = reducer(World(WORKERS), feedback), [[0.0] * 35 for _ in range(WORKERS)]
    for t, rate in enumerate(RATES):
        moves = [
            [rate * g + e for g, e in zip(row.flatten().tolist(), left, strict=True)]
            for row, left in zip(gradient(t), owed, strict=True)
        ]
        sent = [[x if abs(x) >= LEVEL else 0.0 for x in row] for row in moves]
        if feedback:
            pairs = zip(moves, sent, strict=True)
            owed = [[a - b for a, b in zip(row, gone, strict=True)] for row, gone in pairs]
        wanted = [sum(column) / WORKERS for column in zip(*sent, strict=True)]
        update = rate * step(to, t).flatten()
        torch.testing.assert_close(update, torch.tensor(wanted, dtype=F64), rtol=1e-12, atol=1e-12)
        most = max(sum(x != 0 for x in row) for row in sent)
        assert to.world.meter.take_counts().layers[0].bytes == 4 + 12 * most


def test_the_low_level_is_the_lower_threshold() -> None:
    layers = [Layer("m", SHAPE)]
    check_order(Threshold(), {"low": 0.1, "high": 1.0}, layers, WORKERS)
    check_order(Threshold(), {"low": DENSE, "high": 1.0}, layers, WORKERS)
    with pytest.raises(ConfigError, match="sends less; swap them"):
        check_order(Threshold(), {"low": 1.0, "high": 0.1}, layers, WORKERS)
