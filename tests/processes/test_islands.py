"""Islands of shards: equal to a simulation with a worker for each island, on any number of shards;
equal to torch's own HSDP and to DDP without compression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_scripts import group, islands
from ddp_scripts.islands import Case

from regimes.collectives.requests import Layer

TOPK = (("low", 40), ("high", 5))
EXACT = [
    Case(side=True, accumulate=2, clip=0.5, reshard=False),
    Case({"name": "powersgd", "wire": "bf16"}, adamw=True),
    Case("topk", TOPK, side=True, blocks="checkpoint"),
    Case("acp-sgd"),
    Case("randomk", TOPK),
    Case("quantise", (("low", 8), ("high", 4))),
    Case("sign", (("low", "dense"), ("high", 1))),
    Case("dct-topk", TOPK),
    Case("low-pass", (("low", 0.5), ("high", 0.1)), blocks="compile"),
]


def compare(case: Case, count: int, shards: int, results: list[dict[str, Any]]) -> None:
    oracle = islands.simulated(count, shards, case)
    half = isinstance(case.compressor, dict)  # the wire rounds a mean of islands otherwise
    for rank, mine in enumerate(results):
        island, shard = divmod(rank, shards)
        for name, tensor in oracle["weights"].items():
            found = mine["weights"][name]
            assert torch.allclose(found, tensor, rtol=0, atol=1e-3 if half else 1e-10), name
        for row, theirs in zip(mine["rows"], oracle["rows"], strict=True):
            assert row["layers"]["level"] == theirs["layers"]["level"]
            if not half:
                norms = (r["statistics"]["norm:update"] for r in (row, theirs))
                assert next(norms) == pytest.approx(next(norms), rel=1e-9)
            if case.compressor != "acp-sgd":  # whose steps alternate
                # a layer that no island uses is exchanged all the same
                costs = [mine["per_step"][x]["layers"] for x in row["layers"]["level"]]
                step = sum(cost[i] for i, cost in enumerate(costs))
                assert row["floats"] == pytest.approx(islands.STEPS * step, rel=1e-12)
        for owed, residual in zip(mine["residuals"], oracle["residuals"], strict=True):
            if residual is not None and owed is not None and not half:
                n = residual.shape[1]
                rows = Layer("", (n,)).on(shard, shards).shard
                assert rows is not None
                assert torch.allclose(owed[0], residual[island, rows.here], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("count", "shards"),
    [
        (2, 2),
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_every_compressor_on_islands_equals_its_simulation(count: int, shards: int) -> None:
    found = group.run(islands.trained, count * shards, count, shards, EXACT)
    for i, case in enumerate(EXACT):
        compare(case, count, shards, [results[i] for results in found])


def test_powersgd_does_not_depend_on_the_number_of_shards() -> None:
    case = EXACT[0]
    one = group.run(islands.trained, 2, 2, 1, [case])[0][0]
    compare(case, 2, 1, [one])
    three = group.run(islands.trained, 4, 1, 4, [case])[0][0]
    compare(case, 1, 4, [three])


def test_without_compression_islands_equal_torchs_hsdp_and_ddp() -> None:
    for ours, theirs, ddp in group.run(islands.native, 4, 2, 2):
        for name in ours:
            assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-12), name
            assert torch.allclose(ours[name], ddp[name], rtol=0, atol=1e-12), name
