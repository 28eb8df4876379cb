"""A policy per group of layers (oracle: each policy alone, over the rows of its layers alone)."""

from __future__ import annotations

import pytest

from regimes.base.errors import ConfigError
from regimes.policies import Accordion, ByLayer, LevelCost, PastEpoch, Static, make_policy
from regimes.policies.history import History

LAYERS = ["embedding.weight", "blocks.0.up.weight", "blocks.1.up.weight", "head.weight"]
TABLE = {
    "name": "by-layer",
    "groups": {
        "embedding* head*": {"name": "static", "level": "dense"},
        "blocks.1.*": {"name": "accordion", "interval": 1},
    },
    "otherwise": {"name": "static", "level": "high"},
}


def _past(norms: list[float], levels: list[str]) -> PastEpoch:
    costs = {"low": LevelCost([4.0, 3.0, 2.0, 1.0], 40.0)}
    return PastEpoch(0.1, 0.1, {"norm": list(norms)}, levels, costs=costs)


def test_each_group_follows_its_own_policy():
    rule = make_policy(TABLE)
    past = History()
    alone = History()
    for norms in ([1, 1, 1, 1], [9, 9, 1.1, 9], [9, 9, 9, 9], [9, 9, 9, 9]):
        decided = rule.decide(past, LAYERS)
        (expected,) = Accordion(interval=1).decide(alone, LAYERS[2:3])
        assert [d.level for d in decided[:2]] == ["dense", "high"]
        assert decided[2] == expected
        assert decided[3].level == "dense"
        past.append(_past(norms, [d.level for d in decided]))
        alone.append(_past(norms[2:3], [expected.level]))
    assert {past[i].levels[2] for i in range(4)} == {"low", "high"}


def test_a_group_sees_the_costs_of_its_layers():
    seen = []

    class Spy(Static):
        def decide(self, history, layers):
            seen.extend(history)
            return super().decide(history, layers)

    ByLayer({"blocks.*": Spy("low")}, Static("high")).decide(
        [_past([1, 2, 3, 4], ["low"] * 4)], LAYERS
    )
    assert seen[0].costs["low"] == LevelCost([3.0, 2.0], 40.0)
    assert seen[0].statistics == {"norm": [2, 3]}


def test_needs_and_names_are_those_of_all_groups():
    rule = make_policy(TABLE)
    assert rule.needs == ("norm",)
    assert rule.names == ("dense", "low", "high")


def test_the_first_pattern_that_matches_decides():
    rule = ByLayer({"*.up.weight": Static("a"), "blocks.1.*": Static("b")}, Static("c"))
    layers = ["blocks.0.up.weight", "blocks.1.up.weight", "blocks.1.qkv.weight", "head.weight"]
    assert [d.level for d in rule.decide([], layers)] == ["a", "a", "b", "c"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"groups": {" ": {"name": "static"}}}, "a table of patterns and policies"),
        ({"groups": {"head*": 3}}, r"policy.groups.'head\*' = 3: expected a table with a name"),
        ({"otherwise": {"name": "stat"}}, "did you mean 'static'"),
    ],
)
def test_a_wrong_table_is_one_sentence(changed, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_policy({**TABLE, **changed})


def test_a_pattern_is_a_text():
    with pytest.raises(ConfigError, match="a table of patterns and policies"):
        ByLayer({1: Static("low")})


def test_a_pattern_without_a_layer_is_one_sentence():
    with pytest.raises(ConfigError, match=r"no compressed layer matches 'embeding\*'"):
        ByLayer({"embeding*": Static("low")}).decide([], LAYERS)


def test_a_group_whose_layers_all_belong_to_an_earlier_one_is_one_sentence():
    rule = ByLayer({"*": Static("low"), f"{LAYERS[0]}": Static("high")})
    with pytest.raises(ConfigError, match="belong to a group before it: write this group first"):
        rule.decide([], LAYERS)
