"""FSDP2's own collectives, compressed: at "dense" FSDP2 itself, at each level a plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from ddp_scripts import fsdp, group
from ddp_scripts.fsdp import Case
from tensors import same

import regimes

NEAREST = {"level": 8, "stochastic": False, "block": 16}
FEEDBACK = {"level": 4, "stochastic": False, "error_feedback": True}
HELD = {"level": 4, "stochastic": False, "error_feedback": 0.9, "block": 16}
POLICY = {"levels": {"low": 8, "high": 4}, "block": 16}
# as fully_shard is used; "dense" is torch's own, so these compare bits with and without a hook
DENSE = [
    Case(),
    Case(root_only=True, side=True, adamw=True, reshard=False),
    Case(half=True, accumulate=2, clip=0.5),
]
LOOPED = [
    Case(NEAREST),
    Case(FEEDBACK, reshard=False, side=True, clip=0.5, measured=True),
    Case({"level": 4}, {"level": 8}, root_only=True, side=True, replaced=True),
    Case({"level": 8}, {"level": 4, "block": 16}, accumulate=2, adamw=True),
    Case({"level": 4, "block": 5}, accumulate=2, synchronise=True, force_sum=True),
    Case(POLICY, policy=fsdp.RULE),
    Case(
        HELD | {"residual_bits": 16},
        side=True,
        freeze=("inner.weight", "left.weight"),
        measured=True,
    ),
    Case(HELD | {"residual_bits": 8}, measured=True),
    Case({"level": 4}, {"level": 8}, side=True, compiled=True),
]
OF_FOUR = [
    Case(POLICY | {"stochastic": False, "error_feedback": 0.9}, policy=fsdp.RULE, reshard=2),
    Case({"level": 4}, {"level": 8}, recompute=True, side=True),
]
# torch 2.9 clips sharded gradients with a factor in single precision, also without this package,
# and sums them in another order
OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
CASES = {
    "2 processes": (DENSE[1:], LOOPED[1:8]),
    "2 processes, further": (DENSE[:1], [LOOPED[0], LOOPED[8]]),
    "4 processes": (DENSE[1:2], OF_FOUR),
}


def places(kind: int) -> list[Any]:
    return [
        pytest.param(
            those,
            place,
            id=f"{place} of {those}",
            marks=[pytest.mark.slow] if "further" in those else [],
        )
        for those, cases in CASES.items()
        for place in range(len(cases[kind]))
    ]


@cache
def trained(those: str) -> list[list[dict[str, Any]]]:
    """By case, what each process has; of "dense" also without a hook."""
    dense, looped = CASES[those]
    ranks = int(those[0])
    cases = [case for one in dense for case in (one, replace(one, attach=False))] + looped
    return list(zip(*group.run(fsdp.trained, ranks, ranks, cases), strict=True))


@pytest.mark.parametrize(("those", "place"), places(0))
def test_dense_is_torchs_own(those: str, place: int) -> None:
    ours, theirs = trained(those)[2 * place : 2 * place + 2]
    for mine, plain in zip(ours, theirs, strict=True):
        same(mine["weights"], plain["weights"])


@pytest.mark.parametrize(("those", "place"), places(1))
def test_each_level_is_a_plain_loop(those: str, place: int) -> None:
    dense, looped = CASES[those]
    case, results = looped[place], trained(those)[2 * len(dense) + place]
    first = results[0]
    values = {"dense": "dense", **case.scatter.get("levels", {})}
    values["constant"] = case.scatter.get("level")
    names = list(first["layers"])
    table = [[values[word] for word in row["layers"]["level"]] for row in first["rows"]]
    oracle = fsdp.looped(len(results), case, [dict(zip(names, row, strict=True)) for row in table])
    if case.policy is not None:
        assert {8, 4} == {level for row in table for level in row}
        for row, norms in zip(first["rows"], oracle["norms"], strict=True):
            expected = [norms[name] for name in names]
            assert row["statistics"]["norm:update"] == pytest.approx(expected, rel=1e-12)
    for result in results:
        assert result["levels"] == first["levels"]
        for row, of_first in zip(result["rows"], first["rows"], strict=True):
            assert row["layers"]["level"] == of_first["layers"]["level"]
            assert row["statistics"] == of_first["statistics"]
        if case.measured:
            norms = [oracle["residual"][name] for name in names]
            last = result["rows"][-1]["statistics"]["residual"]
            assert last == pytest.approx(norms, rel=1e-6)
        for name, tensor in oracle["weights"].items():
            error = (result["weights"][name] - tensor).abs().max()
            limit = 1e-7 if OLD and case.clip is not None else 1e-10 if OLD else 1e-12
            assert error < limit, (name, float(error))


def test_levels_in_the_policy_are_levels_of_scatter() -> None:
    eight, four = (regimes.QuantisedScatter(bits=bits, block=16) for bits in (8, 4))
    rule = regimes.Accordion(interval=1, eta=0.2, low=eight, high=four)
    cases = [Case(POLICY, policy=fsdp.RULE), Case(policy=rule)]
    for by_name, by_object in group.run(fsdp.trained, 2, 2, cases):
        same(by_object["weights"], by_name["weights"])
        assert [row["layers"]["level"] for row in by_object["rows"]] == [
            row["layers"]["level"] for row in by_name["rows"]
        ]


def test_floats_of_a_dense_unit_are_those_of_the_header() -> None:
    plain, steps = trained("2 processes")[0][0], fsdp.EVERY
    row, costs = plain["rows"][2], plain["per_step"]["dense"]["layers"]
    (whole,) = costs
    side = 12 * 12 + 12  # the branch, which only the first step of this unit uses
    assert row["layers"]["floats"] == [steps * whole - side // 2]
    assert row["collectives"]["calls"]["scatter"] == steps


def test_bytes_of_each_collective_beside_those_of_float32() -> None:
    dense, eight, four = group.run(fsdp.wide, 2, 2)[0]
    for kind in ("scatter", "weights"):
        assert eight[kind] <= 0.30 * dense[kind]
        assert four[kind] <= 0.16 * dense[kind]
    # a part of 3200 numbers to the other process: codes, and 50 scales of 4 bytes
    assert dense["scatter"] == 3200 * 4
    assert [eight["scatter"], four["scatter"]] == [3200 + 200, 1600 + 200]
    for sent in (dense, eight, four):
        assert sent.pop("formula") == sent["scatter"]
        # no other collective carries numbers of the model
        assert {kind for kind, size in sent.items() if size} == {"scatter", "weights"}


# -- one gradient that is known --------------------------------------------------------------------

SHAPE = (10, 33)


def test_stochastic_rounding_is_unbiased() -> None:
    """In each of n rows, a draw of the same numbers, a sender errs by less than a step, and in the
    mean by zero: below 5 standard deviations of at most half of a step."""
    shape, scatter = (1000, 32), {"level": 4, "block": 32}
    draws = group.run(fsdp.gradient, 2, 2, shape, {"scatter": scatter}, True)[0].double()
    numbers = torch.stack([fsdp.given(rank, shape)[0].double() for rank in range(2)])
    step = numbers.abs().amax() / 7  # the wider one
    assert (draws - numbers.mean(0)).abs().max() < step
    error = (draws.mean(0) - numbers.mean(0)).abs()
    assert error.max() < 5 * 0.5 * step / (2 * shape[0]) ** 0.5
    assert draws.std(0).max() > 0.1 * step


@pytest.mark.parametrize("level", [8, 4])
def test_bfloat16_stays_within_its_bounds(level: int) -> None:
    """Rounding to the nearest errs by half of a step of each sender; the sum, in float32, is
    rounded once to the 8 bits of bfloat16."""
    options = {"scatter": {"level": level, "stochastic": False, "block": 64}, "half": True}
    found = group.run(fsdp.gradient, 2, 2, SHAPE, options)[0]
    numbers = torch.stack([fsdp.given(rank, SHAPE).bfloat16().double() for rank in range(2)])
    scales = numbers.abs().amax((1, 2), keepdim=True)  # at least that of each block
    bound = (scales / (2 * (2 ** (level - 1) - 1))).mean() + 2.0**-8 * numbers.abs().max()
    error = (found.double() - numbers.mean(0)).abs()
    assert error.max() <= bound
    assert error.max() > 0


def test_vectors_travel_as_they_are() -> None:
    """In one module and in several, in float32 and in bfloat16."""
    ways = [(8, False, False), (4, True, False), (4, False, True), (8, True, True)]
    calls = [(fsdp.vectors, 2, *way) for way in ways]
    for way, answers in zip(ways, group.run_in_turn(2, *calls), strict=True):
        for found in answers:
            assert len(found) > 20, way
            assert all(found), (way, found)


def test_a_sum_in_rank_order_and_a_factor_of_the_users() -> None:
    """float32, to the bit: the sums of four ranks in their order, times a factor."""
    scatter = {"level": 8, "stochastic": False, "block": 4096}
    results = group.run(fsdp.gradient, 4, 4, SHAPE, {"scatter": scatter, "factor": 8.0})
    total = torch.zeros(12, 33)
    for rank in range(4):
        numbers = torch.zeros(12, 33)
        numbers[:10] = fsdp.given(rank, SHAPE)
        parts = numbers.view(4, -1)  # one block for each owner
        scale = parts.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (parts / scale * 127 + 0.5).floor().clamp(-127, 127)
        total += (codes * (scale / 127)).view(12, 33)
    for found in results:
        assert torch.equal(found, total[:10] * 0.125)


def test_a_step_that_is_not_finite_shows_it_and_spoils_no_later_one() -> None:
    scatter = {"level": 8, "stochastic": False, "block": 33, "error_feedback": True}
    before, now = group.run(fsdp.gradient, 2, 2, SHAPE, {"scatter": scatter}, False, True)[0]
    assert not before[0].isfinite().any()  # the whole block
    assert before[1:].isfinite().all()
    mean = torch.stack([fsdp.given(rank, SHAPE) for rank in range(2)]).mean(0)
    assert (now - mean).abs().max() < 4 / 127
