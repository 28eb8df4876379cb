"""What replicas put together from their processes (oracle: by hand), without any process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regimes.collectives.layers import Traffic
from regimes.collectives.process_group import Group
from regimes.collectives.processes import ProcessWorld
from regimes.collectives.world import by_type


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


def test_parts_of_several_types_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shards that hold the same numbers."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    world = ProcessWorld(1, torch.device("cpu"), Group((0, 1)), within=Group((0, 1)))

    def gather(_: Any, into: Tensor, mine: Tensor) -> None:
        into.view(2, -1).copy_(mine.expand(2, -1))

    monkeypatch.setattr(world, "_wait_for", gather)
    parts = [torch.full((2,), 1.0), torch.full((3,), 2), torch.full((2,), 3.0)]
    joined = world.join_shards(parts, [2, 3, 2], [4, 5, 3])
    assert [whole.tolist() for whole in joined] == [[1.0] * 4, [2] * 5, [3.0] * 3]


@given(kinds=st.lists(st.sampled_from([torch.float32, torch.float16, torch.int64]), max_size=6))
def test_each_tensor_travels_once_with_those_of_its_type(kinds: list[torch.dtype]) -> None:
    groups = by_type([torch.zeros(1, dtype=kind) for kind in kinds])
    assert sorted(itertools.chain(*groups)) == [*range(len(kinds))]
    first = [kinds[group[0]] for group in groups]
    assert [{kinds[i] for i in group} for group in groups] == [{kind} for kind in first]
    assert first == sorted({*kinds}, key=str), "the same order on all processes"
