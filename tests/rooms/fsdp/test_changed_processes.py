"""What another number of shards leaves of the compressors' memories, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY
from regimes.compression.reducer import Reducer
from regimes.hook.ddp.node_state import shard_memories

LAYER = Layer("weight", (6, 5))


@pytest.mark.parametrize("name", ["randomk", "powersgd"])
def test_memories_of_another_number_of_shards_count_on(name: str) -> None:
    """Random numbers must not be drawn again, so the number of steps is the largest saved one."""
    compressor = REGISTRY.make({"name": name})
    world: Any = SimpleNamespace(
        shards=2, rank=1, local_layers=lambda layers: [x.on(1, 2) for x in layers]
    )
    reducer = Reducer(compressor, [LAYER], World(1), 0)
    saved = [{"weight": reducer.states[0].shared_state() | {"step": n}} for n in (7, 9, 8)]
    expected = saved[0] if compressor.joins_shards else saved[1]
    found = shard_memories(saved, world, [LAYER], reducer.compressors)
    assert found["weight"]["step"] == expected["weight"]["step"]
