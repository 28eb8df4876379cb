"""What jobs do beside plain training where FSDP2's gradients are compressed, by its own collectives
or by compressors of whole gradients: a step that does not count leaves no trace, a job in two parts
is the one in one, other numbers of processes keep the mean of what is owed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_scripts import fsdp, fsdp_jobs, group
from ddp_scripts.fsdp import Case
from torch import Tensor

import regimes

FEEDBACK = {"level": 4, "stochastic": False, "error_feedback": 0.9, "block": 16}
LEVELS = {"levels": {"low": 8, "high": 4}}
RANKS = {"compressor": regimes.PowerSGD(rank={"low": 4, "high": 1})}
OWING = [
    Case(FEEDBACK | {"residual_bits": 8}),
    Case(exchange={"compressor": regimes.PowerSGD(rank=1)}, side=True),
]
AT_RANDOM = [Case({"level": 8}, side=True)]
KINDS = ["nothing", "a pass whose gradients are cleared", "an overflow"]


@pytest.mark.parametrize(
    "cases", [OWING, pytest.param(AT_RANDOM, marks=pytest.mark.slow)], ids=["owing", "at random"]
)
def test_a_pass_that_is_not_applied_leaves_no_trace(cases: list[Case]) -> None:
    """One that is not finite counts, as skipped: the steps of a unit include it."""
    for mine in group.run(fsdp_jobs.uncounted, 2, 2, cases, KINDS):
        for i in range(len(cases)):
            plain, *others = mine[i * len(KINDS) : (i + 1) * len(KINDS)]
            assert bool(plain["residuals"]) == (cases is OWING)
            for other, kind in zip(others, KINDS[1:], strict=True):
                for key in ("weights", "residuals"):
                    assert plain[key].keys() == other[key].keys()
                    for name, tensor in plain[key].items():
                        assert torch.equal(tensor, other[key][name]), (kind, key, name)
                assert plain["memories"] == other["memories"]
                skipped = 2 if kind == "an overflow" else 0
                assert other["counts"][2] == plain["counts"][2] + skipped
                assert sum(row["skipped"] for row in other["rows"]) == skipped
                assert sum(row["steps"] for row in other["rows"]) == fsdp.STEPS + skipped
                if not skipped:
                    levels = [row["layers"]["level"] for row in plain["rows"]]
                    assert [row["layers"]["level"] for row in other["rows"]] == levels


def test_a_job_in_two_parts_has_the_same_bits(tmp_path: Path) -> None:
    """It is cut off within a unit, and goes on from a checkpoint of torch or from files."""
    drawn = LEVELS | {"block": 16}
    fed = drawn | {"stochastic": False, "error_feedback": True}
    options: dict[str, Any] = {"policy": fsdp.RULE, "side": True}
    jobs = [
        (Case(drawn, {"level": 8}, adamw=True, **options), False),
        (Case(fed, {"level": 8}, **options), True),
        (Case(None, {"level": 8}, adamw=True, exchange=RANKS, **options), False),
        (Case(None, {"level": 8}, exchange=RANKS, **options), True),
    ]
    works = [
        (fsdp.three_parts, 2, case, str(tmp_path / str(i)), files)
        for i, (case, files) in enumerate(jobs)
    ]
    for job, answers in zip(jobs, group.run_in_turn(2, *works), strict=True):
        for through, _, resumed in answers:
            for name, tensor in through["weights"].items():
                assert torch.equal(resumed["weights"][name], tensor), (job, name)
            for row, other in zip(through["rows"], resumed["rows"], strict=True):
                for key in ("layers", "statistics", "unit", "lr"):
                    assert row[key] == other[key], job


# -- other numbers of processes --------------------------------------------------------------------

WITH_LEVELS = {key: value for key, value in FEEDBACK.items() if key != "level"} | LEVELS
MOVED = [
    Case(WITH_LEVELS, policy=fsdp.RULE, divide=True, side=True),
    Case(FEEDBACK | {"residual_bits": 16}, divide=True, side=True),
    Case(exchange=RANKS, policy=fsdp.RULE, divide=True, side=True),
]
# the sum over samples, divided by one number on any number of processes
SUMMED = Case(FEEDBACK, divide=True, side=True, factor=3.0)


def shapes_of(case: Case) -> dict[str, list[torch.Size]]:
    """The shapes of the parameters of each layer that is quantised."""
    net = fsdp.build(case)
    named = dict(net.named_parameters())
    return {k: [named[x].shape for x in v] for k, v in fsdp.modules_of(net, case).items()}


def whole(case: Case, parts: list[Tensor], name: str) -> Tensor:
    """Whole numbers of a layer, from each owner's."""
    if case.exchange is not None:
        return torch.cat(parts)
    rows = [part.flatten().double().tolist() for part in parts]
    tensors = fsdp.joined(rows, shapes_of(case)[name], len(parts))
    return torch.cat([tensor.flatten() for tensor in tensors])


def mean_owed(case: Case, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean over processes of what they owe, by layer."""
    found = {}
    for name in results[0]["residuals"]:
        own = [mine["residuals"][name] for mine in results]
        if case.exchange is None:
            own = [whole(case, list(x), name) for x in own]
        found[name] = torch.stack([x.flatten().double() for x in own]).mean(0)
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("one", "other", "cases"),
    [
        (2, 3, [*MOVED, SUMMED]),
        pytest.param(4, 2, MOVED, marks=SLOW),
        pytest.param(4, 8, MOVED, marks=SLOW),
    ],
    ids=["2-3-2", "4-2-4", "4-8-4"],
)
def test_another_number_of_processes_keeps_the_mean_of_what_is_owed(
    one: int, other: int, cases: list[Case], tmp_path: Path
) -> None:
    """They are cut off within a unit."""
    spans = [(0, 3, "", "3")], [(3, 5, "3", "5")], [(5, fsdp.STEPS, "5", "")]
    begun, moved, again = (
        group.run(fsdp_jobs.regrouped, ranks, ranks, cases, str(tmp_path), span)
        for ranks, span in zip((one, other, one), spans, strict=True)
    )
    for i, case in enumerate(cases):
        for before, after in ((begun, moved), (moved, again)):
            ends, begins = [m[0][i]["end"] for m in before], [m[0][i]["begin"] for m in after]
            owed, owes = mean_owed(case, ends), mean_owed(case, begins)
            assert owed.keys() == owes.keys() != set()
            for name, tensor in owed.items():
                held = max(float(m["residuals"][name].abs().max()) for m in begins)
                share = 2.0**-8 if (case.scatter or {}).get("residual_bits") == 16 else 1e-14
                assert torch.allclose(owes[name], tensor, rtol=0, atol=share * held)
                assert held > 1e-5
            for name in ends[0]["sums"]:
                sums = [whole(case, [m["sums"][name] for m in x], name) for x in (ends, begins)]
                shared = min(map(len, sums))
                assert torch.equal(sums[0][:shared], sums[1][:shared])
            assert {m["total"] for m in begins} == {ends[0]["total"]}


def test_a_process_that_is_lost_in_torchs_own_collective_is_named() -> None:
    heard, nothing = group.run(fsdp_jobs.lost, 2, 2, Case())
    assert heard.startswith("process 0 of 2 lost contact with the others in FSDP2's ")
    assert "\n" not in heard
    assert nothing is None
