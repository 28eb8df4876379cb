"""Each shard goes on with its own counts and memories (oracle: what was saved of each)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.compression.sparse import RandomK
from regimes.hook.fsdp import replicas_state
from regimes.hook.fsdp.replicas_state import ShardedState
from regimes.job.process_states import pack_state
from regimes.job.state import FORMAT


def meter(shard: int) -> dict[str, Any]:
    """Of a layer with rows of different numbers on each shard."""
    return {"layers": {0: [4.0 + shard, 16.0 + shard]}, "calls": {"mean": 1}, "sent": {"mean": 9}}


LAYER = Layer("weight", (6, 5))


def memory(shard: int) -> dict[str, Any]:
    return RandomK().init(LAYER, 0).shared_state() | {"step": 7 + shard}


def loaded(
    saved: int,
    shards: int,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    replicas: int = 2,
    feedback: bool = True,
) -> Any:
    """The state of one process of two replicas of so many shards, saved by other numbers."""
    monkeypatch.setattr(replicas_state, "place_state", lambda state, *_: state)
    monkeypatch.setattr(ShardedState, "_residuals", lambda *_: {})
    found: list[Any] = []
    world = SimpleNamespace(
        rank=rank,
        shards=shards,
        shard=rank % shards,
        workers=2,
        processes=2 * shards,
        hosted=1,
        local_layers=lambda layers: [layer.on(rank % shards, shards) for layer in layers],
    )
    hook = SimpleNamespace(
        world=world,
        layers=[LAYER],
        reducer=SimpleNamespace(compressors=[RandomK()]),
        chosen=SimpleNamespace(keeps_residuals=feedback),
        load_state_dict=lambda state, branch: found.append(state),
    )
    parts = [
        {"meter": meter(shard), "layers": {"weight": {"memory": memory(shard)}}, "sums": {}}
        for shard in range(saved)
    ]
    state = {"workers": replicas, "shards": saved, "parts": parts, "summed": False}
    state |= {"layers": {"weight": {"level": "low"}}, "format": FORMAT}
    ShardedState(hook).load_state_dict({"shared": pack_state(state)})  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_resumed_shard_has_its_own_counts_and_memories(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2 * shards):
        state = loaded(shards, shards, rank, monkeypatch)
        assert state["parts"][0]["meter"] == meter(rank % shards)
        assert state["layers"]["weight"]["memory"] == memory(rank % shards)


@pytest.mark.parametrize(("saved", "shards"), [(3, 2), (2, 3), (2, 1)])
def test_counts_of_another_number_of_shards_are_added_up_once(
    saved: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [loaded(saved, shards, rank, monkeypatch) for rank in range(shards)]
    found = [state["parts"][0]["meter"] for state in states]
    for place in (0, 1):
        total = sum(meter(shard)["layers"][0][place] for shard in range(saved))
        assert sum(each["layers"].get(0, [0, 0])[place] for each in found) == total
    assert sum(each["sent"]["mean"] for each in found) == 9 * saved


def test_another_number_of_replicas_is_refused_where_residuals_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = loaded(2, 2, 0, monkeypatch, replicas=3, feedback=False)
    assert other["layers"] == loaded(2, 2, 0, monkeypatch)["layers"]
    with pytest.raises(ConfigError, match="saved with 3 replicas, this job has 2: load it with"):
        loaded(2, 2, 0, monkeypatch, replicas=3)
