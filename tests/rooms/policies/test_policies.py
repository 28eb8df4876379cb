"""Detectors and policies against the rule written out by hand."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regimes.base.errors import ConfigError
from regimes.policies import (
    Accordion,
    Decision,
    Detected,
    PastEpoch,
    Windows,
    read_history,
)

LAYERS = ["a", "b"]


def live(policy, norms: list[list[float]], rates: list[float]) -> list[list[Decision]]:  # type: ignore[no-untyped-def]
    """Feed epochs one by one, as the loop does; the decisions of every epoch."""
    past: list[PastEpoch] = []
    decisions = []
    for epoch, values in enumerate(norms):
        now = policy.decide(past, LAYERS)
        decisions.append(now)
        levels = [d.level for d in now]
        past.append(PastEpoch(rates[epoch], rates[epoch + 1], {"norm": values}, levels))
    return decisions


def reference(norms: list[float], rates: list[float], eta: float, interval: int) -> list[str]:
    """The authors' loop for one layer, in its own words."""
    levels, level, kept = [], "low", None
    for epoch, norm in enumerate(norms):
        levels.append(level)
        if epoch % interval == 0:
            if epoch == 0 or kept == 0:
                level = "low"
            else:
                level = "low" if abs(kept - norm) / kept >= eta else "high"
            kept = norm
        if rates[epoch + 1] < rates[epoch]:
            level = "low"
    return levels


@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=40),
    st.integers(1, 7),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sets(st.integers(1, 39), max_size=3),
)
def test_accordion_against_the_authors_loop(
    norms: list[float], interval: int, eta: float, decays: set[int]
) -> None:
    rates = [0.1 ** sum(e >= d for d in decays) for e in range(len(norms) + 1)]
    policy = Accordion(eta=eta, interval=interval)
    mine = live(policy, [[n, 1.0] for n in norms], rates)
    assert [d[0].level for d in mine] == reference(norms, rates, eta, interval)
    assert [d[1].level for d in mine] == reference([1.0] * len(norms), rates, eta, interval)


def test_every_decision_says_why() -> None:
    rates = [1.0] * 5 + [0.1] * 5
    decisions = live(Accordion(eta=0.5, interval=2), [[8, 8], [7, 8], [2, 8], *[[2, 8]] * 5], rates)
    whys = [d[0].why for d in decisions]
    assert whys[0] == {"rule": "start"}
    assert whys[1] is not None
    assert whys[1]["rule"] == "norm change"
    assert whys[2] is None
    assert whys[3] == {"rule": "norm change", "old": 8, "new": 2, "ratio": 0.75, "threshold": 0.5}
    assert decisions[3][1].level == "high"
    assert whys[5] == {"rule": "lr decay", "old": 1.0, "new": 0.1}


def test_the_decay_rule_can_be_left_out() -> None:
    rates = [1.0, 1.0, 1.0, 0.1, 0.1, 0.1]
    norms = [[1.0, 1.0]] * 5
    assert live(Accordion(interval=1), norms, rates)[3][0].level == "low"
    assert live(Accordion(interval=1, decay_rule=False), norms, rates)[3][0].level == "high"


def test_windows_are_half_open() -> None:
    norms = [[1.0, 1.0]] * 6
    decisions = live(Windows(windows=((0, 2), (4, 5))), norms, [1.0] * 7)
    assert [d[0].level for d in decisions] == ["low", "low", "high", "high", "low", "high"]
    assert [d[0].why is not None for d in decisions] == [True, False, True, False, True, True]
    reverse = Windows(windows=((0, 2),), inside="high", outside="dense")
    assert [d[0].level for d in live(reverse, norms[:3], [1.0] * 7)] == ["high", "high", "dense"]


def test_a_value_that_came_out_undefined_leaves_the_layer_as_it_was() -> None:
    """A record's null (a noise scale that an epoch did not resolve) is no change of the signal."""
    rows = [
        {
            "lr": 0.1,
            "next_lr": 0.1,
            "layers": {"level": ["high", "low"]},
            "statistics": {"msdr": [1 / (1 + epoch), None]},
            "model": {"noise_scale": None},
        }
        for epoch in range(3)
    ]
    past = read_history(rows, [0, 1], "update")
    found = Detected({"name": "msdr-fall", "per_layer": True}).decide(past, LAYERS)
    assert found[1] == Decision("low")
    assert found[0].level == "low"
    assert found[0].why is not None


def test_a_subclass_with_an_annotation_for_type_checkers_has_its_bounds_checked() -> None:
    fields: list[Any] = [("extra", "OnlyForTypeCheckers", field(default=0))]
    own = make_dataclass("Own", fields, bases=(Accordion,), frozen=True)
    assert own(eta=0.1).eta == 0.1
    with pytest.raises(ConfigError, match=r"policy\.eta = -1: expected a positive number"):
        own(eta=-1)
