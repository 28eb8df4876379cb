"""`detach` gives the model back (oracle: the same model before `attach`, and one that never had a
hook, step by step, in torch's bits)."""

from __future__ import annotations

import pytest
from ddp_scripts import detached, group
from ddp_scripts.detached import Case

import regimes

RANK_1 = {"compressor": regimes.PowerSGD(rank=1)}
VIEWS = {"gradient_as_bucket_view": True}


CASES = {
    2: [
        Case("ddp", RANK_1),
        Case("ddp", {"policy": regimes.Accordion(interval=1)}, {"find_unused_parameters": True}),
        Case("ddp", {"compressor": regimes.TopK(percent=5)}, VIEWS),
    ],
    3: [Case("shards", {"scatter": {"level": 4}, "gather": {"level": 8}}), Case("shards", RANK_1)],
    4: [Case("replicas", RANK_1), Case("replicas", {**RANK_1, "scatter": {"level": 8}})],
}


@pytest.mark.parametrize("processes", CASES)
def test_a_detached_model_is_as_it_was(processes: int) -> None:
    works = [(detached.given_back, case) for case in CASES[processes]]
    found = zip(CASES[processes], group.run_in_turn(processes, *works), strict=True)
    for case, result in ((case, x) for case, results in found for x in results):
        assert result["left"] == {}, case
        assert result["compressed"], case  # or the test shows nothing
        assert all(result["same"]), (case, result["same"])
