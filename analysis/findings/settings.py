"""Numbers of several trees of pulses at once, and of groups of layers, for the templates."""

from __future__ import annotations

import functools

import pandas as pd

from ..criticality import layers, settings
from .sources import note, number, records, row_of
from .values import Interval, mean_of

BETWEEN = "; "  # names of archives


def _names(sources: str) -> list[str]:
    names = sources.split(BETWEEN)
    for name in names:
        note(f"{name}.tar.xz")
    return names


@functools.cache
def _trees(sources: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    parts = [settings.of_tree(n, records(n), settings.ARM) for n in sources.split(BETWEEN)]
    scored = pd.concat([part[1] for part in parts if len(part[1])], ignore_index=True)
    return pd.concat([part[0] for part in parts], ignore_index=True), settings.over_trees(scored)


@number
def settings_table(sources: str, which: int) -> str:
    """Of trees of pulses, a row each: 0: harm by phase of the learning rate; 1: rank correlations
    of signals with harm; 2: areas under the ROC curve for the worst third."""
    _names(sources)
    return settings.tables(*_trees(sources))[which].markdown()


@number
def over_settings(sources: str, signal: str, column: str) -> Interval:
    """Mean over trees of a signal's rank correlation with harm ("rank") or its area ("auc"); the
    interval is that over trees."""
    _names(sources)
    row = row_of(_trees(sources)[1], setting=settings.ALL, signal=signal)
    return Interval(row[column], row[f"{column}_low"], row[f"{column}_high"], int(row["n"]))


@number
def settings_best(sources: str, signal: str) -> int:
    """In how many of the trees a signal has the highest mean rank correlation of all signals."""
    _names(sources)
    rows = _trees(sources)[1]
    rows = rows[rows["setting"] != settings.ALL].dropna(subset="rank")
    best = rows.loc[rows.groupby("setting")["rank"].idxmax(), "signal"]
    return int((best == signal).sum())


@functools.cache
def _layers(source: str) -> pd.DataFrame:
    return layers.scores(layers.pulses(records(source)))


@number
def layers_table(source: str) -> str:
    """How well signals of a group of layers rank pulses in these groups by harm."""
    note(f"{source}.tar.xz")
    return layers.table_of(_layers(source)).markdown()


@number
def layers_rank(source: str, signal: str, column: str) -> Interval:
    """Rank correlation with harm of a group's signal: over "all" pulses, "when" or "where"."""
    note(f"{source}.tar.xz")
    return mean_of(_layers(source).query("signal == @signal")[column].dropna().to_list())
