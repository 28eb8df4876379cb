"""What islands put together from their processes (oracle: by hand), without any process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regimes.collectives.islands import Islands
from regimes.collectives.launched_islands import _OneForEach
from regimes.collectives.requests import Traffic
from regimes.collectives.world import Meter
from regimes.data import task


class Launched:
    """Of ``processes``, ``shards`` to an island; each gives its rank."""

    def __init__(self, processes: int, shards: int, rank: int) -> None:
        self.processes, self.shards, self.rank, self.workers = processes, shards, rank, processes

    def gather_object(self, value: Any) -> list[Any]:
        return [[(place // self.shards, [1.0, float(place // self.shards)])] for place in range(6)]


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_an_evaluation_has_one_part_of_each_island(shards: int) -> None:
    """Three islands of two have three parts: neither two nor six."""
    islands = 6 // shards
    world = _OneForEach(Launched(6, shards, 5))  # type: ignore[arg-type]
    assert (world.processes, world.rank) == (islands, islands - 1)
    assert task.total(world, {}) == [islands, sum(range(islands))]


def test_a_meter_of_islands_has_every_byte() -> None:
    """Beyond 2^24, where float32 has no odd numbers."""
    world = Islands.__new__(Islands)
    world.device, many = torch.device("cpu"), 2**24 + 1
    world.meter = Meter(torch.float32, 2)
    world.meter.layers[0] = Traffic(many, 4 * many + 1)
    world.meter.sent["mean"] = many + 2

    def doubled(tensor: Tensor) -> Tensor:
        return 2 * tensor

    world.add_shards = doubled  # type: ignore[method-assign]
    meter = world.take_meter(1)
    assert (meter.layers[0].floats, meter.layers[0].bytes) == (2 * many, 8 * many + 2)
    assert meter.sent["mean"] == 2 * many + 4
