"""Curves of harm by onset, how alike the seeds' curves are, and recovery, from records.

Words and the harms themselves: `measured`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.statistics import p_value

from ..common.estimates import estimate
from ..common.paired import compare
from .measured import is_null

ONSETS = 4  # an arm with fewer is not scored


# -- numbers ---------------------------------------------------------------------------------


def curve(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per arm and onset: n, harm and its 95 % t interval, p, p_holm (of all rows; Holm
    1979), after (mean), left, without (mean of the trunk's metric).

    Args:
        runs: of `by_run`.
    """
    groups: dict[Any, pd.DataFrame] = dict([*runs.groupby(["arm", "onset"], sort=False)])
    # `compare` has rows of (arm, control); the onset takes the control's place
    table = compare({(arm, str(at)): part["harm"].to_list() for (arm, at), part in groups.items()})
    table = table.rename(columns={"control": "onset", "difference": "harm"})
    table = table.astype({"onset": int})
    more = [
        {
            "after": part["after"].mean(),
            "left": part["left"].max(),
            "without": part["without"].mean(),
        }
        for part in groups.values()
    ]
    return pd.concat([table, pd.DataFrame(more)], axis=1)


def recovery(units: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, onset and unit: n, harm and its 95 % t interval over seeds."""
    rows = []
    for (arm, onset, unit), part in units.groupby(["arm", "onset", "unit"], sort=False):
        values = part["harm"].to_list()
        names = {"arm": arm, "onset": onset, "unit": unit, "n": len(values)}
        rows.append(names | estimate(values, "harm", alone=True))
    return pd.DataFrame(rows)


# -- reliability -----------------------------------------------------------------------------


def reliability(table: pd.DataFrame) -> tuple[float, float]:
    """(reliability of the mean curve, spread of one value), of harm by seed (rows) and onset.

    In a two-way layout, (mean square between onsets - residual mean square) / mean square between
    onsets: ICC(3, k) of Shrout and Fleiss (1979), k seeds. 1: all seeds have one curve but for a
    constant; 0 or less: the onsets differ no more than by chance. The spread is the root of the
    residual mean square. nan for fewer than two seeds or onsets; seeds that lack one are left out.
    """
    values = table.dropna().to_numpy(float)
    seeds, onsets = values.shape
    if seeds < 2 or onsets < 2:
        return math.nan, math.nan
    means = values.mean(0)
    between = seeds * float(np.var(means, ddof=1))
    rest = values - means - values.mean(1, keepdims=True) + values.mean()
    residual = float((rest**2).sum()) / ((seeds - 1) * (onsets - 1))
    return (1 - residual / between if between else math.nan), math.sqrt(residual)


def arms(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per arm: onsets, n (seeds), reliability, spread, lowest and highest mean harm, and
    the rank correlation of harm right after the pulse with harm in the end (mean and 95 % t
    interval over seeds, p of a t test that its mean is 0; nan below `ONSETS` onsets, and of a null
    pulse)."""
    rows = []
    for arm, part in runs.groupby("arm", sort=False):
        table = part.pivot(index="seed", columns="onset", values="harm")
        means = table.mean()
        size, spread = reliability(table)
        row = {"arm": arm, "onsets": len(means), "n": len(table)}
        row |= {"reliability": size, "spread": spread, "least": means.min(), "most": means.max()}
        ranks = [
            float(seed["after"].corr(seed["harm"], method="spearman"))
            for _, seed in part.groupby("seed")
            if len(seed.dropna()) >= ONSETS and not is_null(seed["harm"].to_list())
        ]
        rows.append(row | estimate(ranks, "after") | {"p": p_value(ranks) if ranks else math.nan})
    return pd.DataFrame(rows)
