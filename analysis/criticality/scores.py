"""Scores of the trunk's signals: how well does each say which pulses do harm?

A signal of a pulse is the trunk's statistic in the units of the pulse (their mean), or its relative
change from unit to unit there, which ACCORDION's rule compares with a threshold. These values are
hindsight. With ``known=True`` a signal's value is from the unit before the pulse, which a
detector would know. Next to them are three *dull*
signals that measure nothing: the learning rate, time (the earlier, the higher), the first half.

Per seed and arm, a score is Spearman's rank correlation of signal and harm over the onsets, and the
area under the ROC curve for "in the worst third", the third of the onsets, rounded, with most harm:
1 if the signal is higher there than elsewhere, 0.5 by chance, 0 if it is lower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regimes.base.errors import RecordError
from regimes.base.statistics import DIGITS, correct_by_holm, p_value
from regimes.policies.detected import signal_values
from regimes.policies.detectors import RelativeChange
from regimes.policies.replay.replay import has_statistics, past_epochs
from regimes.records import Record, changed_fields
from regimes.search.harms.rates import mean_rates

from ..common.estimates import estimate
from ..common.names import STATISTICS
from ..common.paired import compare
from .harm import ONSETS, is_null

CHANGE = "change of "
RATE, TIME, HALF = DULL = ("learning rate", "time, early first", "first half")
WORST = 1 / 3  # of the onsets
Signals = Mapping[int, pd.DataFrame]  # by seed: units x signals


# -- signals of the trunk --------------------------------------------------------------------


def signals(runs: Sequence[Record]) -> pd.DataFrame:
    """A row per unit, a column per signal that one of the runs has measured, the dull ones last;
    nan where it has no value, as the change has none in unit 0.

    Args:
        runs: a trunk, and runs that are like it but for their instruments.
    """
    units = len(runs[0].rows)
    columns: dict[str, Any] = {}
    for name, text in STATISTICS.items():
        rule = RelativeChange(statistic=text, interval=1, per_layer=False)
        for run in runs:
            if has_statistics(run, rule) and name not in columns:
                values = signal_values(past_epochs(run), rule, 0)
                steps = pairwise(values)
                columns[name] = values
                columns[CHANGE + name] = [None, *(rule(both).score for both in steps)]
    every = np.arange(units)
    columns |= {RATE: mean_rates(runs[0]), TIME: -every, HALF: every < units / 2}
    return pd.DataFrame(columns, index=pd.Index(every, name="unit"), dtype=float)


def by_seed(trunks: Sequence[Record], runs: Sequence[Record]) -> dict[int, pd.DataFrame]:
    """`signals` of each trunk by seed, with the signals of all ``runs`` that differ from it in
    their instruments alone."""
    plain = [run for run in runs if not run.config.get("branch")]
    return {
        trunk.seed: signals([trunk, *(run for run in plain if _like(trunk, run))])
        for trunk in trunks
    }


def _like(trunk: Record, run: Record) -> bool:
    other = changed_fields(trunk.config, run.config)
    return run is not trunk and all(field.startswith("instruments") for field in other)


def of_pulses(table: pd.DataFrame, pulses: pd.DataFrame, known: bool = False) -> pd.DataFrame:
    """A row of signals for each pulse (onset, length): their mean over its units, without nan. With
    ``known`` the value in the unit before the pulse instead, except for the dull ones."""
    during = [table.loc[at : at + n - 1].mean() for at, n in _places(pulses)]
    found = pd.DataFrame(during)
    if known:
        before = [table.reindex([at - 1]).iloc[0] for at, _ in _places(pulses)]
        found = pd.DataFrame(before).reset_index(drop=True).assign(**found[[*DULL]])
    return found.reset_index(drop=True)


def _places(pulses: pd.DataFrame) -> list[tuple[int, int]]:
    return [(int(at), int(n)) for at, n in zip(pulses["onset"], pulses["length"], strict=True)]


# -- scores ----------------------------------------------------------------------------------


def auc(signal: NDArray[np.float64], worst: NDArray[np.float64]) -> float:
    """Area under the ROC curve: the share of pairs, one of the worst and one of the others, in
    which the worst has the higher signal; a tie counts half (Hanley and McNeil 1982). Where several
    tie for the last places of the worst, the mean over all choices of them.

    >>> auc(np.array([3.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0]))
    0.25

    Args:
        signal: [onsets].
        worst: [onsets], as `share_among_worst` gives it; nan if all are of one kind.
    """
    gaps = signal[:, None] - signal
    weights = worst[:, None] * (1 - worst)
    np.fill_diagonal(weights, 0)
    tied = (worst > 0) & (worst < 1)
    if tied.any():  # of two that tie, drawn without replacement
        weights[np.ix_(tied, tied)] *= tied.sum() / (tied.sum() - 1)
    right = (gaps > 0) + 0.5 * (gaps == 0)
    return float((weights * right).sum() / weights.sum()) if weights.any() else math.nan


def share_among_worst(order: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """How far each belongs to the ``count`` highest: 1 or 0, and the same share for all that tie
    for the last places.

    >>> share_among_worst(np.array([1.0, 3.5, 3.5, 2.0]), 1).tolist()
    [0.0, 0.5, 0.5, 0.0]
    """
    above = (order[:, None] < order).sum(axis=1)
    alike = (order[:, None] == order).sum(axis=1)
    return np.clip((count - above) / alike, 0, 1)


def ranks(values: pd.Series) -> NDArray[np.float64]:
    """Ranks from the lowest, 1; values that differ by rounding alone share theirs."""
    largest = float(values.abs().max())
    rounded = (values / largest if largest else values).round(DIGITS)
    return np.asarray(rounded.rank(), dtype=np.float64)


def scores(runs: pd.DataFrame, signals: Signals, known: bool = False) -> pd.DataFrame:
    """One row per arm, seed and signal: rank (Spearman's correlation with harm; nan for a signal
    that is all alike) and auc. An onset counts if all signals have a value there.

    Args:
        runs: of `measured.by_run`.

    Raises:
        RecordError: no arm has `harm.ONSETS` onsets and a harm other than 0.
    """
    rows = []
    # the columns of the first seed that all seeds have
    shared = [n for n in signals[min(signals)] if all(n in each for each in signals.values())]
    for (arm, seed), part in runs.groupby(["arm", "seed"], sort=False):
        table = of_pulses(signals[int(str(seed))][shared], part, known)
        harm = part["harm"].set_axis(table.index)
        table = table.dropna(axis="columns", how="all").dropna()
        harm = harm.loc[table.index]
        if len(harm) < ONSETS or is_null(harm.to_list()):
            continue
        order = ranks(harm)
        worst = share_among_worst(order, round(WORST * len(harm)))
        for name, values in table.items():
            place = ranks(values)
            both = np.corrcoef(place, order)[0, 1] if np.ptp(place) else math.nan
            row = {"arm": arm, "seed": seed, "signal": name, "rank": float(both)}
            rows.append(row | {"auc": auc(place, worst)})
    if not rows:
        raise RecordError(f"no arm has {ONSETS} onsets and a harm other than 0: nothing to score")
    return pd.DataFrame(rows)


def over_seeds(each: pd.DataFrame) -> pd.DataFrame:
    """One row per arm and signal: n, rank and auc with 95 % t intervals, p of no rank correlation,
    p_holm over all rows."""
    rows = []
    for (arm, signal), part in each.groupby(["arm", "signal"], sort=False):
        known = part["rank"].dropna().to_list()
        row = {"arm": arm, "signal": signal, "n": len(part)} | estimate(known, "rank")
        row |= estimate(part["auc"].to_list(), "auc")
        rows.append(row | {"p": p_value(known) if known else math.nan})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=correct_by_holm(table["p"].to_list()))


def against_dull(each: pd.DataFrame) -> pd.DataFrame:
    """`paired.compare` of each measured signal with each dull one, by seed: arm of branches in
    ``of``, signal in ``arm``, dull one in ``control``; p_holm over all rows."""
    differences, of = {}, []
    for arm, part in each.groupby("arm", sort=False):
        wide = part.pivot(index="seed", columns="signal", values="rank")
        for signal in dict.fromkeys(part["signal"]):
            for dull in DULL if signal not in DULL else ():
                key = (f"{arm}\0{signal}", dull)  # for `compare` alone; both names return below
                differences[key] = (wide[signal] - wide[dull]).dropna().to_list()
                of.append((arm, signal))
    table = compare(differences)
    return table.assign(of=[a for a, _ in of], arm=[s for _, s in of])
