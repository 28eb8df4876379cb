"""A schedule derived from harm, compared with others at its floats: numbers for templates."""

from __future__ import annotations

import pandas as pd

from ...common.names import LADDERS
from ...criticality import schedule
from ...tournament.equal_floats import at_same_floats
from ..sources import entries, number, records
from ..values import Interval, over_common_seeds


def _of_one_rank(source: str, arm: str) -> pd.Series[float]:
    """An arm minus one rank throughout at its floats, by seed."""
    runs, metric = entries(source)
    return at_same_floats(runs, arm, LADDERS["static"], metric.name)


@number
def beside_one_rank(source: str, arm: str, *others: str) -> Interval:
    """An arm minus the mean of others, each minus one rank throughout at its own floats."""
    rest = pd.concat([_of_one_rank(source, other) for other in others], axis=1)
    return over_common_seeds(_of_one_rank(source, arm) - rest.mean(axis=1, skipna=False))


@number
def gain_beyond_half(source: str, arm: str, other: str) -> Interval:
    """By how much an arm's gain over one rank exceeds half of another's."""
    return over_common_seeds(_of_one_rank(source, other) / 2 - _of_one_rank(source, arm))


@number
def harm_predicted(tree: str, source: str, arm: str) -> float:
    """The sum of harm of the pulses outside an arm's windows of rank 4, in the tree's unit."""
    (windows,) = {
        str(run.config["policy"]["windows"]): [(a, b) for a, b in run.config["policy"]["windows"]]
        for run in records(source)
        if run.name == arm
    }.values()
    return schedule.predicted(_pulses(tree), windows)


@number
def windows_of_harm(tree: str, units: int) -> list[list[int]]:
    """The units of rank 4 that harm proposes."""
    return [[*window] for window in schedule.best(_pulses(tree), units)]


def _pulses(tree: str) -> pd.DataFrame:
    return schedule.pulses(records(tree), "rank 1")
