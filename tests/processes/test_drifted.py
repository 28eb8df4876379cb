"""Weights that a script changes beside a job: replicas end equal, or an error names the cause
(oracle: the weights of both processes, side by side)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_scripts import drifted, group

KINDS = ["DDP", "replicas", "local"]
ERRORS = {  # what a script does to the model -> what is said, of hooks
    "written": "TrainingError: process 1 holds other weights than .*: the replicas have drifted",
    "assign": "ConfigError: .* is another object than the one that was attached",
    "unfrozen": "ConfigError: .* is trained, and was not when this job was attached",
}


UNDISTURBED = [(kind, what) for kind in KINDS for what in ("nothing", "rebound")]
APART = [(kind, what) for kind in ("DDP", "replicas") for what in ERRORS]


def run(*jobs: tuple[str, str]) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    """Each with what its processes end with."""
    return zip(jobs, group.run_in_turn(2, *((drifted.job, *job) for job in jobs)), strict=True)


def test_replicas_that_nothing_disturbs_are_equal() -> None:
    """Nor a parameter with other memory, ``p.data = ...``, as in a hand-written SAM."""
    for job, found in run(*UNDISTURBED):
        assert found == [("", 0.0, drifted.STEPS // drifted.UNIT)] * 2, job


def test_weights_that_drift_apart_are_named_on_all_processes() -> None:
    for (kind, what), found in run(*APART):
        if (kind, what) == ("replicas", "assign"):  # torch's HSDP follows them, as does the hook
            assert [x[:2] for x in found] == [("", 0.0)] * 2
            continue
        for said, spread, _ in found:
            assert re.search(ERRORS[what], said), (kind, said)
            assert spread > 0, (kind, what)
        assert found[0][0] == found[1][0]


def test_local_steps_go_on_with_the_objects_that_the_model_has() -> None:
    (_, assigned), (_, unfrozen) = run(("local", "assign"), ("local", "unfrozen"))
    assert [x[:2] for x in assigned] == [("", 0.0)] * 2
    for said, _, _ in unfrozen:
        assert "is trained, and was not when this job was attached" in said


def test_one_word_turns_the_comparison_off() -> None:
    for said, spread, _ in group.run(drifted.job, 2, "DDP", "written", False):
        assert said == ""
        assert spread > 0


def test_steps_within_backward_are_steps_after_it() -> None:
    tables = {"level": 8}, {"level": 4, "stochastic": False, "error_feedback": True}
    ways = [(drifted.stepped_inside, inside, x) for x in tables for inside in (True, False)]
    found = group.run_in_turn(2, *ways)
    for inside, after in zip(found[::2], found[1::2], strict=True):
        for (mine, units), (theirs, as_many) in zip(inside, after, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert units == as_many == 2


def drawn(seeds: range) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds of job in turn, each with three ways to change a model, one after the other."""
    return [
        (KINDS[seed % 3], tuple(random.Random(seed).sample([*drifted.WAYS], 3))) for seed in seeds
    ]


def check_equal_or_named(cases: list[tuple[str, tuple[str, ...]]]) -> None:
    """After any of them replicas are equal, or both processes say the same of who differs."""
    for case, mine, theirs in zip(cases, *group.run(drifted.wide_jobs, 2, cases), strict=True):
        said, spread, units = mine
        assert mine == theirs, case
        if said:
            assert re.match(r"(Config|Training)Error: .*(process|used) ", said), (case, said)
        else:
            assert (spread, units) == (0.0, drifted.STEPS // drifted.UNIT), case


def test_whatever_a_script_does_replicas_are_equal_or_named() -> None:
    cases = drawn(range(18))
    assert {way for _, ways in cases for way in ways} == {*drifted.WAYS}
    check_equal_or_named(cases)


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, 200])
def test_more_of_what_a_script_may_do(first: int) -> None:
    check_equal_or_named(drawn(range(first, first + 45)))


def test_parameters_in_the_places_of_others_are_exchanged_like_them() -> None:
    """Oracle: the same job, in which the same values were loaded into the parameters."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (way, {"compressor": name})
        for way in ("replicas", "both")
        for name in ("powersgd", "quantised-all-reduce")
    ]
    ways += [
        ("shards", {"scatter": {"level": 4, "error_feedback": owes, "stochastic": not owes}})
        for owes in (False, True)
    ]
    jobs = [(drifted.reloaded, *way, assign) for way in ways for assign in (True, False)]
    found = group.run_in_turn(2, *jobs)
    for way, moved, loaded in zip(ways, found[::2], found[1::2], strict=True):
        for (mine, units), (theirs, as_many) in zip(moved, loaded, strict=True):
            assert torch.equal(mine, theirs), way
            assert units == as_many, way
