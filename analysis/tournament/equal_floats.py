"""Arms of a tournament compared with controls at the same number of floats.

The metric of a control at an arm's floats is interpolated, seed by seed, between two controls of
its kind, linearly in the logarithm of the floats. An arm that sends less or more than all of them,
by more than 3 %, is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from regimes.base.errors import RecordError
from regimes.plotting.looks import Metric

from ..common.paired import compare
from .tournament_figure import CONTROLS, LADDERS, kinds

SLACK = 0.03  # of floats: an arm so close beyond the last control is compared with that


def at_same_floats(
    by_run: pd.DataFrame, arm: str, ladder: Sequence[str], column: str
) -> pd.Series[float]:
    """``arm`` minus the controls of one kind at its floats, by seed (the index); empty if a seed
    sends less or more than all of them, or if fewer than two of them were run.

    >>> rows = pd.DataFrame({"name": ["a", "b", "mine"], "seed": 0, "floats": [1.0, 4.0, 2.0],
    ...                      "accuracy": [90.0, 94.0, 95.0]})
    >>> found = at_same_floats(rows, "mine", ["a", "b"], "accuracy")
    >>> found.to_dict()  # 2 is halfway from 1 to 4, by ratio
    {0: 3.0}

    Raises:
        RecordError: no seed in common.
    """
    known = [name for name in ladder if (by_run["name"] == name).any()]
    wide = by_run[by_run["name"].isin([arm, *known])].pivot(index="seed", columns="name")
    wide = wide[["floats", column]].dropna()
    if wide.empty:
        raise RecordError(f"{arm} and {known} have no seed in common: run all with the same seeds")
    floats, values = wide["floats"], wide[column]
    differences = {}
    for seed in wide.index:
        sent, reached = floats.loc[seed, known].to_numpy(), values.loc[seed, known].to_numpy()
        here, up = float(floats.loc[seed, arm]), np.argsort(sent)
        inside = sent.min() * (1 - SLACK) <= here <= sent.max() * (1 + SLACK)
        if len(known) < 2 or not inside:
            return pd.Series(dtype=float)
        control = np.interp(math.log(here), np.log(sent[up]), reached[up])
        differences[seed] = float(values.loc[seed, arm] - control)
    return pd.Series(differences)


def comparisons(by_run: pd.DataFrame, shown: Metric) -> pd.DataFrame:
    """One row per contestant and kind of control: n, difference, its 95 % t interval, p, and p
    after Holm's correction over all rows. nan where the arm's floats are out of the controls'."""
    arms = [arm for arm in dict.fromkeys(by_run["name"]) if arm not in CONTROLS]
    return _against(
        by_run, shown, [(arm, kind) for arm in arms for kind in kinds({*by_run["name"]})]
    )


def timings(by_run: pd.DataFrame, shown: Metric) -> pd.DataFrame:
    """Controls compared with each other: does it matter *when* rank 4 is used? Each is compared
    with the kinds before its own (`LADDERS`), at its floats. Holm's correction is over these
    rows."""
    there = kinds({*by_run["name"]})
    return _against(
        by_run,
        shown,
        [
            (arm, other)
            for i, kind in enumerate(there)
            for arm in LADDERS[kind]
            if (by_run["name"] == arm).any()
            for other in there[:i]
        ],
    )


def _against(by_run: pd.DataFrame, shown: Metric, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    return compare(
        {
            (arm, kind): at_same_floats(by_run, arm, LADDERS[kind], shown.name).to_list()
            for arm, kind in pairs
            if arm not in LADDERS[kind]
        }
    )
