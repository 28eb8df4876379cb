"""Jobs whose processes come and go, part by part and without processes: what is counted, and what a
step that was lost, or another number of shards, leaves of the compressors' memories."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regimes.collectives.requests import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY
from regimes.compression.reducer import Reducer
from regimes.ddp.sharded_state import ShardedState
from regimes.job.membership import Attendance

LAYER = Layer("weight", (6, 5))


def test_the_mean_of_replicas_is_over_steps() -> None:
    attendance = Attendance()
    for replicas in (4, 4, 4, 2, 3):
        attendance.note(replicas)
    column = attendance.column()
    assert (column["least"], column["most"], column["mean"]) == (2, 4, 17 / 5)
    assert Attendance().column()["mean"] == 0


@pytest.mark.parametrize("name", ["randomk", "powersgd"])
def test_memories_of_another_number_of_shards_count_on(name: str) -> None:
    """Random numbers must not be drawn again, so the number of steps is the largest saved one."""
    compressor = REGISTRY.make({"name": name})
    world = SimpleNamespace(shards=2, rank=1, parts=lambda layers: [x.on(1, 2) for x in layers])
    reducer = Reducer(compressor, [LAYER], World(1), 0)
    state: Any = ShardedState.__new__(ShardedState)
    state.hook = SimpleNamespace(world=world, layers=[LAYER], reducer=reducer)
    saved = [{"weight": reducer.states[0].shared_state() | {"step": n}} for n in (7, 9, 8)]
    expected = saved[0] if compressor.joins_shards else saved[1]
    assert state._memories(saved)["weight"]["step"] == expected["weight"]["step"]


@pytest.mark.parametrize("name", ["topk", "powersgd", "quantise"])
def test_local_steps_take_a_lost_exchange_back(name: str) -> None:
    """The exchange has changed the memories when the quorum turns out not to commit."""
    compressor = REGISTRY.make({"name": name})
    reducer = Reducer(compressor, [LAYER], World(1), 0)
    level = compressor.usual["high"]

    def exchange(*_: Any) -> None:
        gradient = torch.randn(1, *LAYER.shape, generator=torch.Generator().manual_seed(1))
        Exchange(reducer).step([gradient], [level], torch.zeros(1), gradient.flatten(1))

    exchange()
    before = copy.deepcopy([vars(state) for state in reducer.states])
    membership: Any = LocalMembership.__new__(LocalMembership)
    membership.manager = SimpleNamespace(should_commit=lambda: False)
    membership.world = SimpleNamespace(contributors=[0])
    membership.local = SimpleNamespace(
        sync=SimpleNamespace(reducer=reducer, fragments=[]),
        replicas=SimpleNamespace(buffer_means=lambda world: None),
        _send=exchange,
    )
    membership._start_quorum = membership._agree = lambda: None
    assert membership._attempt(False) is False
    for state, old in zip(reducer.states, before, strict=True):
        for field in old.keys() - {"_buffer", "_checked", "_table"}:  # no memory
            now, then = getattr(state, field), old[field]
            same = torch.equal(now, then) if isinstance(then, torch.Tensor) else now == then
            assert same, field
