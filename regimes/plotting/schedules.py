"""Tables of schedules: the metric and traffic of each, and their differences over common seeds.

The terminal after an ablation, ``regimes figure curves``, the report, the study and
`regimes.compare` show them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.console.units import format_quantity, interval_text
from regimes.base.errors import RecordError
from regimes.base.statistics import pair_by_seed, t_interval
from regimes.plotting.curves import has_metric, metric_values
from regimes.plotting.groups import BASELINES, Groups, check_setting, group_runs, tested_by
from regimes.plotting.looks import Metric
from regimes.records import (
    Record,
    load_all,
    select_runs,
    separate_experiments,
    share_of_low,
    summary,
)

DASH = "–"
LAST = 3  # epochs whose mean is a run's accuracy (or other metric)
ALL_PAIRS = 6  # schedules of which all pairs are compared
DIGITS = 4  # that are kept of half an interval, and so of its mean
COLUMNS = ("comparison", "n", "difference", "ci_low", "ci_high", "positive", "traffic_ratio")
NOTE = (
    "Mean difference over common seeds with its 95 % t interval (of three seeds or more), "
    "not corrected for the number of comparisons ({}). Traffic ratio: of the floats."
)


# -- each schedule -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleResults:
    """Holds what finished runs reached and sent, by schedule.

    Attributes:
        frame: one row per schedule, in the order of the runs: n, logged (runs with a metric),
            metric (in the shown unit, mean), sd (over seeds; nan for one), floats, bytes, seconds
            (means over runs), of_base.
        base: ``of_base`` is a share of this schedule's floats; None without a baseline.
    """

    frame: pd.DataFrame
    base: str | None
    metric: Metric

    def table(self, columns: Sequence[str], note: str = "") -> Table:
        """Make a table of text with these columns, a row per schedule."""
        heads = {"metric": self.metric.heading, "seconds": "s per run"}
        heads["of_base"] = f"of {self.base or 'low throughout'}"
        rows = [(str(name), self._cells(row.to_dict())) for name, row in self.frame.iterrows()]
        lines = [(name, *(cells[column] for column in columns)) for name, cells in rows]
        return Table(("schedule", *(heads.get(c, c) for c in columns)), lines, note)

    def _cells(self, row: dict[Any, Any]) -> dict[str, str]:
        digits, share = self.metric.digits, row["of_base"]
        spread = "" if math.isnan(row["sd"]) else f" ± {row['sd']:.{digits}f}"
        return {
            "n": count_text(row),
            "metric": DASH if math.isnan(row["metric"]) else f"{row['metric']:.{digits}f}{spread}",
            "floats": format_quantity(row["floats"]),
            "of_base": DASH if math.isnan(share) else f"{share:.2f}",
            "bytes": format_quantity(row["bytes"], "B"),
            "seconds": f"{row['seconds']:.1f}",
        }


def count_text(row: Mapping[Any, Any]) -> str:
    """Writes how many runs a mean over seeds has: "3", or "2 of 3" if only two logged the metric.

    Args:
        row: the row of a schedule, with ``n`` runs, of which ``logged`` have the metric.
    """
    some = 0 < row["logged"] < row["n"]
    return f"{row['logged']:.0f} of {row['n']:.0f}" if some else f"{row['n']:.0f}"


def tabulate_schedules(runs: Iterable[Record]) -> ScheduleResults:
    """Make the table of some finished runs.

    Raises:
        RecordError: an unfinished run, or runs of several metrics.
    """
    runs = separate_experiments(runs)
    if len({tested_by(run) for run in runs}) > 1:
        check_setting(runs)
    metric = tested_by(runs[0])
    summaries = summary(runs, LAST)
    summaries["metric"] *= metric.factor
    counted = {"n": ("seed", "count"), "logged": ("metric", "count")}
    means = {column: (column, "mean") for column in ("metric", "floats", "bytes", "seconds")}
    frame = summaries.groupby("name", sort=False).agg(**counted, **means, sd=("metric", "std"))
    base = next((name for name in BASELINES if name in frame.index), None)
    if base:
        frame["of_base"] = frame["floats"] / frame["floats"][base]
    else:  # None, so nan, without a low level
        shares = [share_of_low(run.header, run.rows) for run in runs]
        of_low = pd.Series(shares, [run.name for run in runs], dtype=float)
        frame["of_base"] = of_low.groupby(level=0).mean()
    return ScheduleResults(frame, base, metric)


# -- their differences --------------------------------------------------------------------------


def compare(
    records: str | Path | Iterable[str | Path | Record],
    baseline: str | None = None,
    where: Sequence[str] = (),
) -> pd.DataFrame:
    """Compares the schedules of some finished runs.

    >>> found = compare("data/reference/smoke-resnet8.tar.xz", baseline="low")
    >>> list(found.columns)[:3]
    ['comparison', 'n', 'difference']

    Args:
        records: A folder of runs or an archive of them, several, or runs.
        baseline: Compare each other schedule with this one. Default: all pairs of up to six
            schedules; if there are more, each with the usual baseline (`groups.BASELINES`).
        where: Only runs for which this holds, such as ``["optimizer.lr=0.4"]``.

    Returns:
        A table with one row per comparison. Its columns are comparison ("a - b"); n, the number of
        common seeds; difference, of the means of the last three epochs' metric; ci_low and ci_high,
        the 95 % t interval (nan with fewer than three seeds); unit, of these three ("points" are
        per cent of an accuracy); positive, the number of seeds at which a is above b; and
        traffic_ratio, the floats of a divided by those of b, means over the common seeds.
        Differences are rounded to a two-thousandth of half their interval, or without one to six
        digits of the metric, and ratios to four digits.

    Raises:
        RecordError: there are no runs, unfinished runs, runs with other settings, no such schedule,
            or only one schedule.
    """
    by_schedule = read_given(records, where)
    if len(by_schedule) < 2:
        raise RecordError(f"only {', '.join(by_schedule)}: name runs of another schedule, too")
    metric, summaries = summarise_reached([run for group in by_schedule.values() for run in group])
    exact = tabulate_differences(summaries, pairs_of(list(by_schedule), baseline), metric)
    most = float(summaries[metric.name].abs().max())
    rows = pd.DataFrame([_rounded(row, most) for row in exact.to_dict("records")], columns=COLUMNS)
    rows.insert(COLUMNS.index("ci_high") + 1, "unit", metric.unit)
    return rows


def _rounded(row: Mapping[Any, Any], most: float) -> dict[str, Any]:
    """A row of `tabulate_differences` with the digits that say something.

    Args:
        most: the largest metric of all runs.
    """
    half = (row["ci_high"] - row["ci_low"]) / 2
    size, kept = (half, DIGITS) if half > 0 else (most, DIGITS + 2)
    digits = kept - 1 - math.floor(math.log10(size)) if 0 < size < math.inf else kept
    ends = ("difference", "ci_low", "ci_high")
    found = {name: round(row[name], digits) + 0.0 for name in ends}  # + 0.0: no minus before zero
    return {**row, **found, "traffic_ratio": float(f"{row['traffic_ratio']:.{DIGITS}g}")}


def read_given(
    records: str | Path | Record | Iterable[str | Path | Record], where: Sequence[str] = ()
) -> Groups:
    """Read the finished runs that a user has named, by schedule.

    Raises:
        RecordError: none, or unfinished ones.
    """
    places: list[Any] = [records]  # load_all refuses what is no place
    if isinstance(records, Iterable) and not isinstance(records, str):
        places = list(records)
    runs = [run for run in places if isinstance(run, Record)]
    if folders := [place for place in places if not isinstance(place, Record)]:
        runs += load_all(*folders)
    by_schedule = group_runs(select_runs(runs, where))
    if not by_schedule:
        raise RecordError("name at least one run, or a folder of runs")
    return by_schedule


def summarise_reached(runs: Sequence[Record]) -> tuple[Metric, pd.DataFrame]:
    """Return the metric by which runs were tested, and `records.summary` with a column of it, in
    the shown unit.

    Raises:
        RecordError: one of them is not finished, or has no value of it.
    """
    metric = tested_by(runs[0])
    for run in runs:
        metric_values(run, metric)  # raises if there is none
    summaries = summary(runs, LAST)
    summaries[metric.name] = metric.factor * summaries["metric"]
    return metric, summaries


def pairs_of(names: Sequence[str], baseline: str | None = None) -> list[tuple[str, str]]:
    """Choose which schedules are compared, as (a, b) for a minus b; see `compare`.

    >>> pairs_of(["mine", "theirs", "low"])
    [('mine', 'theirs'), ('mine', 'low'), ('theirs', 'low')]
    >>> pairs_of(["mine", "theirs", "low"], "theirs")
    [('mine', 'theirs'), ('low', 'theirs')]

    Raises:
        RecordError: no such baseline.
    """
    if baseline is not None and baseline not in names:
        raise RecordError(f"baseline {baseline}: no such schedule; found {', '.join(names)}")
    if baseline is None and len(names) <= ALL_PAIRS:
        return list(combinations(names, 2))
    base = baseline or next((name for name in BASELINES if name in names), None)
    return [(name, base) for name in names if name != base] if base else []


def tabulate_differences(
    summaries: pd.DataFrame, pairs: Iterable[tuple[str, str]], metric: Metric
) -> pd.DataFrame:
    """Make a table with one row per pair that has a common seed; ``summaries`` as
    `summarise_reached` gives it."""
    seeds = summaries.groupby("name")["seed"].agg(set)
    rows = [compare_pair(summaries, a, b, metric) for a, b in pairs if seeds[a] & seeds[b]]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def compare_pair(summaries: pd.DataFrame, a: str, b: str, metric: Metric) -> dict[str, Any]:
    """Make one row of `tabulate_differences`; RecordError without a common seed."""
    values = pair_by_seed(summaries, a, b, metric.name)
    by_seed = (values[a] - values[b]).to_list()
    floats = pair_by_seed(summaries, a, b, "floats").loc[values.index].mean()
    ratio = floats[a] / floats[b] if floats[b] else math.nan
    positive = sum(d > 0 for d in by_seed)
    row = (f"{a} - {b}", len(by_seed), *t_interval(by_seed), positive, ratio)
    return dict(zip(COLUMNS, row, strict=True))


def as_table(rows: pd.DataFrame, metric: Metric, note: bool = False) -> Table:
    """Write `tabulate_differences` as text, rounded; with ``note`` an explanation stands below the
    table."""
    lines, signed = [], f"+.{metric.digits}f"
    for row in rows.to_dict("records"):
        difference, ratio = format(row["difference"], signed), row["traffic_ratio"]
        ends = interval_text(row["ci_low"], row["ci_high"], signed) or "-"
        above, traffic = f"{row['positive']}/{row['n']}", f"{ratio:.2f}".replace("nan", "-")
        lines.append([row["comparison"], str(row["n"]), difference, ends, above, traffic])
    heads = ("difference", "n", metric.unit, "95 % t interval", "> 0", "traffic ratio")
    return Table(heads, lines, NOTE.format(len(lines)) if note else "")


def differences_between(runs: Sequence[Record], baseline: str | None = None) -> Table | None:
    """Make the table of the differences between finished runs' schedules; None where there is
    nothing to compare: one schedule, no common seed, another setting, or no metric."""
    metric = tested_by(runs[0])
    names = list(dict.fromkeys(run.name for run in runs))
    if len(names) < 2 or not all(has_metric(run, metric) for run in runs):
        return None
    try:
        check_setting(runs)
    except RecordError:
        return None
    metric, summaries = summarise_reached(runs)
    rows = tabulate_differences(summaries, pairs_of(names, baseline), metric)
    return as_table(rows, metric, note=True) if len(rows) else None
