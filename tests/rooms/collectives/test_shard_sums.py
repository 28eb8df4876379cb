"""What replicas put together from their processes (oracle: by hand), without any process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from regimes.collectives.layers import Traffic
from regimes.collectives.process_group import Group
from regimes.collectives.processes import ProcessWorld


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
