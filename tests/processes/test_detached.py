"""`detach` gives the model back (oracle: the same model before `attach`, and one that never had a
hook, step by step, in torch's bits)."""

from __future__ import annotations

import pytest
from ddp_scripts import detached, group
from ddp_scripts.detached import Case

import regimes

RANK_1 = {"compressor": regimes.PowerSGD(rank=1)}
VIEWS = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize(
    "case",
    [
        Case("ddp", RANK_1),
        Case("ddp", {"policy": regimes.Accordion(interval=1)}, {"find_unused_parameters": True}),
        Case("ddp", {"compressor": regimes.TopK(percent=5)}, VIEWS),
        Case("replicas", RANK_1, processes=4),
        Case("replicas", {**RANK_1, "scatter": {"level": 8}}, processes=4),
        Case("shards", {"scatter": {"level": 4}, "gather": {"level": 8}}),
        Case("shards", RANK_1),
    ],
    ids=str,
)
def test_a_detached_model_is_as_it_was(case: Case) -> None:
    for result in group.run(detached.given_back, case.processes, case):
        assert result["left"] == {}
        assert result["compressed"]  # or the test shows nothing
        assert all(result["same"]), result["same"]
