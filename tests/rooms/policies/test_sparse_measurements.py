"""Policies whose statistics are measured in every k-th unit only. Oracle: each rule once more, as a
loop over units that keeps what it needs, over drawn histories and over what runs have recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from configs import gpt as words
from hypothesis import given, settings
from hypothesis import strategies as st

import regimes
from regimes.policies import LevelCost, PastEpoch, Policy, make_policy
from regimes.policies.replay.replay import past_epochs

LADDER = ("r1", "r2", "r4")
BYTES = {"r1": 100.0, "r2": 230.0, "r4": 400.0}
Rule = Generator[list[str], PastEpoch, None]  # from a unit that is over to the next one's levels
RATES = (0.8, 0.4, 0.3, 0.1, 0.02, 0.001)


def errors_of(unit: PastEpoch, level: str) -> list[float | None]:
    """By layer; None throughout where nothing was measured."""
    return unit.statistics.get(f"error:{level}", [None] * len(unit.levels))


def error_ladder(table: dict[str, Any], layers: int) -> Rule:
    unit = yield [LADDER[-1]] * layers
    count = 0
    while True:
        now = list(unit.levels)
        if count % table["interval"] == 0:
            for i in range(layers):
                found = [errors_of(unit, level)[i] for level in LADDER]
                if found != [None] * len(LADDER):
                    good = [
                        level
                        for level, error in zip(LADDER, found, strict=True)
                        if error is not None and error <= table["error"]
                    ]
                    now[i] = (good or [LADDER[-1]])[0]
        count += 1
        unit = yield now


def gravac(table: dict[str, Any], layers: int) -> Rule:
    gains: dict[str, float | None] = dict.fromkeys(LADDER)
    climb, products, winner, count = list(LADDER[::-1]), list[float](), "", 0
    unit = yield [climb[0]] * layers
    while True:
        count += 1
        norms = unit.statistics["norm"]
        for level in LADDER:
            both = zip(norms, errors_of(unit, level), strict=True)
            pairs = [(norm, error) for norm, error in both if None not in (norm, error)]
            if sum(norm for norm, _ in pairs) > 0:
                through = sum(norm * math.sqrt(1 - error) for norm, error in pairs)
                gain, before = through / sum(norm for norm, _ in pairs), gains[level]
                share = table["smoothing"]
                gains[level] = gain if before is None else share * gain + (1 - share) * before
        if not winner and count % table["interval"] == 0:
            tried = climb[len(products)]
            products.append((gains[tried] or 0.0) / unit.costs[tried].bytes)
            first, *others = sorted(products)[::-1]
            alike = others and first - others[0] < table["tolerance"] * first
            if alike or len(products) == len(climb):
                winner = climb[products.index(first)]
        sought = winner or climb[len(products)]
        level = "dense"
        for candidate in (LADDER[-1], sought):
            if (gains[candidate] or 0.0) >= table["gain"]:
                level = candidate
        unit = yield [level] * layers


def decayed(top: float, peak: float, old: float, new: float) -> bool:
    """Has the rate halved, or slowly come to a tenth of the highest since the last decay?"""
    return new <= old / 2 or (new < old and new <= top / 10 and new >= peak / 100)


def accordion(table: dict[str, Any], layers: int) -> Rule:
    """Both of them: over two levels, and over a ladder."""
    high, low = ("high", "low") if table["name"] == "accordion" else (LADDER[0], LADDER[-1])
    kept: list[tuple[int, float] | None] = [None] * layers  # at the last evaluation
    newest: list[tuple[int, float] | None] = [None] * layers
    top = peak = 0.0
    unit, count = (yield [low] * layers), 0
    while True:
        now = list(unit.levels)
        for i, value in enumerate(unit.statistics.get("norm", [])):
            newest[i] = newest[i] if value is None else (count, value)
        if count % table["interval"] == 0:
            for i, new in enumerate(newest):
                if new is not None and new != kept[i]:
                    old = kept[i]
                    calm = old is not None and abs(old[1] - new[1]) < table["eta"] * old[1]
                    below = (
                        high
                        if table["name"] == "accordion"
                        else LADDER[max(LADDER.index(now[i]) - 1, 0)]
                    )
                    now[i] = below if calm else low
            kept = list(newest)
        count += 1
        top, peak = max(top, unit.lr), max(peak, unit.lr)
        if decayed(top, peak, unit.lr, unit.next_lr):
            now, top = [low] * layers, unit.next_lr
        unit = yield now


def adaqs(table: dict[str, Any], layers: int) -> Rule:
    reference, rung = None, 0
    unit = yield [LADDER[0]] * layers
    while True:
        value = unit.model.get("msdr")
        if value is not None:
            if reference is not None and value <= reference * (1 - table["fall"]):
                rung, reference = rung + 1, value
            reference = value if reference is None else reference
        unit = yield [LADDER[min(rung, 2)]] * layers


def rate_ladder(table: dict[str, Any], layers: int) -> Rule:
    peak, level = 0.0, LADDER[-1]
    while True:
        unit = yield [level] * layers
        peak = max(peak, unit.lr, unit.next_lr)
        share = unit.next_lr / peak
        level = "r1" if share < 0.15 else "r2" if share < 0.5 else "r4"


RULES: dict[str, Callable[[dict[str, Any], int], Rule]] = {
    "error-ladder": error_ladder,
    "gravac": gravac,
    "accordion": accordion,
    "accordion-ladder": accordion,
    "adaqs": adaqs,
    "rate-ladder": rate_ladder,
}
SHARE = st.integers(1, 19).map(lambda x: x / 20 + 0.0013)  # no value is exactly at a bound
VALUE = st.integers(1, 64).map(lambda x: x / 64)
TABLES = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("error-ladder"), "error": SHARE, "interval": st.integers(1, 3)}
    ),
    st.fixed_dictionaries(
        {
            "name": st.just("gravac"),
            "gain": SHARE,
            "tolerance": SHARE | st.just(0.0),
            "smoothing": SHARE,
            "interval": st.integers(1, 2),
        }
    ),
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["accordion", "accordion-ladder"]),
            "eta": SHARE,
            "interval": st.integers(1, 3),
        }
    ),
    st.fixed_dictionaries({"name": st.just("adaqs"), "fall": SHARE}),
    st.fixed_dictionaries({"name": st.just("rate-ladder")}),
)
LAYERS = st.integers(1, 3)


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Any], list[PastEpoch]]:
    """A policy's table and units of up to three layers, measured in every k-th; within one, single
    layers may lack a value."""
    table, layers, every = draw(TABLES), draw(LAYERS), draw(st.integers(1, 4))
    length = draw(st.integers(1, 14))
    rates = [draw(st.sampled_from(RATES)) for _ in range(length + 1)]
    some = st.one_of(st.none(), VALUE) if draw(st.booleans()) else VALUE
    costs = {level: LevelCost([1.0] * layers, sent) for level, sent in BYTES.items()}
    units = []
    for unit in range(length):
        statistics: dict[str, list[float | None]] = {"norm": [draw(some) for _ in range(layers)]}
        model: dict[str, float | None] = {}
        if unit % every == 0:
            model["msdr"] = draw(some)
            statistics |= {
                f"error:{level}": [draw(some) for _ in range(layers)] for level in LADDER
            }
        units.append(PastEpoch(rates[unit], rates[unit + 1], statistics, [], model, costs))
    return table, units


def made(table: dict[str, Any]) -> Policy:
    ladder = table["name"] not in ("accordion",)
    return make_policy({**table, **({"levels": list(LADDER)} if ladder else {})})


def steered(table: dict[str, Any], units: Sequence[PastEpoch], layers: int) -> list[list[str]]:
    """The levels of each unit and of the one after the last, by the naive rule."""
    rule, found = RULES[table["name"]](table, layers), []
    levels = next(rule)
    for unit in units:
        found.append(levels)
        levels = rule.send(
            PastEpoch(unit.lr, unit.next_lr, unit.statistics, levels, unit.model, unit.costs)
        )
    return [*found, levels]


@given(histories())
@settings(max_examples=250)
def test_each_policy_is_its_naive_rule(case: tuple[dict[str, Any], list[PastEpoch]]) -> None:
    table, units = case
    layers = len(units[0].statistics["norm"])
    wanted, chosen, past = steered(table, units, layers), made(table), list[PastEpoch]()
    names = [f"layer{i}" for i in range(layers)]
    for levels, unit in zip(wanted, units, strict=False):
        assert [d.level for d in chosen.decide(past, names)] == levels
        past.append(
            PastEpoch(unit.lr, unit.next_lr, unit.statistics, levels, unit.model, unit.costs)
        )
    assert [d.level for d in chosen.decide(past, names)] == wanted[-1]


RUNS = {
    "error-ladder": "error=0.75, interval=1",
    "gravac": "gain=0.6, tolerance=0.01, smoothing=0.5, interval=2",
}


@pytest.mark.parametrize(("every", "unit"), [(2, None), (3, 5)])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_measures_seldom_decides_as_the_naive_rule(
    name: str, every: int, unit: int | None, tmp_path: Path
) -> None:
    c = words(
        f"policy={{name='{name}', levels={list(LADDER)}, {RUNS[name]}}}",
        "levels={r1=1, r2=2, r4=4}",
        f"instruments.error={{every={every}}}",
        f"epochs={2 if unit else 5}",
        *([f"unit_steps={unit}"] if unit else []),
    )
    record = regimes.run(c, tmp_path)
    units = past_epochs(record)
    measured = [any(key.startswith("error:") for key in unit.statistics) for unit in units]
    assert measured == [i % every == 0 for i in range(len(units))]
    table = {"name": name, **{k: v for k, v in c.policy.items() if k != "levels"}}
    found = [unit.levels for unit in units]
    assert found == steered(table, units, len(found[0]))[:-1]
    assert len({level for levels in found for level in levels}) > 1
