"""Sharded replicas: equal to a simulation with a worker for each, on any number of shards; equal
to torch's own HSDP and to DDP without compression."""

from __future__ import annotations

import itertools
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import group, hsdp
from ddp_scripts.hsdp import Case
from tensors import near, same

import regimes
from regimes import compression
from regimes.base.config import FeedbackLevel
from regimes.collectives.layers import Layer
from regimes.cost.cases import recorded_work

TOPK = (("low", 40), ("high", 5))
WAYS = [  # one compressor for each way to meet shards
    Case(side=True, accumulate=2, clip=0.5, reshard=False),  # joins them
    Case("topk", TOPK, side=True, blocks="checkpoint"),  # sees each by itself
    Case("threshold", (("low", 1e-4), ("high", 1e-3)), decay=0.5),  # reads the rate
    Case({"name": "quantised-all-reduce", "block": 16}, (("low", 8), ("high", 4))),  # in buckets
]
OTHERS = [
    Case("randomk", TOPK),  # draws the same on all replicas
    Case("low-pass", (("low", 0.5), ("high", 0.1)), adamw=True),
    Case({"name": "powersgd", "wire": "bf16"}),
    Case("acp-sgd"),
    Case("quantise", (("low", 8), ("high", 4))),
    Case("sign", (("low", "dense"), ("high", 1))),
    Case("dct-topk", TOPK),
    Case("dense", (("low", "dense"), ("high", "dense"))),
    Case("cast", (("low", "dense"), ("high", "bf16"))),
    Case({"name": "chunked-topk", "chunk": 16}, TOPK),
]
EXACT = [*WAYS, *OTHERS]
INSIDE = [  # a plain loop's: FSDP2's own collectives within replicas are compressed as well
    Case(scatter={"level": 8, "block": 16}, gather={"level": 8}, side=True, accumulate=2, clip=0.5),
    Case(
        "quantised-all-reduce",
        (("low", 8), ("high", 4)),
        scatter={"level": 4, "stochastic": False},
        blocks="checkpoint",
    ),
    Case(gather={"level": 4, "block": 16}),
]
RISING = {"name": "accordion", "interval": 1, "eta": 0.05}
LADDER = (("low", 3), ("mid", 2), ("high", 1))
POLICIES = [  # those that decide levels from norms and rates
    Case(rule={"name": "static", "level": "high"}),
    Case(levels=(("low", FeedbackLevel(2, False)), ("high", 1))),  # one drops, one keeps
    Case(rule={"name": "windows", "windows": [[1, 2]]}),
    Case(rule={"name": "by-layer", "groups": {"inner*": RISING}}),
    Case(rule={"name": "detected"}),
    Case(levels=LADDER, rule={"name": "rate-ladder"}, decay=0.1),
    Case(levels=LADDER, rule={"name": "accordion-ladder"}),
]
UNMEASURED = {"static", "windows", "rate-ladder"}  # policies that read no norm
COMPILED = Case("low-pass", (("low", 0.5), ("high", 0.1)), blocks="compile")  # slow to import


# torch 2.9 clips sharded gradients with a factor in single precision, also without this package
OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
UNEVEN = {"acp-sgd", "threshold", "quantised-all-reduce"}  # steps differ; scales are of 8 bytes


def name_of(case: Case) -> str:
    table = case.compressor
    return str(table["name"] if isinstance(table, dict) else table)


