"""Differences between arms of the committed records, their rates, and the tables of
``docs/how-to/start.md`` (oracles: the archives' lines and trials, read without Regimes, and scipy;
the lines that the machines printed)."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from statistics import fmean, stdev

import pandas as pd
import pytest
import scipy.stats
from archives import Rows, rows_of

import regimes
from analysis.common import compare
from analysis.findings.effects import minus
from analysis.findings.numbers import NUMBERS, detection, differences, pulses
from analysis.findings.numbers.differences import effect
from analysis.findings.sources import REFERENCE, records, trials
from analysis.paper import figure3
from regimes.base.statistics import correct_by_holm, p_value
from regimes.cost.cases import make_cases
from regimes.plotting.groups import compressed_layers
from regimes.records import load_all, unpack_records

WHOLE, SHORT, MOMENTUM = "cifar10-resnet20", "paper-cifar10-short", "momentum-lm"
MACHINES = Path(__file__).parents[2] / "benchmarks" / "gpu"
FOUR = [f"{level}, beta1 {beta}" for beta in ("0", "0.9") for level in ("rank 1", "dense")]


def end(rows: Rows) -> float:
    """Mean of the tests after the last three epochs."""
    return fmean([row["metric"] for row in rows[-3:] if row["metric"] is not None])


def by_seed(source: str, arm: str) -> dict[int, Rows]:
    return {seed: rows for (name, seed), rows in sorted(rows_of(source).items()) if name == arm}


@pytest.mark.parametrize(
    ("source", "a", "b", "seeds"),
    [
        (WHOLE, "accordion", "rank 4", 3),
        (WHOLE, "rank 1 at 0.4", "rank 4", 1),
        (SHORT, "rank 2 short at 0.4", "rank 1 short at 0.4", 2),  # the first has three
    ],
)
def test_differences_and_floats_are_those_of_the_rows(
    source: str, a: str, b: str, seeds: int
) -> None:
    """Not all of the last epochs have a test; a seed that only one arm has is left out."""
    ours, theirs = by_seed(source, a), by_seed(source, b)
    common = sorted(ours.keys() & theirs.keys())
    gaps = [100 * (end(ours[seed]) - end(theirs[seed])) for seed in common]
    assert len(gaps) == seeds
    assert differences.effect_by_seed(source, a, b) == pytest.approx(gaps, rel=1e-9)
    if seeds > 2:
        interval = scipy.stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
        found = differences.effect(source, a, b)
        expected = (fmean(gaps), interval.low, interval.high)
        assert (found.mean, found.low, found.high) == pytest.approx(expected, rel=1e-9)
    sent = [[sum(row["floats"] for row in of[s]) for s in common] for of in (ours, theirs)]
    shares = [x / y for x, y in zip(*sent, strict=True)]
    assert differences.floats_of(source, a, b) == pytest.approx(fmean(shares), rel=1e-9)


def test_a_difference_in_an_epoch_is_that_of_the_rows() -> None:
    ours, theirs = by_seed(SHORT, "accordion 4-1"), by_seed(SHORT, "rank 4")
    gaps = [100 * (ours[s][9]["metric"] - theirs[s][9]["metric"]) for s in (1, 2, 3)]
    found = differences.effect_in_epoch(SHORT, "accordion 4-1", "rank 4", 9)
    assert (found.n, found.mean) == (3, pytest.approx(fmean(gaps), rel=1e-9))


@pytest.mark.parametrize("gone", [{}, {(FOUR[0], 9000), (FOUR[3], 9005)}], ids=["all", "some"])
def test_a_difference_of_differences_is_of_the_seeds_that_all_have(
    gone: set[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two lack seed 9000, the other two 9005; as many are left of either."""
    runs = [run for run in records(MOMENTUM) if (run.name, run.seed) not in gone]
    monkeypatch.setattr(differences, "pooled", lambda *_: tuple(runs))
    seeds = range(9001, 9005) if gone else range(9000, 9006)
    ends = [[end(by_seed(MOMENTUM, arm)[seed]) for seed in seeds] for arm in FOUR]
    values = [a - b - (c - d) for a, b, c, d in zip(*ends, strict=True)]
    found = differences.difference_of_differences(MOMENTUM, *FOUR)
    assert (found.mean, found.n) == (pytest.approx(fmean(values), rel=1e-9), len(values))


