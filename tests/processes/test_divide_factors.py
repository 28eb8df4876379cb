"""`set_gradient_divide_factor` of a model whose replicas the hook exchanges. Torch's own HSDP is
the oracle. Compressors commute with a factor, so that each is compared with itself without one."""

from __future__ import annotations

import pytest
import torch
from ddp_scripts import factors, group
from ddp_scripts.factors import Case

from regimes.compression import REGISTRY

FACTORS = (1.0, 2.0, 3.0)  # torchtitan's, the shards', and no power of two
LEVELS = {
    "dense": "dense",
    "powersgd": 2,
    "acp-sgd": 2,
    "topk": 40,
    "randomk": 40,
    "chunked-topk": 40,
    "sign": 1,
    "quantise": 8,
    "quantised-all-reduce": 8,
    "cast": "bf16",
}
MESH = (2, 2)
WORLD = MESH[0] * MESH[1]


def test_replicas_get_the_sum_that_torch_gives() -> None:
    torchs = [Case("torch", factor) for factor in (None, *FACTORS)]
    dense = [Case("replicas", factor) for factor in (None, *FACTORS)]
    more = [
        Case(way, factor, name, LEVELS[name])
        for way, name in (("replicas", "powersgd"), ("both", "dense"), ("both", "topk"))
        for factor in (None, 1.0)
    ]
    for answers in group.run(factors.reduced, WORLD, MESH, [*torchs, *dense, *more]):
        found = dict(zip([*torchs, *dense, *more], answers, strict=True))
        for case, ours in zip(torchs, dense, strict=True):
            total = found[torchs[0]] * (1 if case.factor is None else WORLD / case.factor)
            assert torch.allclose(found[case], total, rtol=1e-12, atol=1e-14)
            assert torch.allclose(found[ours], total, rtol=1e-12, atol=1e-14), ours
        for plain, case in zip(more[::2], more[1::2], strict=True):
            check_times(case, found[case], found[plain], WORLD)


def test_every_compressor_gives_the_same_numbers_times_the_factor() -> None:
    assert LEVELS.keys() == set(REGISTRY)
    cases = [
        Case("replicas", factor, name, level)
        for name, level in LEVELS.items()
        for factor in (None, 1.0)
    ]
    for answers in group.run(factors.reduced, 2, (2, 1), cases):
        for case, plain, gradient in zip(cases[1::2], answers[::2], answers[1::2], strict=True):
            check_times(case, gradient, plain, 2)


def check_times(case: Case, gradient: torch.Tensor, plain: torch.Tensor, world: int) -> None:
    assert case.factor is not None
    error = (gradient - plain * world / case.factor).norm() / gradient.norm()
    assert error < 1e-9, (case, error)


@pytest.mark.parametrize("shape", [MESH, (2, 1)], ids=str)
def test_a_factor_counts_once_whenever_it_is_set(shape: tuple[int, int]) -> None:
    """After `attach`, in passes that are each exchanged and added up, and on a replica of one
    process."""
    limits = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
    more = [{}, {"late": True}, {"passes": 3}, {"before": True}]
    ways = [(kind, x) for kind in limits for x in more]
    cases = [Case(way, 1.0, kind=kind, **x) for way in ("torch", "replicas") for kind, x in ways]
    for answers in group.run(factors.reduced, shape[0] * shape[1], shape, cases):
        for (kind, case), right, ours in zip(ways, answers[:8], answers[8:], strict=True):
            error = (ours - right).norm() / right.norm()
            assert error < limits[kind], (shape, kind, case, error)


def test_a_factor_that_would_be_missed_is_refused() -> None:
    for said in group.run(factors.refused, 2):
        assert said.endswith("call it before attach"), said
