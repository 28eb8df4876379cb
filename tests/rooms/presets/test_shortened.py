"""The tables of rules for a part of a training (oracle: each length worked out by hand)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from regimes import policies
from regimes.policies import detectors
from regimes.presets.families import shorten_rule

NINTH = 1 / 9


@pytest.mark.parametrize(
    "registry", [policies.REGISTRY, detectors.REGISTRY], ids=["policies", "detectors"]
)
def test_an_interval_that_is_not_written_is_shortened_too(registry: Any) -> None:
    known = {name: dataclasses.fields(registry.dataclass(name)) for name in registry}
    intervals = {name: f.default for name, fs in known.items() for f in fs if f.name == "interval"}
    assert {1, 10} >= {*intervals.values()}
    for name, default in intervals.items():
        short = shorten_rule({"name": name}, 0.2, registry)
        assert short == {"name": name, "interval": max(1, default // 5)}


RULES = {
    "written": (
        {"name": "accordion", "interval": 18, "eta": 0.3},
        {"name": "accordion", "interval": 2, "eta": 0.3},
    ),
    "windows": (
        {"name": "windows", "windows": [(0, 45), (63, 72)], "layers": {"a": [(9, 18)]}},
        {"name": "windows", "windows": [(0, 5), (7, 8)], "layers": {"a": [(1, 2)]}},
    ),
    "windows that meet": (
        {"name": "windows", "windows": [(0, 2), (3, 5)]},
        {"name": "windows", "windows": [(0, 1)]},
    ),
    "detector": (
        {"name": "detected", "detector": {"name": "first-share", "share": 0.5, "epochs": 90}},
        {"name": "detected", "detector": {"name": "first-share", "share": 0.5, "epochs": 10}},
    ),
    "default of a detector": (
        {"name": "detected", "detector": {"name": "norm-change"}},
        {"name": "detected", "detector": {"name": "norm-change", "interval": 1}},
    ),
    "base": (
        {"name": "l-greco", "interval": 9, "base": {"name": "accordion", "interval": 27}},
        {"name": "l-greco", "interval": 1, "base": {"name": "accordion", "interval": 3}},
    ),
    "by layer": (
        {
            "name": "by-layer",
            "groups": {"a*": {"name": "accordion", "interval": 36}},
            "otherwise": {"name": "static", "level": "low"},
        },
        {
            "name": "by-layer",
            "groups": {"a*": {"name": "accordion", "interval": 4}},
            "otherwise": {"name": "static", "level": "low"},
        },
    ),
    "none": ({"name": "static", "level": "low"}, {"name": "static", "level": "low"}),
}


@pytest.mark.parametrize(("whole", "short"), RULES.values(), ids=RULES)
def test_units_of_a_rule_are_in_proportion(whole: dict[str, Any], short: dict[str, Any]) -> None:
    assert shorten_rule(whole, NINTH) == short
