"""Clocks, gaps and choices on their page (oracle: the files of losses and plans, by plain JSON and
numpy: no module of the project)."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = (FOLDER / "clocks.md").read_text()
SHARE = {"115k": 1.0, "460k": 0.5, "1800k": 0.25, "115k, sgd": 1.0, "260k": 0.75}
WORDS = {
    "rank 1": "powersgd:1",
    "rank 2": "powersgd:2",
    "rank 4": "powersgd:4",
    "TopK, 10 %": "topk:10",
    "signs": "sign:1",
    "8 bits": "quantised-all-reduce:8",
    "4 bits": "quantised-all-reduce:4",
    "every 8 steps": "dense/8",
    "every 32 steps": "dense/32",
}


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


@cache
def ends() -> dict[tuple[str, str, int], dict[float, list[float]]]:
    """Losses of all seeds, by size, method and length, then by rate."""
    found: dict = defaultdict(lambda: defaultdict(dict))
    for line in [*lines("plans_losses.jsonl"), *lines("clocks.jsonl")]:
        loss = math.inf if line["loss"] is None else line["loss"]
        found[line["size"], line["method"], line["steps"]][line["rate"]][line["seed"]] = loss
    return {k: {r: [x[s] for s in sorted(x)] for r, x in v.items()} for k, v in found.items()}


def best(size: str, method: str, steps: int) -> tuple[float, list[float]] | None:
    """The rate with the lowest mean of those with three seeds, and their losses."""
    whole = {r: x for r, x in ends().get((size, method, steps), {}).items() if len(x) == 3}
    return min(whole.items(), key=lambda item: sum(item[1])) if whole else None


@cache
def dense(size: str) -> tuple[list[int], np.ndarray]:
    """Lengths, and a row of losses of each seed, which never rise with the length."""
    steps = sorted(n for s, m, n in ends() if (s, m) == (size, "dense") and best(s, m, n))
    found = [best(size, "dense", n) for n in steps]
    curves = np.array([x[1] for x in found if x is not None]).T
    return steps, np.minimum.accumulate(curves, axis=1)


@cache
def clocks(size: str, method: str, length: int) -> tuple[float, ...] | None:
    """Of each seed; nan beyond dense's lengths."""
    steps, curves = dense(size)
    own = round(SHARE[size] * length)
    found = best(size, method, own)
    if found is None:
        return None
    shares, logs = [], np.log(steps)
    for loss, curve in zip(found[1], curves, strict=True):
        if loss > curve[0]:
            shares.append(math.nan)
            continue
        i = next((i for i in range(1, len(curve)) if curve[i] <= loss), len(curve) - 1)
        fall = curve[i - 1] - curve[i]
        at = logs[i - 1] + (curve[i - 1] - loss) / fall * (logs[i] - logs[i - 1])
        shares.append(math.exp(at) / own if at <= logs[-1] + math.log(1.1) else math.nan)
    return tuple(shares)


def test_each_cell_of_the_table_is_what_the_losses_give() -> None:
    seen = 0
    for row in re.findall(r"^\| ([^|]+) \| (300|600|1200) \|(.*)\|$", PAGE, re.M):
        for size, cell in zip(list(SHARE)[:4], row[2].split("|"), strict=True):
            found = clocks(size, WORDS[row[0]], int(row[1]))
            if found is None:
                assert cell.strip() == "-"
            elif not np.isfinite(found).all():
                assert cell.strip() == "<"
            else:
                half = stats.t.ppf(0.975, 2) * np.std(found, ddof=1) / 3**0.5
                told = [float(x) for x in re.findall(r"-?[\d.]+", cell)]
                mean = np.mean(found)
                assert told == pytest.approx([mean, mean - half, mean + half], abs=0.00501)
                seen += 1
    assert seen > 60


def line_at(method: str, sizes: tuple[str, ...], length: float) -> float | None:
    """The clock of one method on a line over the logarithm of the length; two have the product."""
    if method == "dense":
        return 1.0
    if "/" in method and not method.startswith("dense"):
        sent, period = method.split("/")
        parts = [line_at(m, sizes, length) for m in (sent, f"dense/{period}")]
        return None if None in parts else float(np.prod(parts))
    points = [
        (math.log(n), float(np.mean(found)))
        for size in sizes
        for n in (300, 600, 1200)
        if (found := clocks(size, method, n)) is not None and np.isfinite(found).all()
    ]
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return float(min(1.0, y.mean() + slope * (math.log(length) - x.mean())))


def curve_at(size: str, steps: float) -> float:
    """Dense's mean loss after some steps; nan beyond its lengths."""
    known, curves = dense(size)
    if not known[0] <= steps <= known[-1]:
        return math.nan
    return float(np.mean([np.interp(math.log(steps), np.log(known), c) for c in curves]))


