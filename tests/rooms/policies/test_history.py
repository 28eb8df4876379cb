"""What a policy is told of the past: rows of a record written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from regimes.policies import Accordion, BatchAccordion, PastEpoch
from regimes.policies.detected import signal_values
from regimes.policies.detectors import NormChange
from regimes.policies.history import read_history, whole_history


def row(norms: list[float | None], multiple: int = 1, name: str = "norm:update") -> dict[str, Any]:
    """An epoch of as many layers as ``norms``, at ``multiple`` times the configuration's batch."""
    return {
        "lr": 0.5,
        "next_lr": 0.25,
        "batch": {"level": "high", "multiple": multiple},
        "statistics": {name: norms, "error:high": [0.25] * len(norms)},
        "layers": {"level": ["low", "dense", "high"][: len(norms)]},
        "model": {"eigenvalue": 9.0},
    }


def test_a_norm_counts_as_often_as_the_batch_has_grown() -> None:
    """At 3 times the batch an epoch sums a third of the steps; only the signal's own norm, only
    the compressed layers, and nothing that was undefined."""
    (past,) = read_history([row([2.0, 5.0, None], multiple=3)], [0, 2], "update")
    assert past.statistics["norm"] == [6.0, None]
    assert past.statistics["norm:update"] == [2.0, None]
    assert past.statistics["error:high"] == [0.25, 0.25]
    assert past.levels == ["low", "high"]
    assert (past.lr, past.next_lr, past.model) == (0.5, 0.25, {"eigenvalue": 9.0})
    (other,) = read_history([row([2.0, 5.0, None], multiple=3)], [0, 2], "global")
    assert "norm" not in other.statistics


def test_a_movement_does_not_count_more_often() -> None:
    rows = [row([2.0, 4.0], multiple=3, name="norm:movement")]
    assert read_history(rows, [0, 1], "movement")[0].statistics["norm"] == [2.0, 4.0]
    (whole,) = whole_history(rows, "movement")
    assert whole.statistics["norm"] == [pytest.approx(20**0.5)]


def test_the_whole_models_norm_is_that_of_all_its_layers() -> None:
    (past,) = whole_history([row([3.0, 4.0, 12.0], multiple=2)], "update")
    norms = {"norm": [26.0], "norm:update": [13.0]}  # root of 9 + 16 + 144, and 2 times it
    assert past.statistics == {**norms, "eigenvalue": [9.0]}
    assert past.levels == ["high"]
    assert (past.lr, past.next_lr) == (0.5, 0.25)


def test_a_policy_of_the_whole_model_reads_any_norm_that_was_recorded() -> None:
    """Beside the signal's own, as a policy of single layers does."""
    rows = [row([3.0, 4.0]), row([3.0, 4.0])]
    for own, movement in zip(rows, ([6.0, 8.0], [3.0, 4.0]), strict=True):
        own["statistics"]["norm:movement"] = movement
    past = whole_history(rows, "update")
    rule = NormChange(interval=1, statistic="norm:movement")
    assert signal_values(past, rule, 0) == [10.0, 5.0]
    assert signal_values(past, replace(rule, per_layer=False), 0) == [10.0, 5.0]
    assert signal_values(past, NormChange(), 0) == [5.0, 5.0]


@pytest.mark.parametrize("norms", [[3.0, None, 4.0], []])
def test_an_undefined_layer_leaves_the_models_norm_undefined(norms: list[float | None]) -> None:
    (past,) = whole_history([row(norms)], "update")
    assert past.statistics["norm"] == [None]


def test_a_detector_of_the_model_has_no_norm_where_a_layer_has_none() -> None:
    norms: list[list[float | None]] = [[3.0, 4.0], [3.0, None]]
    past = [PastEpoch(0.5, 0.5, {"norm": of}, ["low"] * 2) for of in norms]
    assert signal_values(past, NormChange(per_layer=False), 0) == [5.0, None]


def test_a_larger_batch_is_no_change_of_the_gradient() -> None:
    """Gradients of one size throughout; at 4 times the batch an epoch's sum is a quarter, which
    unscaled would be a change of 75 % and critical."""
    rows = [row([8.0, 6.0]), row([8.0, 6.0]), row([2.0, 1.5], multiple=4)]
    per_layer = Accordion(interval=1, decay_rule=False)
    decided = per_layer.decide(read_history(rows, [0, 1], "update"), ["a", "b"])
    assert [decision.level for decision in decided] == ["high", "high"]
    whole = BatchAccordion(interval=1, decay_rule=False, grow_only=False)
    assert whole.decide(whole_history(rows, "update"), ["model"])[0].level == "high"
    rows[-1]["batch"]["multiple"] = 1  # the same sums without a larger batch: a real change
    assert per_layer.decide(read_history(rows, [0, 1], "update"), ["a", "b"])[0].level == "low"
    assert whole.decide(whole_history(rows, "update"), ["model"])[0].level == "low"
