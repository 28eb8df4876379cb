"""How often training collapses, by schedule; for settings in which few bad runs decide the mean.

Run a grid with many seeds, then count::

    regimes ablate smoke-quirks-topk --seeds 16
    regimes figure collapse runs/smoke-quirks-topk

A run has *collapsed* if its accuracy, the mean of the tests after its last three epochs, is nearer
to guessing than to the median of the best schedule, or is not finite. Shares have exact binomial
intervals (Clopper & Pearson 1934). Against the best schedule: the exact sign test over the seeds in
which just one of both collapsed (McNemar 1947), and Holm's correction over all schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.base.statistics import correct_by_holm
from regimes.plotting import style
from regimes.plotting.groups import tested_by
from regimes.records import Record, last_metric, load_all

from ..common.command import Files, Out, Records
from ..common.compare import LAST
from ..common.estimates import as_table, estimate, exact, mean, p, word

# -- records to numbers ----------------------------------------------------------------------


def entries(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per run: name, seed, accuracy in % (nan if a loss was not finite), collapsed.

    Raises:
        RecordError: an unfinished run, another metric than accuracy, or other classes.
    """
    classes = {len(run.header["data"].get("classes") or ()) for run in runs}
    if {tested_by(run).name for run in runs} != {"accuracy"} or len(classes) != 1 or 0 in classes:
        raise RecordError(
            "collapse is counted of accuracies on the same classes, which these runs "
            "do not all have"
        )
    rows = []
    for run in runs:
        run.check_finished()
        rows.append({"name": run.name, "seed": run.seed, "accuracy": 100 * last_metric(run, LAST)})
    by_run = pd.DataFrame(rows)
    guessing = 100 / classes.pop()
    limit = (guessing + medians(by_run).max()) / 2
    return by_run.assign(collapsed=~(by_run["accuracy"] >= limit))


def medians(by_run: pd.DataFrame) -> pd.Series:
    """The median accuracy of each schedule; that of a run that is not finite counts as 0."""
    return by_run.fillna({"accuracy": 0}).groupby("name")["accuracy"].median()


def table(by_run: pd.DataFrame) -> pd.DataFrame:
    """One row per schedule, the best median first: n, how many collapsed, their share with its
    interval, p against the best before and after Holm's correction, mean accuracy of the rest."""
    best, *_ = order = medians(by_run).sort_values(ascending=False, kind="stable").index
    wide = by_run.pivot(index="seed", columns="name", values="collapsed")
    rows = []
    for name in order:
        runs = by_run[by_run["name"] == name]
        count, n = int(runs["collapsed"].sum()), len(runs)
        low, high = exact(count, n)
        rest = runs.loc[~runs["collapsed"], "accuracy"].to_list()
        both = wide[[best, name]].dropna().astype(bool)
        rows.append(
            {
                "schedule": name,
                "n": n,
                "collapsed": count,
                "share": count / n,
                "share_ci_low": low,
                "share_ci_high": high,
                "p": math.nan if name == best else paired(both[name], both[best]),
                **estimate(rest, "accuracy", alone=True),
            }
        )
    table = pd.DataFrame(rows)
    table.insert(7, "p_holm", correct_by_holm(table["p"].to_list()))
    return table


def paired(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Two-sided p, over seeds, for the hypothesis that both collapse equally often; nan if no seed
    tells them apart.

    >>> paired([True] * 6, [False] * 6)
    0.03125
    """
    from scipy import stats

    only = [a for a, b in zip(ours, theirs, strict=True) if a != b]
    return float(stats.binomtest(sum(only), len(only)).pvalue) if only else math.nan


# -- numbers to text -------------------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    """The table, rounded."""
    columns = {
        "schedule": word("schedule"),
        "n": word("n"),
        "collapsed": word("collapsed"),
        "share [95 %]": mean("share", ".2f"),
        "p": p("p"),
        "p (Holm)": p("p_holm"),
        "the rest's accuracy": mean("accuracy", ".1f"),
    }
    return as_table(rows, columns)


def main(records: Records, out: Out = None) -> list[Path]:
    """Count the collapsed runs under RECORDS and print a table."""
    files, runs = Files(records, out), load_all(records)
    rows = table(entries(runs))
    files.page("collapse", f"{style.describe_setting(runs[0])}.", as_text(rows))
    files.table("collapse", rows)
    return files.print_paths()
