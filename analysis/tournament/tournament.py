"""The tournament: adaptive policies against controls that send as many floats.

Tune, run, then draw (commands in `grids/tournament-smoke.toml`)::

    regimes figure tournament runs/tournament-smoke --trials runs/tune/tournament-smoke/tune.json

Contestants, and the controls among each other, are compared at the same floats (`equal_floats`).
Seconds are predicted by `regimes.cost`; what instruments measure for a policy counts in bytes and
seconds where it is sent, not where it is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from regimes import inputs
from regimes.config import DENSE
from regimes.console import stdout
from regimes.console.tables import Table
from regimes.console.units import interval_text, p_text
from regimes.cost.cases import cases
from regimes.cost.network import Network
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import groups, tested_by
from regimes.plotting.metrics import Metric
from regimes.records import Record, load_all
from regimes.statistics import t_interval

from ..common import compare
from ..common.command import Files
from . import tournament_figure
from .equal_floats import comparisons, moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = ("dense", "every 1")  # arms that share each step's gradient as it is
NETWORKS = ("10Gbit/s,50us", "100Mbit/s,50us", "20Mbit/s,50ms")

# -- records to numbers ----------------------------------------------------------------------


def entries(runs: Iterable[Record], networks: Sequence[str] = NETWORKS) -> pd.DataFrame:
    """One row per run: name, seed, rate, the metric as it is shown, floats, bytes, and predicted
    seconds of the whole run on each network.

    Raises:
        RecordError: runs of different settings, an unfinished one, or one without seconds.
    """
    found = groups(runs)
    every = [run for group in found.values() for run in group]
    shown, each = compare.reached(every)
    each["rate"] = [run.rate for run in every]
    spent = {case.name: case for case in cases(every) if case.runs}
    for text in networks:
        network, workers = Network.parse(text), int(every[0].config["workers"])
        seconds = {
            name: sum(steps * float(work.seconds(network, workers)) for steps, work in case.epochs)
            / case.runs
            for name, case in spent.items()
        }
        each[text] = each["name"].map(seconds)
    for unit in ("floats", "bytes"):
        each[f"dense_{unit}"] = [_dense(run, unit) for run in every]
    whole = ["dense_floats", "dense_bytes"]
    return each[["name", "seed", "rate", shown.name, "floats", "bytes", *whole, *networks]]


def _dense(run: Record, unit: str) -> float:
    """What a run would have sent without compression; nan where its record does not say."""
    each = run.header["per_step"].get(DENSE, {}).get(unit, math.nan)
    return float(each * run.epochs["steps"].sum())


def table(each: pd.DataFrame, shown: Metric, networks: Sequence[str] = NETWORKS) -> pd.DataFrame:
    """One row per arm, from few floats to many: rate, n, metric with its 95 % t interval, and means
    of floats, bytes and seconds, the first two also as a share of dense's, or of a period of 1; of
    what dense would have sent where neither was run (nan if that is not known)."""
    rows = []
    for name, runs in each.groupby("name", sort=False):
        mean, low, high = t_interval(runs[shown.name].to_list())
        spent = runs[["floats", "bytes", *networks]].mean().to_dict()
        rows.append(
            {
                "arm": name,
                "rate": runs["rate"].iloc[0],
                "n": len(runs),
                shown.name: mean,
                "ci_low": low,
                "ci_high": high,
                **spent,
            }
        )
    found = pd.DataFrame(rows).sort_values("floats", kind="stable", ignore_index=True)
    dense = found[found["arm"].isin(WHOLE)]
    for column in ("floats", "bytes"):
        known = each.get(f"dense_{column}", pd.Series([math.nan]))
        whole = float(dense[column].iloc[0] if len(dense) else known.mean())
        found.insert(list(found).index(column) + 1, f"{column}_of_dense", found[column] / whole)
    return found


def beside(each: pd.DataFrame, shared: pd.DataFrame, column: str) -> pd.DataFrame:
    """What a rate of its own does for an arm: one row per arm of both, with the rates, n of common
    seeds, both means, and the difference, own minus shared, with its 95 % t interval.

    Raises:
        RecordError: they have no arm with a seed in common, or the other one not one rate.
    """
    if column not in shared:
        raise RecordError(
            f"the runs at the shared rate have no {column}: they were tested otherwise"
        )
    rates = {f"{rate:g}" for rate in shared["rate"]}
    both = each.merge(shared, on=["name", "seed"], suffixes=("", "_shared"))
    if both.empty or len(rates) > 1:
        raise RecordError(
            f"expected the same arms and seeds, all at one rate: {len(both)} runs "
            f"are common, at {', '.join(sorted(rates))}"
        )
    rows = []
    for name, runs in both.groupby("name", sort=False):
        found = (runs[column] - runs[f"{column}_shared"]).to_list()
        mean, low, high = t_interval(found)
        rows.append(
            {
                "arm": name,
                "n": len(runs),
                "rate": runs["rate"].iloc[0],
                "shared": runs["rate_shared"].iloc[0],
                column: runs[column].mean(),
                f"{column}_shared": runs[f"{column}_shared"].mean(),
                "difference": mean,
                "ci_low": low,
                "ci_high": high,
            }
        )
    return pd.DataFrame(rows)


def edges(trials: Path, rates: pd.Series) -> list[str]:
    """Arms whose rate is the smallest or largest that was tried: a wider list may have a better.

    Args:
        trials: ``tune.json``.
        rates: chosen, by arm.

    Raises:
        RecordError: no such file, or not of ``regimes tune``.
    """
    try:
        inputs.add(trials)
        rows = json.loads(trials.read_text(encoding="utf-8"))["trials"]
        tried: dict[str, list[float]] = {}
        for row in rows:
            settings = dict(text.split("=") for text in row["values"].split(" "))
            tried.setdefault(row["schedule"], []).append(float(settings["optimizer.lr"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise RecordError(f"{trials} is no tune.json with trials of optimizer.lr") from None
    return [
        str(arm)
        for arm, rate in rates.items()
        if arm in tried and rate in (min(tried[str(arm)]), max(tried[str(arm)]))
    ]


# -- numbers to text -------------------------------------------------------------------------


def arms_as_text(rows: pd.DataFrame, shown: Metric) -> Table:
    """What `table` found, rounded."""
    digits = shown.digits
    lines = [
        (
            row["arm"],
            f"{row['rate']:g}",
            str(row["n"]),
            f"{row[shown.name]:.{digits}f} {_ends(row, digits, '')}",
            _share(row["floats_of_dense"]),
            _share(row["bytes_of_dense"]),
        )
        for row in rows.to_dict("records")
    ]
    heads = ("arm", "rate", "n", f"{shown.heading} [95 %]", "floats, of dense", "bytes")
    return Table(heads, lines)


def differences_as_text(pairs: pd.DataFrame, shown: Metric) -> Table:
    """What `comparisons` or `moments` found, rounded."""
    digits = shown.digits
    lines = [
        (
            row["arm"],
            row["control"],
            str(row["n"]),
            f"{row['difference']:+.{digits}f} {_ends(row, digits, '+')}",
            p_text(row["p"]),
            p_text(row["p_holm"]),
        )
        if row["n"]
        else (row["arm"], row["control"], "0", "other floats", "", "")
        for row in pairs.to_dict("records")
    ]
    heads = ("arm", "minus, at its floats", "n", f"{shown.unit} [95 %]", "p", "p (Holm)")
    return Table(heads, lines, texts=2)


def beside_as_text(rows: pd.DataFrame, shown: Metric) -> Table:
    """What `beside` found, rounded."""
    digits = shown.digits
    lines = [
        (
            row["arm"],
            str(row["n"]),
            f"{row['rate']:g}",
            f"{row[shown.name]:.{digits}f}",
            f"{row[f'{shown.name}_shared']:.{digits}f}",
            f"{row['difference']:+.{digits}f} {_ends(row, digits, '+')}",
        )
        for row in rows.to_dict("records")
    ]
    heads = (
        "arm",
        "n",
        "own rate",
        shown.heading,
        f"at {rows['shared'].iloc[0]:g}",
        f"own - shared, {shown.unit} [95 %]",
    )
    return Table(heads, lines)


def _ends(row: dict[Any, Any], digits: int, sign: str) -> str:
    alike = "[all alike]" if row["n"] > 1 else ""
    return interval_text(row["ci_low"], row["ci_high"], f"{sign}.{digits}f") or alike


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def figure(runs: Sequence[Record]) -> tuple[Figure, pd.DataFrame]:
    """The fronts of these runs, and what is drawn; errors as `entries`."""
    each = entries(runs)
    return tournament_figure.figure(table(each, tested_by(runs[0])), runs[0], NETWORKS)


def main(
    records: Path, trials: Path | None = None, shared: Path | None = None, out: Path | None = None
) -> list[Path]:
    """Draw the fronts of the tournament under RECORDS and print its tables.

    Args:
        records: a folder of runs, or an archive of them.
        trials: tune.json of what chose the rates: says which lie at the edge of what was tried.
        shared: the same arms and seeds, all at one rate: set beside these.
        out: folder for the figure; default figures/NAME.
    """
    files, runs = Files(records, out), load_all(records)
    each, shown = entries(runs), tested_by(runs[0])
    rows = table(each, shown)
    pairs = {"differences": comparisons(each, shown), "moments": moments(each, shown)}
    others = beside(each, entries(load_all(shared)), shown.name) if shared else None
    console = stdout.console(highlight=False)
    texts = [arms_as_text(rows, shown)]
    texts += [differences_as_text(found, shown) for found in pairs.values() if len(found)]
    if others is not None:
        texts.append(beside_as_text(others, shown))
        files.table("shared", others)
    for text in texts:
        console.print(text.drawn(), "")
    if trials and (far := edges(trials, rows.set_index("arm")["rate"])):
        console.print(f"at the edge of the rates that were tried: {', '.join(far)}")
    files.figure("tournament", tournament_figure.figure(rows, runs[0], NETWORKS))
    files.table("arms", rows)
    for name, found in pairs.items():
        files.table(name, found)
    about = f"{style.setting(runs[0])}."
    files.text("tables.md", "\n\n".join((about, *(t.markdown() for t in texts))) + "\n")
    return files.said()
