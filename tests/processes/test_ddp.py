"""The hook: equal to a simulation of the same training and to the trainer; its traffic; what it
does about gradients that are not finite; what it says when something is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke
from ddp_scripts import cases, group, jobs
from ddp_scripts.cases import Case
from ddp_scripts.jobs import SMALL  # several buckets, rebuilt after the first step
from hypothesis import given
from hypothesis import strategies as st
from runs import weights
from tensors import close, same

import regimes
from regimes.hook.ddp.source import _in_memory_order
from regimes.records import read_lines

VIEW = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
TOPK = {"compressor": "topk", "levels": (("low", 40), ("high", 5))}
CASES = {
    "one bucket": Case(),
    "buckets, rebuilt after the first step": Case(ddp=SMALL),
    "grad inside the bucket": Case(ddp={**SMALL, **VIEW}),
    "grad inside the bucket and kept": Case(ddp={**SMALL, **VIEW}, set_to_none=False),
    "accumulation under no_sync": Case(ddp=SMALL, accumulate=3),
    "accumulation inside the bucket": Case(ddp={**SMALL, **VIEW}, accumulate=2),
    "unused at times": Case(ddp={**SMALL, **UNUSED}, branch="sometimes"),
    "unused at times, in the bucket": Case(ddp={**SMALL, **UNUSED, **VIEW}, branch="sometimes"),
    "unused, .grad kept": Case(ddp={**SMALL, **UNUSED}, branch="sometimes", set_to_none=False),
    "unused, kept in the bucket": Case(
        ddp={**SMALL, **UNUSED, **VIEW}, branch="sometimes", set_to_none=False
    ),
    "never used": Case(ddp={**SMALL, **UNUSED}, branch="never"),
    "static graph": Case(ddp={**SMALL, "static_graph": True}),
    "static graph, never used": Case(ddp={**SMALL, "static_graph": True}, branch="never"),
    "channels last": Case(ddp=SMALL, channels_last=True),
    "TopK": Case(ddp=SMALL, **TOPK),
    "ACP-SGD, unused at times": Case(
        ddp={**SMALL, **UNUSED}, branch="sometimes", compressor="acp-sgd", workers=2
    ),
    "DCT-TopK, fading": Case(
        ddp=SMALL, compressor={"name": "dct-topk", "error_feedback": 0.9}, levels=TOPK["levels"]
    ),
    "TopK in blocks, 2 bits": Case(
        ddp=SMALL, compressor={"name": "chunked-topk", "chunk": 8}, levels=TOPK["levels"]
    ),
    "sign": Case(ddp=SMALL, compressor="sign", levels=(("low", "dense"), ("high", 1))),
    "random K, three workers": Case(
        ddp=SMALL, compressor="randomk", levels=(("low", 50), ("high", 10)), workers=3
    ),
}
SLOW = {  # mixtures of two that are tested alone
    "grad inside the bucket and kept",
    "accumulation inside the bucket",
    "unused at times, in the bucket",
    "unused, kept in the bucket",
    "static graph, never used",
}


# -- equivalence: a simulation ---------------------------------------------------------------


def equals_the_simulation(names: Iterable[str]) -> None:
    """In one group of processes for each number of workers."""
    for count in (2, 3):
        chosen = {name: CASES[name] for name in names if CASES[name].workers == count}
        if not chosen:
            continue
        answers = group.run_in_turn(count, *((cases.trained, case) for case in chosen.values()))
        for (name, case), results in zip(chosen.items(), answers, strict=True):
            compare(name, case, results)


def compare(name: str, case: Case, results: list[dict[str, Any]]) -> None:
    oracle = cases.simulated(case)
    for rank, result in enumerate(results):
        close(result["weights"], oracle["weights"], 1e-11, name)
        owed = {k: v if v is None else v[rank : rank + 1] for k, v in oracle["residuals"].items()}
        close(result["residuals"], owed, 1e-9, name)
        assert result["levels"] == oracle["levels"], name
        for row, theirs in zip(result["rows"], oracle["rows"], strict=True):
            norms = (r["statistics"]["norm:update"] for r in (row, theirs))
            assert next(norms) == pytest.approx(next(norms), rel=1e-10), name
    assert len({str(x) for x in oracle["levels"]}) > 1  # the policy has changed levels
    if case.ddp:
        assert len(results[0]["buckets"]) > 2 * cases.EPOCHS * cases.STEPS, name


def test_the_hook_equals_the_simulation() -> None:
    equals_the_simulation(CASES.keys() - SLOW)


@pytest.mark.slow
def test_mixtures_equal_the_simulation() -> None:
    equals_the_simulation(SLOW)


@given(st.permutations([2, 3, 4]), st.permutations([0, 1, 2]))
def test_a_bucket_is_read_in_the_parameters_own_memory_order(
    shape: list[int], order: list[int]
) -> None:
    memory = torch.arange(24.0)
    parameter = torch.nn.Parameter(memory.view(shape).permute(order))
    found = _in_memory_order(torch.arange(24.0).view(parameter.shape), parameter)
    assert torch.equal(found, parameter)


# -- equivalence: the trainer ----------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("compressor=topk", "levels.low=50", "levels.high=2"), marks=pytest.mark.slow),
        pytest.param(("start_compressing_after=5",), marks=pytest.mark.slow),
    ],
    ids=["powersgd", "topk", "dense start"],
)
def test_hook_trainer_and_simulation_are_the_same(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    config = smoke("device=cpu", "workers=2", "data.train_size=60", *settings)
    regimes.run(config, tmp_path / "simulated")
    group.run(jobs.trainer, 2, config, 2, tmp_path / "real")
    hooked = group.run(jobs.smoke, 2, config)[0]
    for folder in ("simulated", "real"):
        close(hooked["weights"], weights(tmp_path / folder), 1e-12)
        rows = read_lines(tmp_path / folder / "epochs.jsonl")
        assert [row["layers"]["level"] for row in rows] == hooked["levels"]
    assert {x for row in hooked["levels"] for x in row} == {"low", "high", "dense"}


def test_statistics_are_those_of_the_trainer(tmp_path: Path) -> None:
    """The norm of each signal, and what policies read of the model."""
    ladder = 'policy.levels=["high", "low"]'
    policies = ("policy=adaqs", ladder), ("policy=error-ladder", ladder)
    signals = [(f"signal={name}",) for name in ("update", "global", "local-mean", "worker0")]
    configs = {
        words: smoke("device=cpu", "workers=2", "data.train_size=60", *words, epochs=2)
        for words in (*signals, *policies)
    }
    answers = group.run_in_turn(2, *((jobs.smoke, config) for config in configs.values()))
    known = set()
    for (words, config), answer in zip(configs.items(), answers, strict=True):
        folder = tmp_path / words[0]
        regimes.run(config, folder)
        for row, theirs in zip(answer[1]["rows"], read_lines(folder / "epochs.jsonl"), strict=True):
            name = f"norm:{config.signal}"
            if words in signals:
                expected = pytest.approx(theirs["statistics"][name], rel=1e-11)
                assert row["statistics"][name] == expected, words
            expected = {
                name: pytest.approx(theirs["model"][name], rel=1e-9) for name in row["model"]
            }
            assert row["model"] == expected, words
            known |= {*row["model"]}
    assert known >= {"msdr", "error:low"}


# -- collectives -----------------------------------------------------------------------------


def test_collectives_are_issued_in_one_order() -> None:
    names = "buckets, rebuilt after the first step", "unused at times", "TopK"
    works = ((jobs.order, CASES[name]) for name in names)
    for name, orders in zip(names, group.run_in_turn(3, *works), strict=True):
        assert orders[0] == orders[1] == orders[2], name
        assert len(orders[0]) > 6 * 2 * 2, name


def test_reduction_goes_on_during_backward() -> None:
    assert group.run(jobs.overlap, 2) == [[True], [True]]


# -- gradients that are not finite -----------------------------------------------------------


SKIPPING = [
    Case(ddp={**SMALL, **VIEW}),
    Case(ddp=SMALL, **TOPK),
    Case(ddp=SMALL, compressor="randomk", levels=(("low", 50), ("high", 10))),
    Case(ddp=SMALL, compressor="acp-sgd"),  # which side is next is part of the state
    Case(ddp=SMALL, compressor=jobs.Counting()),
]
POISONED = [(math.inf, True, True, False), (math.nan, True, False, False)]


def test_a_skipped_step_leaves_no_trace() -> None:
    """As if the step had not been there: scales are powers of two, so bit for bit, and whether
    ``attach`` is told of the scaler or not."""
    ways = [(None, False, False, True), *POISONED]
    answers = iter(
        group.run_in_turn(2, *((jobs.scaled, c, *way) for c in SKIPPING for way in ways))
    )
    for case in SKIPPING:
        clean = next(answers)
        for way, results in zip(POISONED, answers, strict=False):
            for result, theirs in zip(results, clean, strict=True):
                where = case.compressor, way
                assert max(result["scales"]) > result["scales"][0] == 4.0  # the scale has grown,
                assert result["scales"][jobs.BAD] < result["scales"][jobs.BAD - 1]  # and was cut
                assert result["skipped"] == [0, 1, 0], where
                assert result["statistics"] == theirs["statistics"], where
                same(result["weights"], theirs["weights"], where)
    assert next(answers, None) is None


def test_an_epoch_of_skipped_steps_has_no_statistics() -> None:
    result = group.run(jobs.all_skipped, 2)[0]
    assert result["skipped"] == [0, 2, 0]
    assert result["statistics"] == [["norm:update"], [], ["norm:update"]]
    assert result["finite"]


def test_a_policy_hears_of_a_decay_before_the_epoch_that_trains_at_it() -> None:
    assert group.run(jobs.decay, 1)[0] == [
        [0.2, 0.2, "norm change"],
        [0.2, 0.2, "norm change"],
        [0.2, 0.02, "lr decay"],
        [0.02, 0.002, "lr decay"],
        [0.125, 0.0, "lr decay"],  # numbers of NumPy and torch; schedules that end at zero
        [0.0, 0.0, "norm change"],
    ]


# -- what it says ----------------------------------------------------------------------------


def test_a_lost_process_ends_the_others() -> None:
    survivor, dead, other = group.run(jobs.killed, 3)
    assert dead is None
    for result in (survivor, other):
        assert result["heard"].startswith("TrainingError: process ")
        assert "lost contact with the others" in result["heard"]
        assert result["seconds"] < 30
