"""Schedules compared: records to numbers, and numbers to a table.

The runs of one folder are grouped by schedule (``config["name"]``) and seed; comparisons are paired
over common seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import LackingError
from regimes.base.statistics import paired_differences as paired_differences
from regimes.plotting import looks
from regimes.plotting.groups import BASELINES, compressed_layers, group_runs
from regimes.plotting.groups import Groups as Groups
from regimes.plotting.groups import critical_windows as critical_windows
from regimes.plotting.groups import tested_by as tested_by
from regimes.plotting.schedules import LAST as LAST
from regimes.plotting.schedules import as_table as differences_as_table
from regimes.plotting.schedules import (
    compare_pair,
    count_text,
    pairs_of,
    summarise_reached,
    tabulate_differences,
)
from regimes.records import Record

from .estimates import Cell, Row, as_table, number, word
from .names import FIGURE2, PAPER

PAIRS = (
    ("low", "high"),
    ("low-in-critical", "high"),
    ("dense", "high-in-critical"),
    ("dense-deleted", "high-in-critical"),  # damage, or only lost time?
    ("accordion", "low"),
    ("low-in-critical", "low-late"),
    ("low-early", "low-late"),  # only where both were run
    ("small-batch", "large-batch"),
    ("small-in-critical", "large-batch"),
    ("small-batch", "large-in-critical"),
    ("accordion-batch", "small-batch"),
    ("smith", "small-batch"),
    ("accordion-batch", "smith"),
    ("adaqs", "low"),
    ("accordion", "adaqs"),
    ("adaqs-0.2", "low"),
    ("accordion", "adaqs-0.2"),
    ("high-longer", "low"),
    ("accordion", "high-longer"),
    ("accordion 4-1", "rank 2"),
    ("accordion 4-2", "accordion 4-1"),
    ("accordion-ladder", "accordion 4-1"),
)

# -- records to numbers ----------------------------------------------------------------------


def schedules(runs: Iterable[Record]) -> list[Record]:
    """Runs of a tournament that are schedules of the paper, by the role that their grid gives them
    or by their name, renamed as the paper's grids call them; the others are left out. Runs that
    already have such names, or none of a tournament's, are returned as they are."""
    given = list(runs)
    names = {run.name for run in given}
    if "rank 1" not in names or names & ({*PAPER.values()} - {*PAPER}):
        return given
    parts = [run.config.get("role") or PAPER.get(run.name) for run in given]
    return [run.called(part) for run, part in zip(given, parts, strict=True) if part]


def norms(runs: Sequence[Record]) -> pd.DataFrame:
    """Per epoch and compressed layer, the mean over ``runs`` of the detectors' statistic.

    Raises:
        LackingError: a run has none, since its policy reads none.
    """
    names = [layer["name"] for layer in compressed_layers(runs[0])]
    for run in runs:
        if run.statistic not in run.layers:
            raise LackingError(f"{run.folder} recorded no {run.statistic!r}, which this draws")
    rows = pd.concat([run.layers.rename(columns={run.statistic: "norm"}) for run in runs])
    rows = rows[rows["layer"].isin(names)]
    frame = rows.groupby(["layer", "epoch"], as_index=False).agg(
        norm=("norm", "mean"), n=("norm", "count")
    )
    frame.insert(1, "depth", frame["layer"].map(names.index))
    return frame.sort_values(["depth", "epoch"], ignore_index=True)


def whole_norm(run: Record) -> pd.DataFrame:
    """Columns epoch, and norm: the detectors' statistic of all compressed layers together, nan
    where a layer has none."""
    names = [layer["name"] for layer in compressed_layers(run)]
    of_epoch = run.layers[run.layers["layer"].isin(names)].groupby("epoch")[run.statistic]
    norm = of_epoch.apply(lambda values: float(np.sqrt((values**2).sum(skipna=False))))
    return norm.rename("norm").reset_index()


# -- the table -------------------------------------------------------------------------------


def table(
    runs: Iterable[Record],
    needed: Sequence[str] = FIGURE2,
    all_pairs: bool = False,
    baseline: str | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per schedule, one row per comparison of `PAIRS`).

    The metric (accuracy in %) is the mean of a run's last three epochs; mean and sd are over the
    ``logged`` of n seeds that have it. A comparison is the mean over common seeds of the
    difference, with its 95 % t interval, and the ratio of the two schedules' traffic in them.

    Args:
        needed: schedules that must be there; if empty, pairs without a common seed are left out
            and not refused.
        all_pairs: all pairs of up to six schedules; of more, each with the baseline as well.
        baseline: compare each other schedule with this one, and nothing else.
    """
    by_schedule = group_runs(runs, needed)
    metric, by_run = summarise_reached([run for group in by_schedule.values() for run in group])
    by_run["floats"] /= 1e6
    rows = by_run.groupby("name", sort=False).agg(
        **{"n": ("seed", "size"), metric.name: (metric.name, "mean"), "sd": (metric.name, "std")},
        logged=(metric.name, "count"),
        floats_M=("floats", "mean"),
    )
    base = next((name for name in BASELINES if name in by_schedule), None)
    rows["of_low"] = rows["floats_M"] / (float(rows["floats_M"][base]) if base else math.nan)
    chosen = [two for two in PAIRS if {*two} <= by_schedule.keys()]
    if baseline is not None:
        chosen = pairs_of(list(by_schedule), baseline)
    elif all_pairs:
        known = [{*two} for two in chosen]
        chosen += [two for two in pairs_of(list(by_schedule)) if {*two} not in known]
    if needed:
        pairs = pd.DataFrame([compare_pair(by_run, a, b, metric) for a, b in chosen])
    else:
        pairs = tabulate_differences(by_run, chosen, metric)
    return rows.rename_axis("schedule").reset_index(), pairs


def as_text(rows: pd.DataFrame, pairs: pd.DataFrame) -> tuple[Table, Table]:
    """Both tables as rounded text."""
    shown = looks.find_metric(str(rows.columns[2]))
    base = next((name for name in BASELINES if name in set(rows["schedule"])), "baseline")
    columns: dict[str, Cell] = {
        "schedule": word("schedule"),
        "n": count_text,
        shown.heading: lambda row: _mean_and_sd(row, shown),
        "floats (M)": number("floats_M", ".4g"),
        f"of {base}": lambda row: f"{row['of_low']:.2f}",
    }
    return as_table(rows, columns), differences_as_table(pairs, shown)


def _mean_and_sd(row: Row, shown: looks.Metric) -> str:
    digits = shown.digits
    sd = "" if math.isnan(row["sd"]) else f" ± {row['sd']:.{digits}f}"
    return f"{row[shown.name]:.{digits}f}{sd}"


def markdown(rows: pd.DataFrame, pairs: pd.DataFrame, about: str) -> str:
    """Both tables, rounded, below words about their setting."""
    parts = [about, *(table.markdown() for table in as_text(rows, pairs))]
    return "\n\n".join(parts) + "\n"
