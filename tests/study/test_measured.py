"""``cost/clocks.toml``, on which `regimes cost` rests its advice (oracles: the committed losses,
records and races, computed again)."""

from __future__ import annotations

import functools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from analysis.findings import sources
from analysis.findings.effects import minus
from benchmarks import clocks
from regimes.base.statistics import t_interval
from regimes.cost.clocks import MeasuredClock, find_clock, read_clocks
from regimes.cost.methods import parse_method

ROOT = Path(__file__).parents[2]
NAMES = {  # of a method, in archives and in the race
    "topk:1": "topk-1",
    "quantise:8": "quantise-8",
    "sign:1": "sign",
    "cast:fp16": "half",
    "dense/4": "every 4",
    "dense/128": "every 128",
}
STEPS = 600  # of these runs
SIZES = {1_639_680: "1800k", 426_624: "460k", 115_008: "115k"}
MEASURED = [(method, clock) for method, found in read_clocks().items() for clock in found]
IDS = [f"{method}, {clock.setting.parameters}, {clock.setting.steps}" for method, clock in MEASURED]


@functools.cache
def losses() -> clocks.Losses:
    return clocks.all_losses()


@functools.cache
def dense() -> tuple[np.ndarray, np.ndarray]:
    """Dense's curve with 115 k parameters: logarithms of steps, and the means in their ends."""
    curve = clocks.Dense.of(losses(), "115k")
    means = [statistics.fmean(ends) for ends in curve.ends]
    return np.log(curve.steps), np.minimum.accumulate(means)


def as_clock(harm: float) -> float:
    """The share of 600 steps after which dense ends so much higher than after all."""
    logs, curve = dense()
    loss = float(np.interp(math.log(STEPS), logs, curve)) + harm
    return math.exp(float(np.interp(-loss, -curve, logs))) / STEPS


def harm_of(method: str, clock: MeasuredClock) -> tuple[float, float, float]:
    """What a method adds to the final loss, from the races or from the records."""
    name, grid = NAMES[method], clock.setting.grid
    if clock.setting.records.endswith("race.jsonl"):
        lines = map(json.loads, (ROOT / clock.setting.records).read_text().splitlines())
        ends: dict[str, dict[int, float]] = {}
        for line in lines:
            if line["stage"] == "race" and (line["link"], line["grid"]) == (1000, grid):
                ends.setdefault(line["entrant"], {})[line["seed"]] = line["loss"][-1]
        found = [ends[name][seed] - ends["dense"][seed] for seed in ends[name]]
    else:
        found = minus(name, "every 1" if grid == "lm-local" else "dense")(sources.records(grid))
    assert len(found) == clock.setting.n
    return t_interval(found)


@pytest.mark.parametrize(("method", "clock"), MEASURED, ids=IDS)
def test_a_clock_is_what_the_records_say(method: str, clock: MeasuredClock) -> None:
    of = clock.setting
    told = (clock.mean, clock.low, clock.high)
    if of.grid:
        mean, low, high = harm_of(method, clock)
        assert told == pytest.approx((as_clock(mean), as_clock(high), as_clock(low)), abs=0.006)
        return
    size = SIZES[of.parameters] + ", sgd" * (of.optimizer == "sgd")
    ends = clocks.best_ends(losses(), size, method, of.steps)
    found = [*clocks.Dense.of(losses(), size).clock(ends, of.steps)]
    assert len(found) == of.n
    assert told == pytest.approx(t_interval(found), abs=0.00051)


@pytest.mark.parametrize("method", read_clocks())
def test_each_method_can_be_written_as_an_option(method: str) -> None:
    assert parse_method(method).clock == find_clock(method)


def test_the_largest_model_with_adamw_is_reckoned_with() -> None:
    found = find_clock("dense/8")
    assert found is not None
    assert (found.setting.parameters, found.setting.optimizer) == (1_639_680, "adamw")
    assert find_clock("randomk:1") is None
