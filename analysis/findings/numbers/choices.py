"""Learning rates that were chosen on held-out data, and which choices another rate would do as well
for. For templates."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

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


def near(scores: dict[float, list[float]], rate: float) -> bool:
    """Is another rate's mean score within one sd, over seeds, of the chosen rate's?"""
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
def choices_at_an_end() -> str:
    """How many arms of each archive chose an end of their list."""
    found = []
    for source, (chosen, tried, _) in _every().items():
        ends = sum(chosen[arm] in (min(tried[arm]), max(tried[arm])) for arm in chosen)
        found += [f"`{source}` {ends} of {len(chosen)}"] if ends else []
    return ", ".join(found)
