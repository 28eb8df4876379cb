"""Numbers of `analysis.criticality` that the templates of docs/findings/ quote."""

from __future__ import annotations

import functools

import pandas as pd

from regimes.plotting.groups import tested_by

from ...criticality import criticality, harm, scores
from ..sources import number, record_read, records, row_of
from ..values import Interval, mean_of


@functools.cache
def _each(source: str) -> pd.DataFrame:
    return harm.by_run(harm.by_unit(harm.pairs(records(source))))


@functools.cache
def _scores(source: str, first: int = 0) -> pd.DataFrame:
    runs, pulses = records(source), _each(source)
    pulses = pulses[pulses["onset"] >= first]
    return scores.scores(pulses, scores.by_seed(harm.trunks(harm.pairs(runs)), runs))


def _harms(source: str, arm: str, onset: int) -> list[float]:
    """Harm in the end of one pulse, a value per seed in the order of the seeds."""
    record_read(f"{source}.tar.xz")
    runs = _each(source)
    rows = runs[(runs["arm"] == arm) & (runs["onset"] == onset)].sort_values("seed")
    return [float(value) for value in rows["harm"]]


@number
def harm_of_a_pulse(source: str, arm: str, onset: int) -> Interval:
    """How much worse the final metric is with a pulse than without it, by the unit where it
    starts."""
    return mean_of(_harms(source, arm, onset))


@number
def harm_between(source: str, arm: str, onset: int, other: int) -> Interval:
    """Harm of a pulse minus that of the pulse that starts at another unit, by seed."""
    pairs = zip(_harms(source, arm, onset), _harms(source, arm, other), strict=True)
    return mean_of([a - b for a, b in pairs])


@number
def harm_across(source: str, other: str, arm: str, onset: int) -> Interval:
    """Harm of a pulse minus that of the same pulse in another tree of the same seeds."""
    pairs = zip(_harms(source, arm, onset), _harms(other, arm, onset), strict=True)
    return mean_of([a - b for a, b in pairs])


@number
def harm_right_after(source: str, arm: str, onset: int) -> float:
    """Harm in the last unit of a pulse, mean over seeds."""
    record_read(f"{source}.tar.xz")
    return float(row_of(harm.curve(_each(source)), arm=arm, onset=onset)["after"])


@number
def norm_that_left(source: str, arm: str, onset: int) -> Interval:
    """Norm of the residual that absent workers take with them when the pulse starts."""
    record_read(f"{source}.tar.xz")
    found = [run for run, _ in harm.pairs(records(source))]
    named = sorted((run for run in found if harm.arm_of(run) == arm), key=lambda run: run.seed)
    rows = [run.rows[onset] for run in named if run.config["branch"]["at"] == onset]
    return mean_of([row["churn"]["residual"] for row in rows])


@number
def harms_added(source: str, pulses: str, minus: str = "", times: float = 1.0) -> Interval:
    """The harms of several pulses added up, by seed; minus ``times`` that of another.

    Args:
        pulses, minus: "ARM from ONSET", separated by semicolons.
    """
    terms = [(1.0, pulse) for pulse in pulses.split("; ")]
    terms += [(-times, pulse) for pulse in minus.split("; ") if pulse]
    values = []
    for factor, pulse in terms:
        arm, _, onset = pulse.rpartition(" from ")
        values.append([factor * harm for harm in _harms(source, arm, int(onset))])
    return mean_of([sum(by_seed) for by_seed in zip(*values, strict=True)])


@number
def harm_reliability(source: str, arm: str) -> float:
    """Reliability of the mean curve of harm over onsets (`harm.reliability`)."""
    record_read(f"{source}.tar.xz")
    return float(row_of(harm.arms(_each(source)), arm=arm)["reliability"])


@number
def signal_of_harm(source: str, arm: str, signal: str, first: int = 0) -> Interval:
    """Rank correlation of a signal with harm over the onsets from ``first`` on, mean over seeds."""
    record_read(f"{source}.tar.xz")
    row = row_of(scores.over_seeds(_scores(source, first)), arm=arm, signal=signal)
    low, high = row["rank_low"], row["rank_high"]
    return Interval(row["rank"], low, high, int(row["n"]), row["p"], row["p_holm"])


@number
def signal_minus(source: str, arm: str, signal: str, dull: str) -> Interval:
    """A signal's rank correlation minus that of one that measures nothing, by seed."""
    record_read(f"{source}.tar.xz")
    table = scores.against_dull(_scores(source))
    row = row_of(table, of=arm, arm=signal, control=dull)
    ends = row["ci_low"], row["ci_high"]
    return Interval(row["difference"], *ends, int(row["n"]), row["p"], row["p_holm"])


@number
def pulses_table(source: str) -> str:
    """Harm by onset, of every pulse."""
    record_read(f"{source}.tar.xz")
    metric = tested_by(harm.pairs(records(source))[0][1])
    return criticality.onset_table(harm.curve(_each(source)), metric).markdown()


@number
def signals_table(source: str, arm: str) -> str:
    """How well each signal of the trunk ranks one arm's pulses by harm."""
    return _table(source, f"Signals of the trunk: {arm}")


def _table(source: str, title: str) -> str:
    record_read(f"{source}.tar.xz")
    runs, by_seed = _each(source), _scores(source)
    metric = tested_by(harm.trunks(harm.pairs(records(source)))[0])
    tables = criticality.tables(
        harm.curve(runs),
        harm.arms(runs),
        scores.over_seeds(by_seed),
        scores.against_dull(by_seed),
        metric,
    )
    return next(table for table in tables if table.title == title).markdown()
