"""Curvature of a model that FSDP2 divides (oracles: the whole model on all samples at once; the job
without instruments; the number of calls of fully_shard)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from ddp_scripts import group, sharded_curvature
from ddp_scripts.sharded_curvature import GROUPS, MODULES

from regimes.instruments.hessian import HessianProduct

LIMIT = 1e-10
HOW = ["2 x 2", "2 x 2, both compressed", "1 x 4"]
CASES = [pytest.param(HOW[0], marks=pytest.mark.slow), *HOW[1:]]


@cache
def found(*how: str) -> list[dict[str, Any]]:
    """What each process has of some jobs."""
    with TemporaryDirectory() as folder:
        return group.run(sharded_curvature.both, 4, how, folder)


def job(how: str) -> list[tuple[Any, Any]]:
    """By process, with instruments and without."""
    together = HOW[:1] if how == HOW[0] else HOW[1:]
    place = together.index(how)
    return [(one["jobs"][place], one["plain"][place]) for one in found(*together)]


@pytest.mark.parametrize("how", CASES)
def test_a_job_measures_what_the_whole_model_has(how: str) -> None:
    measured = [one for one, _ in job(how)]
    by_module = how == "1 x 4"
    if by_module:
        assert measured[0]["layers"] == [*MODULES]
    model, traces = sharded_curvature.expected(measured[0]["states"][0], by_module)
    for one in measured:
        for name, value in model.items():
            assert one["row"]["model"][name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), name
        by_layer = one["row"]["statistics"]["hessian_trace"]
        assert by_layer == pytest.approx(traces, rel=LIMIT, abs=LIMIT)


@pytest.mark.parametrize("how", CASES)
def test_the_job_is_the_one_without(how: str) -> None:
    for measured, plain in job(how):
        for a, b in zip(measured["states"], plain["states"], strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in b)
        assert measured["draw"] == plain["draw"]
        a, b = measured["row"], plain["row"]
        assert a["layers"] == b["layers"]
        assert a["collectives"] == b["collectives"]
        assert a["statistics"].items() >= b["statistics"].items()


@pytest.mark.parametrize("how", CASES)
def test_each_group_of_parameters_is_gathered_once_for_a_reading(how: str) -> None:
    """Two instruments read, each with weights of its own; the check before the first step is a
    third. Between replicas, sums among shards have all-gathers of their own."""
    for measured, plain in job(how):
        assert measured["weights"] == GROUPS * 3
        assert plain["weights"] == 0
        if how == "1 x 4":
            assert measured["gathers"] == GROUPS * 2
            assert plain["gathers"] == 0


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return [one["alone"] for one in found(*HOW[1:])]


def test_products_need_no_further_gather_and_leave_nothing(alone: Any) -> None:
    net = sharded_curvature.build()
    size = sum(p.numel() for p in net.parameters()) * 8  # bytes of float64
    for process in alone:
        for products in (2, 8):
            assert process[f"gathers {products}"] == GROUPS
            assert process[f"bytes {products}"] == size
            assert process[f"kept {products}"] == 0
        assert process["same"]
        assert process["compiled"] == 0


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_products_are_those_of_the_whole_model(kind: str, alone: Any) -> None:
    net = sharded_curvature.build().eval()
    shares = [sharded_curvature.samples(100 + rank) for rank in range(4)]
    batch = torch.cat([x for x, _ in shares]), torch.cat([y for _, y in shares])
    hessian = HessianProduct(net, sharded_curvature.loss, [batch], kind=kind)
    image = hessian(torch.ones(hessian.dimension, dtype=torch.float64))
    assert image.norm() > 0.1
    for process in alone:
        assert (process[kind] - image).abs().max() < LIMIT


@pytest.mark.slow
def test_a_job_that_goes_on_measures_the_same_bits(tmp_path: Path) -> None:
    for whole, resumed in group.run(sharded_curvature.resumed, 4, str(tmp_path)):
        assert whole.pop("row") == resumed.pop("row")
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


SAID = (
    "parameter 'inner.weight' is divided as",
    "no module of the model is divided by fully_shard",
    "is on the device meta",
)


def test_what_cannot_be_whole_is_one_sentence(alone: Any) -> None:
    for process in alone:
        for said, part in zip(process["said"], SAID, strict=True):
            assert part in said
            assert "\n" not in said
