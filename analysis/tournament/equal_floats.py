"""Arms of a tournament compared at the same number of floats.

What a control reaches at an arm's floats lies between two of its kind: by seed, on the line between
them, over the logarithm of the floats. An arm that sends less or more than all of them, by more
than 3 %, is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from regimes.errors import RecordError
from regimes.plotting.metrics import Metric
from regimes.statistics import alike, holm, p_value, t_interval

from .tournament_figure import CONTROLS, LADDERS, kinds

SLACK = 0.03  # of floats: an arm so close beyond the last control is compared with that


def at_same_floats(each: pd.DataFrame, arm: str, ladder: Sequence[str], column: str) -> list[float]:
    """``arm`` minus what the controls of one kind reach at its floats, by seed; empty where a seed
    sends less or more than all of them, or fewer than two of them were run.

    >>> rows = pd.DataFrame({"name": ["a", "b", "mine"], "seed": 0, "floats": [1.0, 4.0, 2.0],
    ...                      "accuracy": [90.0, 94.0, 95.0]})
    >>> at_same_floats(rows, "mine", ["a", "b"], "accuracy")  # 2 is halfway from 1 to 4, by ratio
    [3.0]

    Raises:
        RecordError: no seed in common.
    """
    known = [name for name in ladder if (each["name"] == name).any()]
    wide = each[each["name"].isin([arm, *known])].pivot(index="seed", columns="name")
    wide = wide[["floats", column]].dropna()
    if wide.empty:
        raise RecordError(f"{arm} and {known} have no seed in common: run all with the same seeds")
    floats, values = wide["floats"], wide[column]
    found = []
    for seed in wide.index:
        sent, reached = floats.loc[seed, known].to_numpy(), values.loc[seed, known].to_numpy()
        here, up = float(floats.loc[seed, arm]), np.argsort(sent)
        inside = sent.min() * (1 - SLACK) <= here <= sent.max() * (1 + SLACK)
        if len(known) < 2 or not inside:
            return []
        control = np.interp(math.log(here), np.log(sent[up]), reached[up])
        found.append(float(values.loc[seed, arm] - control))
    return found


def comparisons(each: pd.DataFrame, shown: Metric) -> pd.DataFrame:
    """One row per contestant and kind of control: n, difference, its 95 % t interval, p, and p
    after Holm's correction over all rows. nan where the arm's floats are out of the controls'. An
    arm that knows an event is a control and, against the others, a contestant."""
    arms = [arm for arm in dict.fromkeys(each["name"]) if arm not in CONTROLS]
    return _against(each, shown, [(arm, kind) for arm in arms for kind in kinds({*each["name"]})])


def moments(each: pd.DataFrame, shown: Metric) -> pd.DataFrame:
    """The same of controls: does it matter *when* rank 4 is taken? Each against the kinds before
    its own (`LADDERS`), at its floats. Holm's correction is over these rows."""
    blind = [kind for kind in kinds({*each["name"]}) if {*LADDERS[kind]} <= CONTROLS]
    return _against(
        each,
        shown,
        [
            (arm, other)
            for i, kind in enumerate(blind)
            for arm in LADDERS[kind]
            if (each["name"] == arm).any()
            for other in blind[:i]
        ],
    )


def _against(each: pd.DataFrame, shown: Metric, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    rows = []
    for arm, kind in pairs:
        if arm in LADDERS[kind]:
            continue
        values = at_same_floats(each, arm, LADDERS[kind], shown.name)
        mean, low, high = t_interval(values) if values else (math.nan,) * 3
        if values and alike(values):  # says nothing about sampling
            low = high = math.nan
        rows.append(
            {
                "arm": arm,
                "control": kind,
                "n": len(values),
                "difference": mean,
                "ci_low": low,
                "ci_high": high,
                "p": p_value(values),
            }
        )
    columns = ["arm", "control", "n", "difference", "ci_low", "ci_high", "p", "p_holm"]
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(p_holm=holm(found["p"].to_list()))