def test_gaps_at_the_held_out_size_are_missed_by_what_the_page_says() -> None:
    errors = []
    for words, steps, predicted, measured in re.findall(
        r"^\| ([^|]+) \| (450|900) \| ([+-][\d.]+) \| ([+-][\d.]+) \|$", PAGE, re.M
    ):
        n, found = int(steps), best("260k", WORDS[words], int(steps))
        clock = line_at(WORDS[words], ("115k", "460k"), n / SHARE["260k"])
        assert found is not None
        assert clock is not None
        gap = curve_at("260k", clock * n) - curve_at("260k", n)
        assert float(predicted) == pytest.approx(gap, abs=6e-4)
        assert float(measured) == pytest.approx(np.mean(found[1]) - curve_at("260k", n), abs=6e-4)
        errors.append(gap - np.mean(found[1]) + curve_at("260k", n))
    assert len(errors) == 14
    told = re.search(r"it is ([\d.]+) over 14 gaps", PAGE)
    assert told
    assert float(told[1]) == pytest.approx(np.sqrt(np.mean(np.square(errors))), abs=6e-5)


def truth(size: str, method: str, steps: float, rate: float | None = None) -> float:
    """Mean loss on lines over the logarithm of the steps: at the best rate of each length, or at
    one rate, of all lengths and seeds that have it."""
    points = {}
    for (s, m, n), rates in ends().items():
        if (s, m) == (size, method):
            found = best(s, m, n) if rate is None else (rate, rates.get(rate, []))
            if found and found[1]:
                points[n] = float(np.mean(found[1]))
    grid = sorted(points)
    return float(np.interp(math.log(steps), np.log(grid), [points[n] for n in grid]))


def test_choices_and_their_regrets_are_what_the_page_says() -> None:
    ours, plans, regrets = [], [], defaultdict(list)
    for plan in lines("plans.jsonl"):
        text = plan["situation"]
        seconds = float(re.findall(r" ([\d.]+) s", text)[0])
        size, other = text.split()[0], "460k" if text.startswith("115k") else "115k"
        steps = {m: round(seconds / one) for m, one in plan["seconds"].items()}
        known = {m: line_at(m, (other,), n / SHARE[size]) for m, n in steps.items()}
        known = {m: k for m, k in known.items() if k is not None}
        seen = {m: truth(size, m, n) for m, n in steps.items()}
        chosen = max(known, key=lambda m: known[m] / plan["seconds"][m])
        at = known[chosen] * steps[chosen]
        lengths, _ = dense(size)
        near = min(lengths, key=lambda n: abs(math.log(n / at)))
        rate = best(size, "dense", near)
        assert rate is not None
        end = truth(size, chosen, steps[chosen], rate[0])
        regrets["ours"].append(end - min(seen.values()))
        regrets["ours at best"].append(seen[chosen] - min(seen.values()))
        regrets["plan at best"].append(seen[plan["chosen"]] - min(seen.values()))
        regrets["dense"].append(seen["dense"] - min(seen.values()))
        row = re.search(rf"^\| {re.escape(text)} \| {re.escape(chosen)} \|.*\|$", PAGE, re.M)
        assert row, text
        if size == "115k" or "own" in text:
            continue
        for line in plan["rows"]:
            m = line["method"]
            gap = curve_at(size, known[m] * steps[m]) - curve_at(size, steps["dense"])
            if m != "dense" and math.isfinite(gap):
                ours.append(gap - seen[m] + seen["dense"])
                plans.append(line["loss"] - seen[m] + seen["dense"])
    told = re.search(
        r"n = (\d+): the clocks' rms error is ([\d.]+) bits, the plans' ([\d.]+)\.", PAGE
    )
    assert told
    assert int(told[1]) == len(ours) == 29
    for text, errors in zip(told.groups()[1:], (ours, plans), strict=True):
        assert float(text) == pytest.approx(np.sqrt(np.mean(np.square(errors))), abs=6e-4)
    means = re.search(r"^\| mean of 15 \|  \|  \| (.*) \|$", PAGE, re.M)
    assert means
    cells = [float(x) for x in means[1].split(" | ")]
    columns = {"ours at best": 0, "ours": 1, "plan at best": 2, "dense": 4}
    for who, column in columns.items():
        assert cells[column] == pytest.approx(np.mean(regrets[who]), abs=6e-4), who


def test_speeds_in_the_race_are_what_the_page_says() -> None:
    """On the links on which whole trainings were raced."""
    names = {**WORDS, "4 bits every 8": "quantised-all-reduce:4/8"}
    names |= {"every 8": "dense/8", "every 32": "dense/32"}
    runs: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for line in lines("race.jsonl"):
        if (line["stage"], line.get("grid", "race-lm")) == ("race", "race-lm") and sum(
            line["steps"]
        ) == 600:
            time = [0.0, *np.cumsum(line["seconds"])]
            below = next((i for i, loss in enumerate(line["loss"]) if loss <= 3), None)
            if below is not None:
                before = 8.0 if below == 0 else line["loss"][below - 1]
                share = (before - 3) / (before - line["loss"][below])
                until = time[below] + share * (time[below + 1] - time[below])
                runs[line["link"], line["entrant"]].append((until, time[-1] / 600))
    seen = 0
    for link, entrant, predicted, measured in re.findall(
        r"^\| 115 k \| (100|1000) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M
    ):
        until, step = np.mean(runs[int(link), entrant], axis=0)
        plain, other = np.mean(runs[int(link), "DDP"], axis=0)
        clock = line_at(names[entrant], ("115k",), 600)
        assert clock is not None
        assert float(measured) == pytest.approx(plain / until, abs=0.0051)
        assert float(predicted) == pytest.approx(clock * other / step, abs=0.0051)
        seen += 1
    assert seen == 12
