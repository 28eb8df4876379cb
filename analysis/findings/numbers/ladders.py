"""Ranks that fall with the learning rate, and local steps: numbers for templates."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ..sources import entries, number, records
from ..values import Interval, mean_of, over_common_seeds

STATIC = ["rank 1", "rank 2", "rank 3"]


def _wide(source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Bits and the logarithm of floats, a row per seed and a column per arm."""
    runs, metric = entries(source)
    values, floats = (
        runs.pivot(index="seed", columns="name", values=x) for x in (metric.name, "floats")
    )
    return values, floats.map(math.log)


@number
def of_a_parabola(source: str, arm: str) -> Interval:
    """Minus what a parabola through ranks 1, 2 and 3 has at the arm's floats."""
    values, logs = _wide(source)

    def at_its_floats(seed: int) -> float:
        x, y = logs.loc[seed, STATIC].to_numpy(float), values.loc[seed, STATIC].to_numpy(float)
        return float(np.polyval(np.polyfit(x, y, 2), float(logs[arm][seed])))

    return mean_of([float(values.loc[seed, arm]) - at_its_floats(seed) for seed in values.index])


@number
def rank_2_of_a_line(source: str) -> Interval:
    """Rank 2 minus the straight line through ranks 1 and 3."""
    values, logs = _wide(source)
    share = (logs["rank 2"] - logs["rank 1"]) / (logs["rank 3"] - logs["rank 1"])
    line = values["rank 1"] + share * (values["rank 3"] - values["rank 1"])
    return mean_of((values["rank 2"] - line).to_list())


@number
def minus_mean(source: str, arm: str, *others: str) -> Interval:
    """An arm minus the mean of others, over the seeds that all of them have."""
    values = _wide(source)[0]
    return over_common_seeds(values[arm] - values[[*others]].mean(axis=1, skipna=False))


@number
def changed_difference(constant: str, falling: str) -> Interval:
    """(early - late) at a constant rate, minus (rate 2-1 - late) where the rate falls."""
    still, falls = _wide(constant)[0], _wide(falling)[0]
    both = (still["early 2-1"] - still["late 2-1"]) - (falls["rate 2-1"] - falls["late 2-1"])
    return over_common_seeds(both)


@number
def highest_without(source: str, seed: int, *arms: str) -> float:
    """The worst run of some arms, without one seed."""
    return float(_wide(source)[0].drop(seed)[[*arms]].max().max())


@number
def mean_ranks(source: str, arm: str) -> list[float]:
    """The mean rank over compressed layers and seeds, unit by unit."""
    ranks = []
    for run in records(source):
        if run.name == arm:
            rows = run.layers[run.layers["level"] != "dense"]
            ranks.append(rows["level"].str[1:].astype(int).groupby(rows["epoch"]).mean())
    return [float(x) for x in pd.concat(ranks, axis=1).mean(axis=1)]


@number
def synchronisations(source: str, arm: str) -> int:
    """Synchronisations in a run of an arm, equal for every seed."""
    (count,) = {
        sum(row["sync"]["rounds"] for row in run.rows) for run in records(source) if run.name == arm
    }
    return int(count)
