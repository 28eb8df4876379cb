"""The simulation of FSDP2's quantised reduce-scatter (oracle: the loop over numbers that the
processes of ``attach(shards=...)`` are held against)."""

from __future__ import annotations

import pytest
import torch
from ddp_scripts import fsdp

from analysis.plugins.scattered import ScatteredMean
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.reducer import Reducer


@pytest.mark.parametrize("level", [8, 4])
@pytest.mark.parametrize("feedback", [False, True])
def test_simulated_workers_equal_the_loop_of_processes(level: int, feedback: bool) -> None:
    """Three steps of four workers, whose number does not divide the rows; the traffic is checked
    against the formula by the reducer."""
    workers, shape = 4, (10, 33)
    table = {"level": level, "stochastic": False, "block": 16, "error_feedback": feedback}
    fields = {key: value for key, value in table.items() if key != "level"}
    world = World(workers)
    world.meter.dtype = torch.float64
    reducer = Reducer(ScatteredMean(**fields), [Layer("weight", shape)], world, 7)
    loop = fsdp.Loop("weight", workers, table)
    for step in range(3):
        rows = torch.stack([fsdp.given(10 * step + rank, shape).double() for rank in range(4)])
        (update,) = reducer.reduce([0], [rows], [level]).values()
        (mean,) = loop.reduce([[row] for row in rows], level)
        assert (update - mean).abs().max() < 1e-12
    assert world.meter.calls == {"mean": 0, "gather": 3, "broadcast": 0, "scatter": 3}


def test_stochastic_rounding_draws_as_the_processes_do() -> None:
    world = World(2)
    world.meter.dtype = torch.float64
    reducer = Reducer(ScatteredMean(block=16), [Layer("weight", (4, 32))], world, 7)
    rows = torch.stack([fsdp.given(rank, (4, 32)).double() for rank in range(2)])
    (update,) = reducer.reduce([0], [rows], [4]).values()
    (mean,) = fsdp.Loop("weight", 2, {"block": 16}).reduce([[row] for row in rows], 4)
    assert (update - mean).abs().max() < 1e-12
