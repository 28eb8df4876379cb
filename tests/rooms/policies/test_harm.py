"""Levels by predicted harm (oracles: brute force, Lagrange's condition, a closed form, by hand)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regimes
from regimes import capabilities
from regimes.config import FeedbackLevel
from regimes.errors import ConfigError
from regimes.instruments.needs import policy_parts
from regimes.policies import Decision, LeastHarm, make_policy
from regimes.policies.harm import spread_budget
from regimes.policies.history import Ahead, History, LevelCost, PastEpoch
from regimes.replay.replay import replay_rule

RATES = [0.2, 0.6, 1.0, 1.0, 1.0, 0.3, 0.3, 0.1]
BYTES = {"r1": 10, "r2": 20, "r4": 40, "dense": 400}


def ahead(rates: list[float] = RATES, **sent: int) -> Ahead:
    costs = {name: LevelCost([x / 8, x / 8], x) for name, x in {**BYTES, **sent}.items()}
    return Ahead(rates, [25] * len(rates), costs)


def levels_of(rule: LeastHarm, known: Ahead) -> list[str]:
    """The levels that it decides, unit by unit."""
    past = History(ahead=known)
    for rate in known.rates:
        (decision,) = rule.decide(past, ["m"])
        past.append(PastEpoch(rate, rate, {}, [decision.level]))
    return [epoch.levels[0] for epoch in past]


# -- the allocation ------------------------------------------------------------------------------

ROWS = st.lists(
    st.lists(st.tuples(st.floats(0, 9), st.floats(1, 9)), min_size=3, max_size=3),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.floats(0, 1), st.floats(0.01, 9))
def test_no_choice_of_that_cost_has_less_harm(
    rows: list[list[tuple[float, float]]], share: float, price: float
) -> None:
    """Brute force over all choices; and Lagrange's condition, by which each row alone takes what is
    least in harm plus price times cost."""
    harms = [[harm for harm, _ in row] for row in rows]
    costs = [[cost for _, cost in row] for row in rows]
    every = [*itertools.product(range(3), repeat=len(rows))]

    def total(table: list[list[float]], chosen: Sequence[int]) -> float:
        return sum(row[k] for row, k in zip(table, chosen, strict=True))

    def least(budget: float) -> float:
        return min(total(harms, x) for x in every if total(costs, x) <= budget * (1 + 1e-9))

    by_price = [min(range(3), key=[h + price * c for h, c in row].__getitem__) for row in rows]
    budget = total(costs, by_price)
    columns = spread_budget(harms, costs, budget)
    assert columns is not None
    assert total(costs, columns) <= budget * (1 + 1e-9)
    assert total(harms, columns) == pytest.approx(total(harms, by_price), abs=1e-6)
    assert total(harms, columns) == pytest.approx(least(budget), abs=1e-6)

    lowest, highest = sum(map(min, costs)), sum(map(max, costs))
    budget = lowest + share * (highest - lowest)
    columns = spread_budget(harms, costs, budget)
    assert columns is not None
    assert total(costs, columns) <= budget * (1 + 1e-9)
    step = max(max(row) - min(row) for row in harms)  # of one row, which may not have fitted
    assert total(harms, columns) <= least(budget) + step + 1e-9
    assert spread_budget(harms, costs, 0.99 * lowest) is None


def test_bytes_follow_the_rate_to_half_the_exponent() -> None:
    """The closed form: harm x^p / b, with a given sum of b, is least where b is as x^(p/2)."""
    sent = {f"l{b}": b for b in range(1, 801)}
    known = ahead(RATES, **sent, dense=10**9)
    rule = LeastHarm(levels=tuple(sent), budget=150 * 8 / (800 * 8))
    found = np.array([sent[level] for level in levels_of(rule, known)], float)
    wanted = np.array(RATES) ** 0.85
    assert found.sum() == 1200
    assert np.abs(found - 1200 * wanted / wanted.sum()).max() <= 1


# -- reductions ----------------------------------------------------------------------------------


def test_it_is_one_level_where_nothing_is_to_be_divided() -> None:
    levels = ("r1", "r2", "r4")
    assert levels_of(LeastHarm(levels=("r2",), budget="r2"), ahead()) == ["r2"] * 8
    assert levels_of(LeastHarm(levels=levels, budget="r2", exponent=0), ahead()) == ["r2"] * 8
    assert levels_of(LeastHarm(levels=levels, budget="r2"), ahead([0.3] * 8)) == ["r2"] * 8
    assert levels_of(LeastHarm(levels=levels, budget=1.0), ahead()) == ["r4"] * 8
    assert levels_of(LeastHarm(levels=levels, budget="r1"), ahead()) == ["r1"] * 8


def test_a_budget_between_goes_to_the_highest_rates_and_of_equal_ones_to_the_first() -> None:
    """By hand: c is 39, 19 and 9, so a step to r2 saves 2 x^1.7 a byte, one to r4 a quarter of it.
    Of 80 bytes above r1 four steps to r2 (at x = 1 and 0.6) take 40, and two to r4 the rest."""
    rule = LeastHarm(levels=("r1", "r2", "r4"), budget="r2")
    assert levels_of(rule, ahead()) == ["r1", "r2", "r4", "r4", "r2", "r1", "r1", "r1"]
    less = replace(rule, budget=0.45)  # 64 bytes
    assert levels_of(less, ahead()) == ["r1", "r2", "r4", "r2", "r2", "r1", "r1", "r1"]


def test_feedback_is_kept_where_the_rate_has_fallen() -> None:
    """At equal bytes the level without feedback has less harm above 0.43^(1 / 1.2) = 0.495."""
    known = replace(ahead([0.2, 0.48, 0.51, 1.0, 0.5, 0.4], drop=10), dropping=["drop"])
    rule = LeastHarm(levels=("drop", "r1"), budget="r1")
    assert levels_of(rule, known) == ["r1", "r1", "drop", "drop", "drop", "r1"]


def test_within_a_unit_layers_with_larger_errors_get_more() -> None:
    """By hand: 2.5 floats above r1 are two steps of the first layer, which save 0.4 and 0.2 (the
    other's saves 0.05)."""
    known = ahead([1.0, 1.0], r4=30)
    rule = LeastHarm(levels=("r1", "r2", "r4"), budget="r2", by_layer=True)
    assert rule.needs == ("norm", "error:r1", "error:r2", "error:r4")
    past = History(ahead=known)
    assert rule.decide(past, ["a", "b"]) == [Decision("r2", {"rule": "start"})] * 2
    errors = {"error:r1": [0.81, 0.09], "error:r2": [0.25, 0.0625], "error:r4": [0.09, 0.04]}
    past.append(PastEpoch(1.0, 1.0, {"norm": [1.0, 1.0], **errors}, ["r2", "r2"]))
    assert [d.level for d in rule.decide(past, ["a", "b"])] == ["r4", "r1"]
    unknown = History([replace(past[0], statistics={"norm": [1.0, 1.0]})], known)
    assert [d.level for d in rule.decide(unknown, ["a", "b"])] == ["r2", "r2"]


# -- in jobs -------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def simulated(out: Path, **given: Any) -> regimes.Record:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    data = x, x[:, :3].argmax(1)
    return regimes.simulate(network, data, data, out=out, workers=2, batch_size=8, **given)


def test_a_run_sends_the_bytes_of_one_level_and_its_replay_decides_alike(tmp_path: Path) -> None:
    rule = {"name": "harm", "levels": ["high", "mid", "low"], "budget": "mid"}
    levels = {"low": 3, "mid": 2, "high": 1, "drop": FeedbackLevel(2, False)}
    falls = {"lr": 0.05, "schedule": "cosine"}
    given = {"levels": levels, "optimizer": falls, "epochs": 6}
    follows = {"name": "harm", "levels": ["drop", "mid"], "budget": "mid"}
    for number, table in enumerate((rule, follows)):
        record = simulated(tmp_path / str(number), policy=table, **given)
        decided = [row["layers"]["level"][0] for row in record.rows]
        names = table["levels"]
        assert decided == sorted(decided, key=names.index, reverse=number == 0)
        assert {*decided} == {*names}
        sent = record.header["per_step"]
        assert sum(sent[level]["bytes"] for level in decided) <= 6 * sent["mid"]["bytes"]
        again = replay_rule(record, make_policy(table))
        assert [again.level[again.epoch == unit].iloc[0] for unit in range(6)] == decided
    share = f"{sent['high']['bytes'] / sent['low']['bytes']:.3g} of those"
    with pytest.raises(ConfigError, match=rf"budget = 0.1: the highest .* more bytes, {share}"):
        simulated(tmp_path / "less", policy={**rule, "budget": 0.1}, **given)
    assert not (tmp_path / "less").exists()  # before any work


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"budget": 1.5}, r"policy.budget = 1.5: expected a share in \(0, 1\], or the name"),
        ({"harms": {"high": 1.0}}, "policy.harms = .*: expected a number for each level"),
        ({"rates": [0.0, 0.0]}, "policy.rates = .*: expected finite numbers, one of them above 0"),
        ({"levels": []}, "policy.levels = .*: expected one or more different levels"),
    ],
)
def test_wrong_fields_are_one_sentence(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_policy({"name": "harm", **table})


def test_what_knows_no_rates_or_bytes_refuses_it(tmp_path: Path) -> None:
    table = {"name": "harm", "levels": ["high", "low"], "budget": 0.5}
    with pytest.raises(
        ConfigError, match=r"policy = 'LeastHarm': .* in a hook: .* give policy.rates"
    ):
        capabilities.check(policy_parts(make_policy(table), "policy"), [capabilities.HOOK])
    known = make_policy({**table, "rates": [1.0, 0.1]})
    capabilities.check(policy_parts(known, "policy"), [capabilities.HOOK])
    past = History(ahead=replace(ahead(), rates=()))
    given = replace(known, levels=("r1", "r2"), budget=0.75)
    assert given.decide(past, ["m"])[0].level == "r2"
    past += [PastEpoch(1.0, 0.1, {}, ["r2"])] * 5  # it stays at the last unit's level
    assert given.decide(past, ["m"])[0].level == "r1"
    with pytest.raises(ConfigError, match="in local_steps: the policy chooses periods"):
        capabilities.check(policy_parts(known, "policy"), [capabilities.LOCAL_STEPS])
    within = make_policy({"name": "l-greco", "levels": ["high", "low"], "base": table})
    assert capabilities.RATES_AHEAD in capabilities.declared_needs(within)
    periods = {"sync_policy": table, "sync_levels": {"low": 1, "high": 4}}
    with pytest.raises(
        ConfigError, match=r"sync_policy = 'harm': .* chooses levels of a compressor"
    ):
        simulated(tmp_path, set=periods)
