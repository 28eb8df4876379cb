"""What replicas put together from their processes (oracle: by hand), without any process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives.process_group import Group
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.requests import Traffic
from regimes.collectives.world import World
from regimes.data import task


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_an_evaluation_has_one_part_of_each_replica(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three replicas of two have three parts: neither two nor six."""
    replicas = 6 // shards
    world = World(6, processes=6, rank=5, shards=shards)

    def gather(value: Any) -> list[Any]:
        """Each process gives its replica."""
        return [[(place // shards, [1.0, float(place // shards)])] for place in range(6)]

    monkeypatch.setattr(world, "gather_object", gather)
    evaluators = world.evaluators
    assert (evaluators.processes, evaluators.rank) == (replicas, replicas - 1)
    assert task.sum_over_processes(evaluators, {}) == [replicas, sum(range(replicas))]


def test_a_meter_of_replicas_has_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2^24, where float32 has no odd numbers."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    everyone, within = Group((0, 1, 2, 3)), Group((0, 1))
    world = ProcessWorld(2, torch.device("cpu"), everyone, within=within)
    assert (world.shards, world.shard, [*world.hosted]) == (2, 1, [0])
    many = 2**24 + 1
    world.meter.layers[0] = Traffic(many, 4 * many + 1)
    world.meter.sent["mean"] = many + 2

    def doubled(tensor: Tensor) -> Tensor:
        return 2 * tensor

    monkeypatch.setattr(world, "add_shards", doubled)
    meter = world.take_meter(1)
    assert (meter.layers[0].floats, meter.layers[0].bytes) == (2 * many, 8 * many + 2)
    assert meter.sent["mean"] == 2 * many + 4
