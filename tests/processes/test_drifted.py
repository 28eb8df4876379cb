"""Weights that a script changes beside a job: replicas end equal, or an error names the cause
(oracle: the weights of both processes, side by side)."""

from __future__ import annotations

import random
import re
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


def run(kind: str, what: str, **more: Any) -> list[tuple[str, float, int]]:
    return group.run(_job, 2, kind, what, more)


def _job(rank: int, kind: str, what: str, more: dict[str, Any]) -> tuple[str, float, int]:
    return drifted.job(rank, kind, what, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_nothing_disturbs_are_equal(kind: str) -> None:
    for said, spread, units in run(kind, "nothing"):
        assert (said, spread, units) == ("", 0.0, drifted.STEPS // drifted.UNIT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_with_other_memory_is_exchanged_as_before(kind: str) -> None:
    """``p.data = ...``, as in a hand-written SAM."""
    for said, spread, units in run(kind, "rebound"):
        assert (said, spread, units) == ("", 0.0, drifted.STEPS // drifted.UNIT)


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("kind", ["DDP", "replicas"])
def test_weights_that_drift_apart_are_named_on_all_processes(kind: str, what: str) -> None:
    found = run(kind, what)
    if (kind, what) == ("replicas", "assign"):  # torch's HSDP follows them, and so does the hook
        assert [x[:2] for x in found] == [("", 0.0)] * 2
        return
    for said, spread, _ in found:
        assert re.search(ERRORS[what], said), said
        assert spread > 0
    assert found[0][0] == found[1][0]


def test_local_steps_go_on_with_the_objects_that_the_model_has() -> None:
    for said, spread, _ in run("local", "assign"):
        assert (said, spread) == ("", 0.0)
    for said, _, _ in run("local", "unfrozen"):
        assert "is trained, and was not when this job was attached" in said


def test_one_word_turns_the_comparison_off() -> None:
    for said, spread, _ in run("DDP", "written", compare_weights=False):
        assert said == ""
        assert spread > 0


@pytest.mark.parametrize(
    "scatter", [{"level": 8}, {"level": 4, "stochastic": False, "error_feedback": True}], ids=str
)
def test_steps_within_backward_are_steps_after_it(scatter: dict[str, Any]) -> None:
    inside, after = (
        group.run(drifted.stepped_inside, 2, inside, scatter) for inside in (True, False)
    )
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


@pytest.mark.parametrize("way", ["replicas", "both", "shards"])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_parameters_in_the_places_of_others_are_exchanged_like_them(
    way: str, error_feedback: bool
) -> None:
    """Oracle: the same job, in which the same values were loaded into the parameters."""
    if way != "shards":
        chosen = {"compressor": "powersgd" if error_feedback else "quantised-all-reduce"}
    else:
        feedback = {"error_feedback": error_feedback, "stochastic": not error_feedback}
        chosen = {"scatter": {"level": 4, **feedback}}
    moved, loaded = (
        group.run(drifted.reloaded, 2, way, chosen, assign) for assign in (True, False)
    )
    for (mine, units), (theirs, as_many) in zip(moved, loaded, strict=True):
        assert torch.equal(mine, theirs)
        assert units == as_many
