"""Jobs that ask themselves by trials (``policies.trial``): numbers for templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from regimes.config import DENSE
from regimes.console.tables import Table
from regimes.plotting.trials import tabulate_harms
from regimes.records import Record

from ...common.estimates import as_table
from ...common.paired import difference_text
from ...tournament.equal_floats import at_same_floats
from ..sources import entries, number, records
from ..values import Interval, mean_of, over_common_seeds
from .tournaments import arm_columns, arms, of_arm

RANKS = ["rank 1", "rank 2", "rank 4"]
PULSE, LAST = 3, 3  # units of a pulse; units whose mean is the end
EARLY, LATE = (3, 12), (18, 24)  # units at the high rate, and after the last decay


def _of(source: str, arm: str) -> list[Record]:
    return [run for run in records(source) if run.name == arm]


def _levels(run: Record) -> list[set[str]]:
    """Those of the compressed layers, by unit."""
    return [{*row["layers"]["level"]} - {DENSE} for row in run.rows]


# -- what the policy does --------------------------------------------------------------------


@number
def minus_rank_at_bytes(source: str, arm: str, priced: bool = True) -> Interval:
    """Minus one rank throughout at the arm's bytes, on lines over their logarithm.

    Args:
        priced: with the bytes of the arm's trials.
    """
    return mean_of(_at_bytes(source, arm, priced).to_list())


@number
def against_another(source: str, arm: str, other: str) -> Interval:
    """One arm minus one rank at its bytes, less what another one has."""
    return over_common_seeds(_at_bytes(source, arm) - _at_bytes(source, other))


def _at_bytes(source: str, arm: str, priced: bool = True) -> pd.Series[float]:
    """`minus_rank_at_bytes`, by seed."""
    runs, metric = entries(source)
    runs = runs.assign(floats=runs["bytes"])
    if not priced:
        price = {(run.name, run.seed): float(run.trials["bytes"].sum()) for run in records(source)}
        keys = zip(runs["name"], runs["seed"], strict=True)
        runs["floats"] -= [price[key] for key in keys]
    return at_same_floats(runs, arm, RANKS, metric.name)


@number
def trial_price(source: str, arm: str, level: str, alone: str) -> float:
    """Bytes of an arm in the units in which it is at a level, beside those of the arm that is at
    it throughout; the mean over runs that have such units."""
    plain = {run.seed: run.epochs["bytes"].mean() for run in _of(source, alone)}
    shares = []
    for run in _of(source, arm):
        sent = run.epochs["bytes"][[levels == {level} for levels in _levels(run)]]
        shares += [float(sent.mean() / plain[run.seed])] if len(sent) else []
    return float(np.mean(shares))


@number
def trial_levels(source: str, arm: str, level: str, decay: int) -> dict[str, int]:
    """How many runs there are, how many left a level before unit ``decay``, how many are at it in
    the last unit, and in how many it was shown to harm."""
    runs = _of(source, arm)
    harmed = [tabulate_harms(run) for run in runs]
    return {
        "runs": len(runs),
        "left": sum(any(levels != {level} for levels in _levels(run)[:decay]) for run in runs),
        "back": sum(_levels(run)[-1] == {level} for run in runs),
        "harmed": sum(bool(table["shown"].any()) for table in harmed),
    }


@number
def trial_table(source: str) -> str:
    """Every arm from few bytes to many: rate, metric, bytes, and the arm minus one rank at its
    bytes."""
    rows, metric = arms(source).reset_index().sort_values("bytes"), entries(source)[1]
    columns, text = arm_columns(rows, metric, "bytes"), difference_text(metric)
    minus = {}
    for arm in {*rows["arm"]} - {*RANKS, DENSE}:
        found = minus_rank_at_bytes(source, arm)
        ends = {"ci_low": found.low, "ci_high": found.high}
        minus[arm] = text({"difference": found.mean, "n": found.n, **ends})
    columns["minus one rank, same bytes [95 %]"] = of_arm(minus)
    return as_table(rows, columns).markdown()


# -- trials and branches ---------------------------------------------------------------------


def _cells(source: str) -> pd.DataFrame:
    """One row per level and first unit of a pulse: harm (of the pulses, in nats), difference (of
    the trunks' trials that ended in these units), both means over seeds."""
    runs = records(source)
    trunks = {run.seed: run for run in runs if run.name == "trunk"}

    def end(run: Record) -> float:
        return float(run.epochs["test_loss"].tail(LAST).mean())

    pulses = pd.DataFrame(
        [
            (run.name.split()[0], run.config["branch"]["at"], end(run) - end(trunks[run.seed]))
            for run in runs
            if run.name != "trunk"
        ],
        columns=["level", "at", "harm"],
    )
    trials = pd.concat([run.trials for run in trunks.values()])
    trials["at"] = trials["epoch"] // PULSE * PULSE
    both = [
        table.groupby(["level", "at"])[column].mean()
        for table, column in ((pulses, "harm"), (trials, "difference"))
    ]
    return pd.concat(both, axis=1)


@number
def trial_agreement(source: str) -> float:
    """Spearman's coefficient of harm by pulses and by trials over levels and phases."""
    return float(_cells(source).corr("spearman")["harm"]["difference"])


@number
def trial_cell(source: str, level: str, at: int) -> dict[str, float]:
    """Harm by the pulses and difference in the trials of a level in one phase, in nats."""
    found: Any = _cells(source).loc[(level, at)]
    return {"pulse": float(found["harm"]), "trial": float(found["difference"])}


@number
def trial_fall(source: str, level: str) -> Interval:
    """The mean result of a level's trials at the high rate minus that at the low rate, by seed, in
    nats."""
    values = []
    for run in _of(source, "trunk"):
        trials = run.trials[run.trials["level"] == level]
        early, late = (
            trials[trials["epoch"].between(first, last - 1)]["difference"].mean()
            for first, last in (EARLY, LATE)
        )
        values.append(float(early - late))
    return mean_of(values)


@number
def trial_order(source: str, more: str, less: str) -> dict[str, Any]:
    """In how many phases trials and pulses say that one level harms more than another."""
    wide = _cells(source).unstack("level")
    return {
        "phases": len(wide),
        "trials": int((wide["difference", more] > wide["difference", less]).sum()),
        "pulses": int((wide["harm", more] > wide["harm", less]).sum()),
    }


@number
def trial_trees_table(sources: str) -> str:
    """A row for each archive: rank agreement of trials with pulses, and in how many phases each of
    both says that rank 1 harms more than rank 2."""
    lines = []
    for source in sources.split("; "):
        order = trial_order(source, "r1", "r2")
        counts = (f"{order[by]} of {order['phases']}" for by in ("pulses", "trials"))
        lines.append((source, f"{trial_agreement(source):+.2f}", *counts))
    heads = ("tree", "agreement", "rank 1 above rank 2, by pulses", "by trials")
    return Table(heads, lines).markdown()
