"""The memory that a reducer keeps does not grow with the sets of layers that steps have used, as
where each step uses other experts of a model: measured by the tensors that are alive."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from reducers import EVERY, world

from regimes.base.config import Level
from regimes.collectives.layers import Layer
from regimes.compression import Compressor
from regimes.compression.reducer import Reducer

EXPERTS, USED, STEPS = 8, 3, 60  # 56 sets of three
SHAPE = (16, 24)


def held_bytes() -> int:
    """Of all memory that a tensor of Python still has."""
    gc.collect()
    alive = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values()
    )


def taken(compressor: Compressor, level: Level, used: int, tentative: bool) -> int:
    """What a reducer holds after steps that have used so many of all layers."""
    before, chance = held_bytes(), random.Random(0)
    experts = [Layer(f"expert{i}", SHAPE) for i in range(EXPERTS)]
    reducer = Reducer(compressor, experts, world(1), seed=3)
    reducer.tentative = tentative
    for _ in range(STEPS):
        bucket = sorted(chance.sample(range(EXPERTS), used))
        rows = {i: torch.randn(1, *SHAPE, dtype=torch.float64) for i in bucket}
        reducer.reduce(bucket, rows, [level] * EXPERTS)
    del rows
    return held_bytes() - before


@pytest.mark.parametrize("tentative", [False, True])
@pytest.mark.parametrize(("compressor", "low", "high"), EVERY)
def test_other_layers_in_each_step_need_no_more_memory(
    compressor: Compressor, low: Level, high: Level, tentative: bool
) -> None:
    """Than all layers in each step, once more for what is left of the sets before."""
    every = taken(compressor, high, EXPERTS, tentative)
    few = taken(compressor, high, USED, tentative)
    assert few <= 2 * every + 1024