def test_harms_of_other_seeds_are_not_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    harms = [
        {"arm": "rank 1", "onset": onset, "seed": seed, "harm": 0.1 * seed}
        for onset, seeds in ((6, (1, 2, 3)), (9, (2, 3, 4)))
        for seed in seeds
    ]
    monkeypatch.setattr(pulses, "_tabulate_harms", lambda _: pd.DataFrame(harms))
    for call, words in (
        (pulses.harm_between, ("rank 1", 6, 9)),
        (pulses.harms_added, ("rank 1 from 6", "rank 1 from 9")),
        (pulses.harm_pooled, ("rank 1", 6, 9)),
    ):
        with pytest.raises(ValueError, match="not in pairs"):
            call("harm-lm", *words)
    with pytest.raises(ValueError, match='no level "low"'):
        differences.of_low(MOMENTUM, "rank 1, beta1 0")


def test_every_run_that_a_machine_has_ended_is_in_the_archive_once() -> None:
    ended = {
        row["name"]: (pytest.approx(row["metric"], rel=1e-12), row["floats"], row["epochs"])
        for file in sorted(MACHINES.glob("*.jsonl"))
        for row in map(json.loads, file.read_text().splitlines())
        if row["part"] == "setting" and row["ok"]
    }
    kept = {}
    for (name, seed), rows in rows_of(SHORT).items():
        tests = [row["metric"] for row in rows if row["metric"] is not None]
        sent = sum(row["floats"] for row in rows)
        kept[f"{name}/seed-{seed}"] = (fmean(tests[-3:]), sent, len(rows))
    assert kept == ended


def test_a_replay_departs_where_accordion_did() -> None:
    """Each of these runs replays, on its own norms, the levels that it sent."""
    sent = []
    for run in (run for run in records(SHORT) if run.name == "accordion 4-1"):
        names = [layer["name"] for layer in compressed_layers(run)]
        rows = run.layers[run.layers["layer"].isin(names)]
        low = (rows["level"] == "r4").groupby(rows["epoch"]).all()
        sent.append(int(low.cumprod().sum()))
    assert detection.low_from_start(SHORT, "accordion 4-1", 1) == min(sent)
    assert detection.low_from_start(SHORT, "accordion 4-1", 20) == 20  # never asked: low throughout


def test_the_runs_of_a_code_are_counted() -> None:
    assert differences.runs_of_code(SHORT, "c4d21fc3fc7a") == 10
    assert differences.runs_of_code(SHORT, "") == len(records(SHORT))


def test_figure_3_finds_low_compression_under_its_name_in_a_tournament() -> None:
    found = figure3.only_measured(compare.schedules(list(records(WHOLE))), "low")
    by_hand = by_seed(WHOLE, "rank 4")
    low = {run.seed: run.rows[-1]["metric"] for run in found if run.name == "low"}
    assert low == {seed: rows[-1]["metric"] for seed, rows in by_hand.items()}


# -- learning rates of arms that have their own: chosen by trials --------------------------

TUNED = (
    *("lm-start", "lm-local", "lm-local-sgd", "small-local", "ladder-115k", "momentum-lm"),
    *("falling-lm", "falling-lm-cosine", "falling-lm-constant", "falling-wikitext"),
)


@pytest.mark.parametrize("source", TUNED)
def test_an_arm_has_the_rate_of_its_best_mean_score_of_other_seeds(source: str) -> None:
    best = max if source == "small-local" else min
    tried: dict[str, dict[float, float]] = {}
    for row in trials(source):
        tried.setdefault(row["schedule"], {})[row["rate"]] = fmean(row["scores"])
    with unpack_records(REFERENCE / f"{source}.tar.xz") as root:
        configs = [json.loads(path.read_text())["config"] for path in root.rglob("run.json")]
    rates = {config["name"]: config["optimizer"]["lr"] for config in configs}
    common = tried.keys() & rates.keys()
    assert len(common) > 2
    for arm in common:
        assert rates[arm] == best(tried[arm], key=tried[arm].__getitem__), arm
    for config in configs:
        assert config["seed"] not in {1000, 1001, 1002, 1003, *config.get("tuned_on", ())}