def compare(case: Case, count: int, shards: int, results: list[dict[str, Any]]) -> None:
    oracle = hsdp.simulated(count, shards, case)
    # sums in half precision: of two replicas in any order the same, of four not
    half = "wire" in case.compressor or (name_of(case) == "cast" and count > 2)
    scale = 1e4 if OLD and case.clip is not None else 1.0
    for row in results[0]["rows"] if case in INSIDE else ():
        sent = row["collectives"]["bytes"]
        assert sent["scatter"] == scattered(case, shards)
        assert sent["weights"] == results[0]["rows"][0]["collectives"]["bytes"]["weights"] > 0
        # what goes within replicas is counted apart from what goes between them
        assert row["bytes"] == sum(sent[x] for x in ("mean", "gather", "exchange") if x in sent)
    for rank, mine in enumerate(results):
        replica, shard = divmod(rank, shards)
        for name, tensor in oracle["weights"].items():
            found = mine["weights"][name]
            atol = 5e-3 if half else 1e-10 * scale
            assert torch.allclose(found, tensor, rtol=0, atol=atol), name
        for row, theirs in zip(mine["rows"], oracle["rows"], strict=True):
            assert row["layers"]["level"] == theirs["layers"]["level"]
            measured = "norm:update" in row["statistics"]
            assert measured or (case.rule or hsdp.RULE)["name"] in UNMEASURED
            if measured and not half:
                norms = (r["statistics"]["norm:update"] for r in (row, theirs))
                assert next(norms) == pytest.approx(next(norms), rel=1e-9 * scale)
            if name_of(case) not in UNEVEN:
                # a layer that no replica uses is exchanged all the same
                costs = [mine["per_step"][x]["layers"] for x in row["layers"]["level"]]
                step = sum(cost[i] for i, cost in enumerate(costs))
                assert row["floats"] == pytest.approx(hsdp.STEPS * step, rel=1e-12)
        for owed, residual in zip(mine["residuals"], oracle["residuals"], strict=True):
            if residual is not None and owed is not None and not half:
                n = residual.shape[1]
                rows = Layer("", (n,)).on(shard, shards).shard
                assert rows is not None
                atol = 1e-9 * scale
                assert torch.allclose(owed[0], residual[replica, rows.here], rtol=0, atol=atol)


MEASURED = [Case(measured=True), Case("topk", TOPK, measured=True)]
HALVES = [Case(half=half) for half in ("parameters", *hsdp.REDUCED_IN)]


@cache
def of_two_shards() -> list[list[dict[str, Any]]]:
    """What each of four processes has of all of these, which would pay for new processes."""
    cases = [*MEASURED, *HALVES, *WAYS, INSIDE[0]]
    return group.run(hsdp.trained, 4, 2, 2, cases)


def test_each_way_to_meet_shards_equals_its_simulation() -> None:
    for i, case in enumerate([*WAYS, INSIDE[0]], start=len(MEASURED + HALVES)):
        compare(case, 2, 2, [results[i] for results in of_two_shards()])


LONG = [pytest.mark.slow, pytest.mark.timeout(900)]  # eight processes


@pytest.mark.parametrize(
    ("count", "shards", "cases"),
    [
        pytest.param(2, 2, OTHERS, marks=pytest.mark.slow, id="2-2-others"),
        pytest.param(
            2, 2, [*POLICIES, COMPILED, *INSIDE[1:]], marks=pytest.mark.slow, id="2-2-policies"
        ),
        pytest.param(2, 4, [*EXACT, *INSIDE], marks=LONG, id="2-4"),
        pytest.param(4, 2, [*EXACT, *POLICIES], marks=LONG, id="4-2"),
    ],
)
def test_every_compressor_on_replicas_equals_its_simulation(
    count: int, shards: int, cases: list[Case]
) -> None:
    found = group.run(hsdp.trained, count * shards, count, shards, cases)
    for i, case in enumerate(cases):
        compare(case, count, shards, [results[i] for results in found])


