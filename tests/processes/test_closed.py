"""Once a hook is closed, its model is torch's own again.

Oracle: the same model that never had a hook: DDP, FSDP2, and for replicas torch's HSDP."""

from __future__ import annotations

import itertools

import pytest
from ddp_scripts import closed, group
from ddp_scripts.closed import Case

from regimes.compression import REGISTRY

HOLD_BACK = [name for name in REGISTRY if name not in ("dense", "cast")]
BITS = {"scatter": {"level": 4}, "gather": {"level": 8}}


CASES = [
    *(Case("ddp", {"compressor": name}) for name in HOLD_BACK),
    Case("ddp", {"compressor": "powersgd"}, ddp={"find_unused_parameters": True}),
    Case("ddp", {"compressor": "topk"}, ddp={"gradient_as_bucket_view": True}),
    Case("ddp", {"compressor": "topk"}, ddp={"static_graph": True}),
    Case("ddp", {"compressor": "powersgd"}, half=True),
    *(Case("replicas", {"compressor": name}) for name in ("powersgd", "topk")),
    Case("replicas", {"compressor": "powersgd"}, factor=1.0),
    Case("replicas", {"compressor": "powersgd"}, half=True),
    Case("both", {"compressor": "powersgd", "scatter": {"level": 4}}),
    Case("both", {"compressor": "topk", **BITS}, factor=2.0),
    Case("shards", BITS),
]


@pytest.mark.parametrize("processes", [2, 4])
def test_a_closed_hook_leaves_the_model_to_torch(processes: int) -> None:
    """Its gradients at once, nothing counted, after a second hook as after the first one."""
    cases = [case for case in CASES if case.processes == processes]
    found = group.run_in_turn(processes, *((closed.twice, case) for case in cases))
    for case, result in ((case, x) for case, xs in zip(cases, found, strict=True) for x in xs):
        for name, off in result["off"].items():
            assert off < result["tolerance"], (case, name)
        assert result["compressed"] > 10 * result["tolerance"], case  # or the test shows nothing
        assert result["counted"] == 0, case
        assert result["rows"] == [2, 2], case


def test_replicas_take_local_steps_after_a_hook() -> None:
    """And a hook after local steps."""
    ways = [(closed.local_after, first) for first in ("hook", "local")]
    for result in itertools.chain(*group.run_in_turn(2, *ways)):
        assert result["apart"] > 0  # local steps exchange no gradients
        assert result["off"] < 1e-12
