"""Detectors compared when each marks the same number of epochs critical, and their agreement.

The score of an epoch is the change of a statistic of the whole model since the epoch before (or
several before), relative to the older value: what ACCORDION's rule compares with a threshold
(`RelativeChange`). A score counts if both epochs lie after the warm-up, in which every statistic
changes, and all recorded statistics were measured in both: of one that was measured in every third
epoch only changes over three epochs have a score. Each detector calls the quarter of these epochs
with its largest scores; so two detectors do not agree only because both call many epochs. `FIRST`
is a control that reads no statistic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
import pandas as pd

from regimes.base.errors import LackingError, RecordError
from regimes.base.statistics import kappa
from regimes.policies.detected import signal_values
from regimes.policies.detectors import RelativeChange
from regimes.policies.detectors.statistics import Statistic
from regimes.policies.replay.replay import has_statistics, past_epochs, signal_cost
from regimes.records import Record

from ..common import estimates
from ..common.names import STATISTICS

FIRST = "first epochs"
REFERENCE = "eigenvalue"
SHARE = 0.25  # of the evaluations that count, called by each detector
Scores = Mapping[int, pd.DataFrame]  # by seed: epochs x detectors


@dataclass(frozen=True)
class Change:
    """What a score is.

    Attributes:
        back: epochs between the two values that are compared.
        absolute: whether the score is the difference, in place of its ratio to the older value.
    """

    back: int = 1
    absolute: bool = False


RELATIVE = Change()


def rule(statistic: str) -> RelativeChange:
    """The rule that scores a statistic of the whole model; its threshold plays no part."""
    return RelativeChange(statistic=statistic, interval=1, per_layer=False)


def scores(run: Record, change: Change = RELATIVE) -> pd.DataFrame:
    """A column of scores per detector with a recorded statistic, a row per epoch that counts.
    nan: the statistic was undefined.

    Raises:
        LackingError: a run without any of the statistics.
        RecordError: a run with fewer than four scores.
    """
    known = {
        name: rule(text) for name, text in STATISTICS.items() if has_statistics(run, rule(text))
    }
    if not known:
        raise LackingError(
            f"{run.folder} recorded none of the statistics: see `regimes presets "
            "detection` for grids that do"
        )
    warm = int(run.epochs["lr"].to_numpy().argmax())  # the first epoch at the full rate
    past = past_epochs(run)
    names = {Statistic.parse(STATISTICS[name]).name for name in known}
    whole = [names <= {*epoch.statistics, *epoch.model} for epoch in past]
    back = change.back
    epochs = [i for i in range(warm + back, len(past)) if whole[i] and whole[i - back]]
    if len(epochs) < 1 / SHARE:
        raise RecordError(
            f"{run.folder} has {len(epochs)} epochs after its warm-up that can be "
            f"scored, too few to mark a quarter of them (changes over {back}; {sum(whole)} of "
            f"{len(whole)} epochs have {' and '.join(sorted(names))})"
        )
    columns = {}
    for name, detector in known.items():
        values = signal_values(past, detector, 0)
        both = [detector((values[epoch - back], values[epoch])) for epoch in epochs]
        columns[name] = [
            v.score if v.score is None or not change.absolute else v.score * abs(v.old or 0.0)
            for v in both
        ]
    return pd.DataFrame(columns, index=pd.Index(epochs, name="epoch"), dtype=float)


def scored(runs: Iterable[Record], change: Change = RELATIVE) -> dict[int, pd.DataFrame]:
    """`scores` of each run, by seed."""
    return {run.seed: scores(run, change) for run in runs}


def calls(table: pd.DataFrame) -> pd.DataFrame:
    """The epochs that each detector calls: those with its largest scores (of equal ones the first;
    undefined ones last); and as many of the first epochs.

    >>> calls(pd.DataFrame({"a": [0.1, 0.9, 0.2, 0.3], "b": [np.nan, 0.0, 0.0, 0.0]})).to_numpy()
    array([[False, False,  True],
           [ True,  True, False],
           [False, False, False],
           [False, False, False]])
    """
    count = round(SHARE * len(table))
    ranks = table.rank(ascending=False, method="first", na_option="bottom")
    return (ranks <= count).assign(**{FIRST: np.arange(len(table)) < count})


def pairs(tables: Scores) -> pd.DataFrame:
    """One row per pair of detectors and seed: kappa of their calls, Spearman's correlation of their
    scores (nan for `FIRST`, and for scores that are all alike)."""
    rows = []
    for seed, table in tables.items():
        called, ranks = calls(table), table.corr("spearman", min_periods=3)
        for a, b in combinations(map(str, called), 2):
            same = kappa(called[a].to_numpy(), called[b].to_numpy())
            both = np.nan if b == FIRST else ranks.loc[a, b]
            rows.append({"a": a, "b": b, "seed": seed, "kappa": same, "spearman": both})
    return pd.DataFrame(rows)


def other_runs(tables: Scores, reference: str = REFERENCE) -> pd.DataFrame:
    """Per detector, kappa of its calls in one run with the reference's (column ``with``) and
    with its own (``itself``) in a run of another seed, means over all pairs of runs."""
    called = [calls(table) for table in tables.values()]
    rows = [
        {
            "detector": name,
            "with": kappa(a[name].to_numpy(), b[reference].to_numpy()),
            "itself": kappa(a[name].to_numpy(), b[name].to_numpy()),
        }
        for a, b in permutations(called, 2)
        for name in a
    ]
    columns = ["detector", "with", "itself"]
    means = pd.DataFrame(rows, columns=columns).groupby("detector", sort=False).mean()
    return means.reindex(called[0].columns)


def over_seeds(by_seed: pd.DataFrame) -> pd.DataFrame:
    """One row per pair: n, mean and 95 % t interval of kappa and of the correlation."""
    return estimates.over_seeds(by_seed, ["a", "b"], ["kappa", "spearman"])


def with_reference(rows: pd.DataFrame, reference: str = REFERENCE) -> pd.DataFrame:
    """The pairs with the reference, by the other's name.

    Raises:
        LackingError: no pair has it.
    """
    agreed = rows[(rows["a"] == reference) | (rows["b"] == reference)]
    if agreed.empty:
        raise LackingError(
            f"the runs recorded no {reference!r}, with which the others are compared"
        )
    return agreed.assign(detector=agreed["a"].where(agreed["b"] == reference, agreed["b"]))


def thresholds(tables: Scores) -> pd.Series:
    """The change that a quarter of all scores exceed, by detector: the threshold with which it
    calls as many epochs during a training."""
    return pd.concat([*tables.values()]).quantile(1 - SHARE)


def costs(runs: Sequence[Record]) -> pd.Series:
    """Share of the training time that each detector's instrument takes, mean over runs; other
    statistics of that instrument count too."""
    names = map(str, scores(runs[0]))
    shares = {name: [signal_cost(run, rule(STATISTICS[name]))[1] for run in runs] for name in names}
    return pd.DataFrame(shares).mean()