def scattered(case: Case, shards: int) -> int:
    """Bytes that the shards of a replica send each other in a unit to reduce gradients."""
    named, total = dict(hsdp.build(case).named_parameters()), 0
    table = case.scatter or {"level": 64}  # float64
    for module, names in hsdp.MODULES.items():
        shapes = [named[name].shape for name in names if named[name].requires_grad]
        part = 0
        for shape in shapes:  # a matrix in blocks of its own, a vector as it is
            size, bits = -(-shape[0] // shards) * math.prod(shape[1:]), table["level"]
            rounded = case.scatter is not None and len(shape) > 1
            scales = -(-size // table.get("block", 64)) * 8 if rounded else 0
            part += scales + -(-size * (bits if rounded else 64) // 8)
        times = hsdp.STEPS if module != "side" else int(case.side)
        total += times * shards * (shards - 1) * part
    return total


def test_no_compressor_is_left_out() -> None:
    assert {name_of(case) for case in EXACT} == {
        *compression.REGISTRY,
        "dct-topk",
        "low-pass",
        "threshold",
    }


@pytest.mark.slow
def test_powersgd_does_not_depend_on_the_number_of_shards() -> None:
    case = EXACT[0]
    one = group.run(hsdp.trained, 2, 2, 1, [case])[0][0]
    compare(case, 2, 1, [one])
    three = group.run(hsdp.trained, 4, 1, 4, [case])[0][0]
    compare(case, 1, 4, [three])


def test_replicas_of_one_process_are_the_ddp_hook_bit_for_bit() -> None:
    ways = [(hsdp.beside_ddp, case) for case in (Case(), Case("topk", TOPK))]
    for ours, theirs in itertools.chain(*group.run_in_turn(2, *ways)):
        assert ours["levels"] == theirs["levels"]
        same(ours["weights"], theirs["weights"])


def test_without_compression_replicas_equal_torchs_hsdp_and_ddp() -> None:
    for ours, theirs, ddp in group.run(hsdp.native, 4, 2, 2):
        for name in ours:
            assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-12), name
            assert torch.allclose(ours[name], ddp[name], rtol=0, atol=1e-12), name


def test_half_precision_keeps_residuals_in_float32() -> None:
    """The bound is of bfloat16, which has eight bits, over six steps at a rate of 0.05."""
    oracle = hsdp.simulated(2, 2, Case())
    for mine in itertools.chain(*(results[2:6] for results in of_two_shards())):
        kept = [residual for residual in mine["residuals"] if residual is not None]
        assert {residual.dtype for residual in kept} == {torch.float32}
        for name, tensor in oracle["weights"].items():
            assert torch.allclose(mine["weights"][name].double(), tensor, rtol=0, atol=0.02), name


# -- checkpoints -------------------------------------------------------------------------------


END = hsdp.UNITS * hsdp.STEPS


def resume(case: Case, folder: Path, shards: int, *steps: int) -> list[dict[str, Any]]:
    """The last of several jobs on two replicas, each of which continues the one before."""
    results: list[dict[str, Any]] = []
    for first, last in itertools.pairwise(steps):
        where = str(folder)
        results = group.run(hsdp.resumed, 2 * shards, 2, shards, case, where, first, last)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(side=True),
        pytest.param(Case("acp-sgd", side=True), marks=pytest.mark.slow),
        pytest.param(Case(side=True, scatter={"level": 4}), marks=pytest.mark.slow, id="inside"),
    ],
)
def test_a_resumed_job_has_the_same_bits_and_on_other_shards_the_same_numbers(
    case: Case, tmp_path: Path
) -> None:
    whole = resume(case, tmp_path / "whole", 2, 0, END)
    cut = resume(case, tmp_path / "cut", 2, 0, 3, END)  # within a unit
    for ours, theirs in zip(cut, whole, strict=True):
        same(ours["weights"], theirs["weights"])
        for mine, owed in zip(ours["residuals"], theirs["residuals"], strict=True):
            assert (mine is None) == (owed is None)
            assert owed is None or torch.equal(mine, owed)
        assert ours["rows"] == theirs["rows"]
    record = regimes.load(tmp_path / "cut" / "run")
    assert record.finished
    assert record.header["world"]["shards"] == 2
    assert [epoch[0] for epoch in recorded_work(record)] == [2, 2, 2]  # as `regimes cost` reads it
    if case.compressor != "powersgd" or case.scatter is not None:
        return
    shutil.copytree(tmp_path / "cut" / "3", tmp_path / "fewer" / "3")
    (ours, *_) = resume(case, tmp_path / "fewer", 1, 3, END)
    near(ours["weights"], whole[0]["weights"], 1e-10)
    assert [row["floats"] for row in ours["rows"]] == [r["floats"] for r in whole[0]["rows"]]


