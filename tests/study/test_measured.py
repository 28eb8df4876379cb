"""``cost/measured.toml``, on which `regimes cost` rests its advice (oracles: the committed records
and races, computed again, and the pages that it cites)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from analysis.findings import sources
from analysis.findings.effects import minus
from benchmarks import race_report
from regimes.cost.evidence import HARMFUL, HARMLESS, AddedLoss, read_harms, worst_verdict
from regimes.cost.methods import parse_method
from regimes.statistics import t_interval

ROOT = Path(__file__).parents[2]
NAMES = {  # of a method, in archives and in the race
    "powersgd:4": ("powersgd-4", "rank 4"),
    "powersgd:2": ("rank 2",),
    "powersgd:1": ("powersgd-1", "rank 1"),
    "topk:10": ("topk-10",),
    "topk:1": ("topk-1",),
    "quantise:8": ("quantise-8",),
    "quantise:4": ("quantise-4",),
    "sign:1": ("sign",),
    "cast:fp16": ("half",),
    "quantised-all-reduce:8": ("8 bits",),
    "quantised-all-reduce:4": ("4 bits",),
    "dense/4": ("every 4",),
    "dense/8": ("every 8",),
    "dense/32": ("every 32",),
    "dense/128": ("every 128",),
    "quantised-all-reduce:4/8": ("4 bits every 8",),
}
PRINTED = re.compile(
    r"[+-]?(\d\.\d+)(?: bits per byte more than each step, | points \*above\*)? "
    r"\[[+-]?(\d\.\d+), [+-]?(\d\.\d+)\]"
)
BASES = {"small-local": "every 1", "lm-local": "every 1"}
HARMS = [(method, harm) for method, harms in read_harms().items() for harm in harms]
IDS = [f"{method}, {harm.setting.records}, {harm.setting.parameters}" for method, harm in HARMS]


@functools.cache
def races() -> Mapping[tuple[str, str], dict[int, float]]:
    """Loss at the end by grid and entrant, of the whole races at 1000 Mbit/s."""
    ends: dict[tuple[str, str], dict[int, float]] = {}
    for text in (ROOT / "benchmarks/race.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["stage"] == "race" and line["link"] == 1000:
            place = ends.setdefault((line["grid"], line["entrant"]), {})
            place[line["seed"]] = line["loss"][-1]
    return ends


def again(method: str, harm: AddedLoss) -> tuple[float, float, float]:
    """The harm from the races, or from the records."""
    source = harm.setting.grid
    if harm.setting.records.endswith("race.jsonl"):
        (name,) = {x for x in NAMES[method] if (source, x) in races()}
        one, dense = races()[source, name], races()[source, "dense"]
        assert len(one) == harm.setting.n
        return t_interval([one[seed] - dense[seed] for seed in one])
    assert source in harm.setting.records
    runs = sources.records(source)
    (name,) = {run.name for run in runs}.intersection(NAMES[method])
    sign = -1 if harm.setting.unit == "points" else 1  # fewer points are a harm
    harms = [sign * x for x in minus(name, BASES.get(source, "dense"))(runs)]
    assert len(harms) == harm.setting.n
    return t_interval(harms)


@pytest.mark.parametrize(("method", "harm"), HARMS, ids=IDS)
def test_a_harm_and_its_verdict_are_what_the_records_say(method: str, harm: AddedLoss) -> None:
    """A verdict of rounded numbers may be another one."""
    expected = again(method, harm)
    assert (harm.mean, harm.low, harm.high) == pytest.approx(expected, abs=0.00051)
    assert harm.verdict == AddedLoss(harm.setting, *expected).verdict


@pytest.mark.parametrize(("method", "harm"), HARMS, ids=IDS)
def test_its_page_prints_it(method: str, harm: AddedLoss) -> None:
    """The mean and the interval, or in race.md the two losses of which it is the difference."""
    text = (ROOT / harm.setting.page).read_text(encoding="utf-8").replace("\n  ", " ")
    if harm.setting.page.endswith("race.md"):
        size = race_report.PARAMETERS[harm.setting.grid]
        part = text.partition(f"## {size} parameters, 1000 Mbit/s")[2].partition("\n## ")[0]
        names = [x for x in NAMES[method] if f"| {x} |" in part]
        ends = [
            float(
                next(x for x in part.splitlines() if x.startswith(f"| {name} |")).split("|")[5][:6]
            )
            for name in (*names, "dense")
        ]
        assert harm.mean == pytest.approx(ends[0] - ends[1], abs=0.0016)
        return
    form = ".1f" if harm.setting.unit == "points" else ".2f"
    numbers = {f"{abs(x):{form}}" for x in (harm.mean, harm.low, harm.high)}
    assert any({a, b, c} == numbers for a, b, c in PRINTED.findall(text)), numbers


@pytest.mark.parametrize("method", read_harms())
def test_each_method_can_be_written_as_an_option(method: str) -> None:
    assert parse_method(method).verdict == worst_verdict(method)


def test_what_the_page_of_advice_measures_as_harmful_is_not_recommended() -> None:
    for method in ("powersgd:1", "powersgd:4", "topk:1", "topk:10", "sign:1", "dense/32"):
        assert worst_verdict(method) == HARMFUL
    for method in ("cast:fp16", "quantised-all-reduce:8", "quantised-all-reduce:4", "quantise:8"):
        assert worst_verdict(method) == HARMLESS
