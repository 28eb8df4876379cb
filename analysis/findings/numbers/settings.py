"""Numbers of several trees of pulses at once, and of groups of layers, for the templates."""

from __future__ import annotations

import functools

import pandas as pd

from ...criticality import layers, settings
from ..sources import number, record_read, records
from ..values import Interval, mean_of


def _split(sources: str) -> list[tuple[str, str]]:
    """Archives and arms of "ARCHIVE; ARCHIVE: ARM"."""
    parts = [words.partition(": ") for words in sources.split("; ")]
    for name, _, _ in parts:
        record_read(f"{name}.tar.xz")
    return [(name, arm or settings.ARM) for name, _, arm in parts]


@functools.cache
def _tree(name: str, arm: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    return settings.of_tree(name, records(name), arm)


def _scored(sources: str) -> pd.DataFrame:
    parts = [_tree(*each)[1] for each in _split(sources)]
    return settings.over_trees(pd.concat([p for p in parts if len(p)], ignore_index=True))


@number
def settings_table(sources: str, which: int) -> str:
    """A table with a row for each tree and arm.

    Args:
        which: 0: harm by phase of the learning rate; 1: rank correlations of signals with harm; 2:
            areas under the ROC curve for the worst third.
    """
    harms = pd.concat([_tree(*each)[0] for each in _split(sources)], ignore_index=True)
    return settings.tables(harms, _scored(sources))[which].markdown()


@number
def settings_above(sources: str, signal: str) -> int:
    """In how many of the settings a signal's rank correlation has an interval above 0."""
    rows = _scored(sources)
    return int((rows.loc[rows["signal"] == signal, "rank_low"] > 0).sum())


@number
def settings_open(sources: str, signal: str) -> int:
    """In how many of the settings a signal's rank correlation has an interval with 0 in it."""
    rows = _scored(sources)
    rows = rows[rows["signal"] == signal]
    return int(((rows["rank_low"] <= 0) & (rows["rank_high"] >= 0)).sum())


@number
def settings_fallen(sources: str) -> list[int]:
    """In how many of the settings whose rate falls the mean harm after its fall is below that in
    the middle of the high rate, and in how many it could be."""
    both = []
    for each in _split(sources):
        harm = _tree(*each)[0].set_index("phase")["harm"]
        if harm[settings.FALLEN] == harm[settings.FALLEN]:  # not nan
            both.append(bool(harm[settings.FALLEN] < harm[settings.HIGH]))
    return [sum(both), len(both)]


@functools.cache
def _layers(source: str) -> pd.DataFrame:
    return layers.scores(layers.pulses(records(source)))


@number
def layers_table(source: str) -> str:
    """How well signals of a group of layers rank pulses in these groups by harm."""
    record_read(f"{source}.tar.xz")
    return layers.table_of(_layers(source)).markdown()


@number
def layers_rank(source: str, signal: str, column: str) -> Interval:
    """Rank correlation with harm of a group's signal: over "all" pulses, "when" or "where"."""
    record_read(f"{source}.tar.xz")
    return mean_of(_layers(source).query("signal == @signal")[column].dropna().to_list())
