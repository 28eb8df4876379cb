"""What numbers depend on is the same on all processes, or one sentence names the field and the
values, before anything is trained: in the hook, in local steps and in the trainer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from configs import smoke as config
from ddp_scripts import apart, group

from regimes.collectives.agreement import describe_difference

HOOK = {
    "seed": "has seed = 1, process 0 has seed = 0: ",
    "compressor": "has compressor.name = 'acp-sgd', ",
    "compressor option": "has compressor.error_feedback = True, process 0 has compressor.error_fee",
    "level": "has levels.low = 3, process 0 has levels.low = 4: ",
    "policy": "has policy.eta = 1.5, process 0 has policy.eta = 0.5: ",
    "own policy": "has policy.days = 6, process 0 has policy.days = 7: ",
    "loose policy": "has policy.weeks = 3, process 0 has policy.weeks = 4: ",
    "signal": "has signal = 'global', process 0 has signal = 'update': ",
    "start": "has start_compressing_after = 1, process 0 has start_compressing_after = 0: ",
    "unit": "has every = 3, process 0 has every = 2: ",
    "unit by hand": "has every = 'epoch', process 0 has every = 2: ",
    "optimizer": "has optimizer.name = 'AdamW', ",
    "weight decay": "has optimizer.options.weight_decay = 0.1, process 0 has optimizer.options.we",
    "rate": "has lr.1 = 1.1, process 0 has lr.1 = 0.1: ",
    "scaler": "has scaler = True, process 0 has scaler = False: ",
    "buckets": "has ddp.bucket_bytes_cap = ",
}
LOCAL = {
    "seed": "has seed = 1, process 0 has seed = 0: ",
    "policy": "has policy.level = '3', process 0 has policy.level = '2': ",
    "periods": "has periods.high = 9, process 0 has periods.high = 8: ",
    "outer": "has outer.lr = 0.5, process 0 has outer.lr = 1.0: ",
    "compressor": "has compressor.name = 'topk', ",
    "level": "has level = 2, process 0 has level = 1: ",
    "unit": "has every = 6, process 0 has every = 5: ",
    "momentum": "has optimizer.options.momentum = 0.5, process 0 has optimizer.options.momentum",
    "dtype": "has dtype = 'torch.float64', ",
}
TRAINER = {
    "seed=3": "has seed = 3, process 0 has seed = 0: ",
    "optimizer.momentum=0.5": "has optimizer.momentum = 0.5, process 0 has optimizer.momentum = ",
    "levels={low=3,high=1}": "has levels.low = 3, process 0 has levels.low = 4: ",
    "policy.interval=2": "has policy.interval = 2, process 0 has policy.interval = ",
    "unit_steps=3": "has unit_steps = 3, process 0 has no unit_steps: ",
}
REST = "start all processes with the same configuration, code and data"


def check(found: list[dict[str, str]], expected: dict[str, str]) -> None:
    for heard in found:
        for name, words in expected.items():
            assert heard[name].startswith("ConfigError: process 1 "), (name, heard[name])
            assert words in heard[name], (name, heard[name])
            assert heard[name].endswith(REST), name


@cache
def heard_of() -> dict[str, list[Any]]:
    """What both processes hear, one way after the other."""
    works = apart.hook, apart.local, apart.local_drifted, apart.drifted, apart.by_hand
    found = group.run_in_turn(2, *((work,) for work in works))
    return {work.__name__: one for work, one in zip(works, found, strict=True)}


def test_hooks_that_differ_are_refused_when_they_are_attached() -> None:
    found = heard_of()["hook"]
    check(found, HOOK)
    for heard in found:
        assert heard.keys() - HOOK.keys() == {"alike", "timeouts"}
        assert heard["alike"] == heard["timeouts"] == ""


def test_a_rate_that_differs_later_is_refused_in_that_unit() -> None:
    for heard in heard_of()["drifted"]:
        assert "process 1 has lr.0 = 0.025, process 0 has lr.0 = 0.05: " in heard


def test_levels_that_differ_by_hand_are_refused_at_the_first_step_that_has_them() -> None:
    for heard in heard_of()["by_hand"]:
        assert heard.keys() == {"first", "second", "alone", "local"}
        for name, said in heard.items():
            assert said.startswith("ConfigError: process 1 has "), (name, heard)
            assert f"= '{'dense' if name == 'local' else 'high'}', " in said, (name, said)
            assert "\n" not in said, name


def test_local_steps_that_differ_are_refused_at_the_start() -> None:
    found = heard_of()["local"]
    check(found, LOCAL)
    assert [heard["loose policy"] for heard in found] == ["", ""]


def test_a_rate_that_differs_later_is_refused_at_the_synchronisation() -> None:
    for heard in heard_of()["local_drifted"]:
        assert "process 1 has lr.0 = 0.05, process 0 has lr.0 = 0.1: " in heard


@pytest.mark.parametrize("setting", TRAINER)
def test_trainers_that_differ_are_refused_before_they_train(setting: str) -> None:
    found = group.run(apart.trainer, 2, config(), [setting], timeout=None)
    check([{setting: heard} for heard in found], {setting: TRAINER[setting]})


def test_a_difference_in_words() -> None:
    assert describe_difference([{"a": {"b": 1}}, {"a": {"b": 1}}]) is None
    assert describe_difference([{"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, {"a": [1]}]) == (
        "process 2 has no a.1.b, process 0 has a.1.b = 2"
    )
    assert describe_difference([dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1)]) == (
        "process 1 has a = 1, b = 1, c = 1, process 0 has a = 0, b = 0, c = 0; and 2 others differ"
    )
    assert describe_difference([{"a": float("nan")}, {"a": float("nan")}]) is None
    assert len(str(describe_difference([{"a": "x" * 1000}, {"a": "y" * 1000}]))) < 200
