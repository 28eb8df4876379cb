"""Ranks that fall with the learning rate (oracles: units counted by hand, the record of a run)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import regimes
from regimes.base.config import override
from regimes.policies import PastEpoch, check_levels, make_policy
from regimes.presets import get_grid

GRIDS = ("falling-lm", "falling-lm-cosine", "falling-lm-constant")
SHORT = ["data.train_size=2049", "data.test_size=65", "unit_steps=1", "workers=1", "batch_size=1"]


@pytest.mark.parametrize("name", GRIDS)
def test_arms_differ_in_their_policy_alone(name: str) -> None:
    grid = get_grid(name)
    first = grid["rank 1"]
    for arm, cell in grid.items():
        assert replace(cell, name="", policy=first.policy) == replace(first, name="")
        assert cell.name == arm
        check_levels(make_policy(cell.policy), cell.levels)


def levels(arm: str, name: str = "falling-lm") -> str:
    """The rank in each unit of a run in which nothing is measured."""
    rule = make_policy(get_grid(name)[arm].policy)
    past: list[PastEpoch] = []
    rates = [0.1] * 15 + [0.1 / 10**0.5] * 5 + [0.01] * 5  # a step in unit 14 decays
    for unit in range(24):
        level = rule.decide(past, ["layer"])[0].level
        past.append(PastEpoch(rates[unit], rates[unit + 1], {}, [level]))
    return "".join(epoch.levels[0][1] for epoch in past)


@pytest.mark.parametrize(
    ("arm", "ranks"),
    [
        ("rank 3", "3" * 24),
        ("rate 2-1", "2" * 15 + "1" * 9),
        ("rate 3-1", "3" * 15 + "1" * 9),
        ("rate 3-2-1", "3" * 15 + "2" * 5 + "1" * 4),
        ("late 2-1", "1" * 9 + "2" * 15),
    ],
)
def test_ranks_unit_by_unit(arm: str, ranks: str) -> None:
    assert levels(arm) == ranks


def test_controls_have_as_many_units_of_rank_2() -> None:
    arms = [("coin 2-1", "falling-lm"), ("late 2-1", "falling-lm")]
    arms += [(f"{kind} 2-1", "falling-lm-constant") for kind in ("coin", "early", "late")]
    assert [levels(*arm).count("2") for arm in arms] == [
        15
    ] * 5  # units of `lm-small` before its first decay
    assert levels("coin 2-1") not in (levels("late 2-1"), levels("rate 2-1"))


@pytest.mark.parametrize(("name", "before"), [("falling-lm", 15), ("falling-lm-cosine", 14)])
def test_a_run_falls_with_its_rate(name: str, before: int, tmp_path: Path) -> None:
    """24 steps, a unit each; the decays in proportion."""
    cell = override(get_grid(name)["rate 2-1"], SHORT)
    steps = () if name.endswith("cosine") else (15, 20)
    rate = replace(cell.optimizer, warmup_steps=2, decay_steps=steps)
    run = regimes.run(replace(cell, optimizer=rate, steps=24), tmp_path / "run")
    used = run.layers[run.layers["level"] == "r2"].groupby("epoch").size()
    assert [*used.index] == [*range(before)]


def test_a_constant_rate_does_not_fall() -> None:
    assert get_grid("falling-lm-constant")["rank 1"].optimizer.schedule == "constant"
    assert not get_grid("falling-lm-constant")["rank 1"].optimizer.decay_steps