def joined(results: list[dict[str, Any]], key: str, shards: int) -> list[torch.Tensor]:
    """The mean over replicas of each compressed layer's whole residual."""
    layers = zip(*(mine[key] for mine in results), strict=True)
    parts = [[x[0] for x in layer if x is not None] for layer in layers]
    means = [p for p in parts if p]
    return [torch.cat(p).unflatten(0, (len(results) // shards, -1)).mean(0) for p in means]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas_after", "shards_after"),
    [
        (4, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_another_number_of_replicas_keeps_the_mean_of_residuals(
    replicas_after: int, shards_after: int, tmp_path: Path
) -> None:
    before = resume(case := Case(side=True), tmp_path / "before", 2, 0, 3)
    shutil.copytree(tmp_path / "before" / "3", tmp_path / "3")
    where = (replicas_after, shards_after, case, str(tmp_path), 3, END, None, True)
    after = group.run(hsdp.resumed, replicas_after * shards_after, *where)
    ends, begins = joined(before, "residuals", 2), joined(after, "begin", shards_after)
    assert len(ends) == len(begins) > 3
    for ours, theirs in zip(begins, ends, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert len(after[0]["rows"]) == 3
    assert regimes.load(tmp_path / "run").finished


@pytest.mark.slow
def test_a_sharded_job_is_branched_at_a_unit(tmp_path: Path) -> None:
    """The policy of the trunk leaves its bits, another one decides from the branch on."""
    low, high = ({"name": "static", "level": level} for level in ("low", "high"))
    jobs = {"same": hsdp.RULE, "low": low, "high": high}
    (whole, *_) = resume(Case(side=True), tmp_path / "whole", 2, 0, 4)
    resume(Case(side=True), tmp_path / "trunk", 2, 0, 2)
    ends = {}
    for name in ("same", "low", "high"):
        shutil.copytree(tmp_path / "trunk" / "2", tmp_path / name / "2")
        where = (2, 2, Case(side=True), str(tmp_path / name), 2, 4, jobs[name])
        ends[name] = group.run(hsdp.resumed, 4, *where)[0]
    same(ends["same"]["weights"], whole["weights"])
    for name in ("low", "high"):
        first, second = (row["layers"]["level"] for row in ends[name]["rows"])
        assert first == whole["rows"][0]["layers"]["level"]
        assert {*second} == {name, "dense"}


# -- instruments -------------------------------------------------------------------------------


def test_what_is_measured_of_shards_is_that_of_whole_layers() -> None:
    """Of replicas of two processes and of one each. TopK selects of each shard by itself, so that
    its error is another one."""
    several = [results[:2] for results in of_two_shards()]
    one = group.run(hsdp.trained, 2, 2, 1, MEASURED[:1])[0]
    for powersgd, topk in several:
        for row, theirs in zip(powersgd["rows"], one[0]["rows"], strict=True):
            assert row["statistics"].keys() == theirs["statistics"].keys()
            for name, values in theirs["statistics"].items():
                expected = [None if y is None else pytest.approx(y, rel=1e-7) for y in values]
                assert row["statistics"][name] == expected, name
        for row, first in zip(topk["rows"], several[0][1]["rows"], strict=True):
            assert row["statistics"] == first["statistics"]
            assert {"error:low", "error:high", "residual", "cosine"} <= row["statistics"].keys()
            assert all(x is None or 0 <= x <= 1.5 for x in row["statistics"]["cosine"])