def test_choices_of_all_trials_are_counted() -> None:
    """By own code over the files of trials: in all, at an end, near another rate."""
    total = ends = near = several = 0
    for path in REFERENCE.glob("*-tune.json"):
        text = json.loads(path.read_text())
        for arm, words in text["chosen"].items():
            rate = words.split("=")[1]
            mine = [row for row in text["trials"] if row["schedule"] == arm]
            rates = sorted(float(row["values"].split("=")[1]) for row in mine)
            own = next(r["scores"] for r in mine if float(r["values"].split("=")[1]) == float(rate))
            total += 1
            ends += float(rate) in (rates[0], rates[-1])
            several += len(own) > 1
            away = [abs(fmean(r["scores"]) - fmean(own)) for r in mine if r["scores"] is not own]
            near += len(own) > 1 and min(away, default=math.inf) <= stdev(own)
    wanted = {"all": total, "ends": ends, "several_seeds": several, "near": near}
    assert NUMBERS["choices_counted"]() == wanted
    counted = re.findall(r"` (\d+) of", NUMBERS["choices_at_an_end"]())
    assert sum(map(int, counted)) == ends


# -- the tables of ``docs/how-to/start.md`` ------------------------------------------------

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "start.md"
ROWS = {
    "PowerSGD, rank 4": "powersgd-4",
    "PowerSGD, rank 1": "powersgd-1",
    "PowerSGD, rank 1 after a dense tenth": "powersgd-1-after-10",
    "TopK, 10 %": "topk-10",
    "TopK, 1 %": "topk-1",
    "TopK, 1 % after a dense tenth": "topk-1-after-10",
    "quantise, 8 bits": "quantise-8",
    "quantise, 4 bits": "quantise-4",
    "sign": "sign",
}


NOT_RUN = ("lm-start", "quantise, 4 bits")


def bytes_of_dense(source: str, name: str) -> float:
    totals: dict[str, float] = {}
    for run in records(source):
        totals[run.name] = totals.get(run.name, 0.0) + sum(row["bytes"] for row in run.rows)
    return totals[name] / totals["dense"]


@pytest.mark.parametrize(
    ("source", "row"),
    [(s, r) for s in ("smoke-start", "lm-start") for r in ROWS if (s, r) != NOT_RUN],
)
def test_a_row_is_what_the_records_say(source: str, row: str) -> None:
    name = ROWS[row]
    (rate,) = {r.config["optimizer"]["lr"] for r in records(source) if r.name == name}
    difference = effect(source, name, "dense").text(1 if source == "smoke-start" else 2, sign=True)
    words = f"| {row} | {rate} | {difference} | {100 * bytes_of_dense(source, name):.0f} % |"
    assert words in PAGE.read_text(encoding="utf-8"), words


def test_which_compressors_beat_which() -> None:
    """After Holm's correction one pair of compressed rows holds."""
    runs = records("smoke-start")
    pairs = [*itertools.combinations(ROWS.values(), 2)]
    values = dict(
        zip(pairs, correct_by_holm([p_value(minus(*pair)(runs)) for pair in pairs]), strict=True)
    )
    assert [pair for pair, p in values.items() if p < 0.05] == [("powersgd-1", "quantise-8")]
    assert effect("smoke-start", "quantise-8", "powersgd-1").low > 0


def test_a_user_gets_the_same_differences_from_the_archive() -> None:
    """Dense, ranks, TopK, signs and rounding are arms of one comparison, with one command."""
    archive = ROOT / "data/reference/smoke-start.tar.xz"
    compared = regimes.compare(archive, baseline="dense").set_index("comparison")
    assert {*compared.index} == {f"{name} - dense" for name in ROWS.values()}
    for name in ROWS.values():
        row, known = compared.loc[f"{name} - dense"], effect("smoke-start", name, "dense")
        near = {"abs": 0.0005 * (known.high - known.low) / 2}  # to which a table is rounded
        assert row["difference"] == pytest.approx(known.mean, **near)
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((known.low, known.high), **near)
        assert row["unit"] == "points"


def test_the_cost_of_several_compressors_has_the_levels_of_each() -> None:
    cases = make_cases(load_all(ROOT / "data/reference/smoke-start.tar.xz"))
    levels = [case.name for case in cases if not case.runs]
    assert levels.count("dense") == 1
    assert {"powersgd high (1)", "topk high (1)", "quantise low (8)", "sign high (1)"} < {*levels}
    assert {*ROWS.values()} < {case.name for case in cases if case.runs}
