"""Each shard goes on with its own counts of traffic (oracle: what was saved of each)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from regimes.hook.fsdp import replicas_state
from regimes.hook.fsdp.replicas_state import ShardedState
from regimes.job.process_states import pack_state


def meter(shard: int) -> dict[str, Any]:
    """Of a layer with rows of different numbers on each shard."""
    return {"layers": {0: [4.0 + shard, 16.0 + shard]}, "calls": {"mean": 1}, "sent": {"mean": 9}}


def loaded(saved: int, shards: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The meter of one process of a replica of so many shards, saved by another number of them."""
    monkeypatch.setattr(replicas_state, "place_state", lambda state, *_: state)
    monkeypatch.setattr(ShardedState, "_residuals", lambda *_: {})
    monkeypatch.setattr(replicas_state, "shard_memories", lambda *_: {})
    found: list[Any] = []
    world = SimpleNamespace(rank=rank, shards=shards, workers=2, processes=2 * shards, hosted=1)
    reducer = SimpleNamespace(compressors=[])
    hook = SimpleNamespace(
        world=world,
        layers=[],
        reducer=reducer,
        load_state_dict=lambda state, branch: found.append(state),
    )
    parts = [{"meter": meter(shard), "layers": {}, "sums": {}} for shard in range(saved)]
    state = {"workers": 2, "shards": saved, "parts": parts, "summed": False, "layers": {}}
    own: Any = ShardedState(hook)  # type: ignore[arg-type]
    own.load_state_dict({"shared": pack_state({**state, "format": sharded_state_format()})})
    return found[0]["parts"][0]["meter"]


def sharded_state_format() -> int:
    from regimes.job.state import FORMAT

    return FORMAT


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_resumed_shard_has_its_own_counts(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2 * shards):
        assert loaded(shards, shards, rank, monkeypatch) == meter(rank % shards)


@pytest.mark.parametrize(("saved", "shards"), [(3, 2), (2, 3), (2, 1)])
def test_counts_of_another_number_of_shards_are_added_up_once(
    saved: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [loaded(saved, shards, rank, monkeypatch) for rank in range(shards)]
    for place in (0, 1):
        total = sum(meter(shard)["layers"][0][place] for shard in range(saved))
        assert sum(each["layers"].get(0, [0, 0])[place] for each in found) == total
    assert sum(each["sent"]["mean"] for each in found) == 9 * saved
