"""Learning rates that were chosen on held-out data: what arms score at equal rates, and which
choices another rate would do as well for. For templates."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

from regimes.console.tables import Table
from regimes.plotting.looks import named

from ..sources import number, record_read


def _read(path: Path) -> tuple[dict[str, float], dict[str, dict[float, list[float]]], str]:
    """The chosen rate of each arm, the scores of its trials by rate, and the metric."""
    found = json.loads(record_read(path.name).read_text(encoding="utf-8"))
    tried: dict[str, dict[float, list[float]]] = {}
    for row in found["trials"]:
        rate = float(row["values"].rpartition("=")[2])
        tried.setdefault(row["schedule"], {})[rate] = row["scores"]
    chosen = {arm: float(words.rpartition("=")[2]) for arm, words in found["chosen"].items()}
    return chosen, tried, found["metric"]


def _every() -> dict[str, tuple[dict[str, float], dict[str, dict[float, list[float]]], str]]:
    pattern = record_read("*-tune.json")
    paths = sorted(pattern.parent.glob(pattern.name))
    return {path.name.removesuffix("-tune.json"): _read(path) for path in paths}


def has_trials(source: str) -> bool:
    return record_read(f"{source}-tune.json").exists()


def trial_seeds(source: str) -> int:
    """With how many seeds each rate was tried."""
    chosen, tried, _ = _read(record_read(f"{source}-tune.json"))
    return max(len(scores) for arm in chosen for scores in tried[arm].values())


@number
def equal_rates_table(source: str) -> str:
    """The mean score of each arm on held-out data at each rate that it was tried at, the chosen one
    in bold."""
    chosen, tried, metric = _read(record_read(f"{source}-tune.json"))
    shown = named(metric)
    rates = sorted({rate for arm in chosen for rate in tried[arm]})
    digits = shown.digits if shown.factor != 1 else 2

    def cell(arm: str, rate: float) -> str:
        if rate not in tried[arm]:
            return ""
        text = f"{shown.factor * fmean(tried[arm][rate]):.{digits}f}"
        return f"**{text}**" if rate == chosen[arm] else text

    rows = [[arm, *(cell(arm, rate) for rate in rates)] for arm in chosen]
    return Table(["arm", *(f"{rate:g}" for rate in rates)], rows).markdown()


def near(scores: dict[float, list[float]], rate: float) -> bool:
    """Is another rate's mean score within one sd, over seeds, of that of the chosen rate?"""
    own = scores[rate]
    if len(own) < 2:
        return False
    others = (fmean(values) for other, values in scores.items() if other != rate)
    return any(abs(other - fmean(own)) <= stdev(own) for other in others)


@number
def choices_counted() -> dict[str, int]:
    """All committed choices of a rate: how many; at an end of the list that was tried; of several
    seeds; with another rate within one sd."""
    every = [
        (arm, chosen[arm], tried[arm]) for chosen, tried, _ in _every().values() for arm in chosen
    ]
    return {
        "all": len(every),
        "ends": sum(rate in (min(tried), max(tried)) for _, rate, tried in every),
        "several_seeds": sum(len(tried[rate]) > 1 for _, rate, tried in every),
        "near": sum(near(tried, rate) for _, rate, tried in every),
    }


@number
def ends_table() -> str:
    """The arms that chose an end of their list, by records."""
    rows: list[list[str]] = []
    for source, (chosen, tried, _) in _every().items():
        ends = [arm for arm in chosen if chosen[arm] in (min(tried[arm]), max(tried[arm]))]
        if ends:
            rows.append([source, str(len(chosen)), f"{len(ends)}: {'; '.join(ends)}"])
    return Table(["records", "choices", "at an end"], rows, texts=1, ends=1).markdown()
