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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from regimes.base import inputs
from regimes.base.config import DENSE
from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.cost.cases import make_cases
from regimes.cost.network import Network
from regimes.plotting import style
from regimes.plotting.groups import group_runs, tested_by
from regimes.plotting.looks import Metric
from regimes.records import Record, load_all, sum_sent

from ..common import compare
from ..common.command import Files, Out, Records
from ..common.estimates import Cell, as_table, estimate, mean, number, word
from ..common.paired import ALIKE, as_text, difference_text
from . import tournament_figure
from .equal_floats import comparisons, timings

WHOLE = ("dense", "every 1")  # arms that share each step's gradient as it is
NETWORKS = ("10Gbit/s,50us", "100Mbit/s,50us", "20Mbit/s,50ms")

# -- records to numbers ----------------------------------------------------------------------


def entries(runs: Iterable[Record], networks: Sequence[str] = NETWORKS) -> pd.DataFrame:
    """One row per run: name, seed, rate, the metric as it is shown, floats, bytes, and predicted
    seconds of the whole run on each network.

    Raises:
        RecordError: runs of different settings, an unfinished one, or one without seconds.
    """
    by_arm = group_runs(runs)
    every = [run for group in by_arm.values() for run in group]
    metric, by_run = compare.summarise_reached(every)
    by_run["rate"] = [run.rate for run in every]
    spent = {case.name: case for case in make_cases(every) if case.runs}
    for text in networks:
        network, workers = Network.parse(text), int(every[0].config["workers"])
        seconds = {
            name: sum(steps * float(work.seconds(network, workers)) for steps, work in case.epochs)
            / case.runs
            for name, case in spent.items()
        }
        by_run[text] = by_run["name"].map(seconds)
    by_run["dense_floats"] = [_dense_floats(run) for run in every]
    by_run["dense_bytes"] = [
        sum_sent(run.rows).dense_bytes(run.header) or math.nan for run in every
    ]
    uncompressed = ["dense_floats", "dense_bytes"]
    return by_run[
        ["name", "seed", "rate", metric.name, "floats", "bytes", *uncompressed, *networks]
    ]


def _dense_floats(run: Record) -> float:
    """What a run would have sent without compression; nan where its record does not say."""
    cost: Mapping[str, Any] = run.header["per_step"].get(DENSE) or {}
    return float(cost.get("floats", math.nan) * run.epochs["steps"].sum())


def table(by_run: pd.DataFrame, metric: Metric, networks: Sequence[str] = NETWORKS) -> pd.DataFrame:
    """One row per arm, from few floats to many: rate, n, metric with its 95 % t interval, and means
    of floats, bytes and seconds, the first two also as a share of dense's, or of a period of 1; of
    what dense would have sent where neither was run (nan if that is not known)."""
    rows = []
    for name, runs in by_run.groupby("name", sort=False):
        costs = runs[["floats", "bytes", *networks]].mean().to_dict()
        row = {"arm": name, "rate": runs["rate"].iloc[0], "n": len(runs)}
        rows.append(row | estimate(runs[metric.name].to_list(), metric.name, alone=True) | costs)
    by_arm = pd.DataFrame(rows).sort_values("floats", kind="stable", ignore_index=True)
    dense = by_arm[by_arm["arm"].isin(WHOLE)]
    for column in ("floats", "bytes"):
        known = by_run.get(f"dense_{column}", pd.Series([math.nan]))
        of_dense = float(dense[column].iloc[0] if len(dense) else known.mean())
        by_arm.insert(
            list(by_arm).index(column) + 1, f"{column}_of_dense", by_arm[column] / of_dense
        )
    return by_arm


def own_minus_shared(by_run: pd.DataFrame, shared: pd.DataFrame, column: str) -> pd.DataFrame:
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
    both = by_run.merge(shared, on=["name", "seed"], suffixes=("", "_shared"))
    if both.empty or len(rates) > 1:
        raise RecordError(
            f"expected the same arms and seeds, all at one rate: {len(both)} runs "
            f"are common, at {', '.join(sorted(rates))}"
        )
    rows = []
    for name, runs in both.groupby("name", sort=False):
        row = {
            "arm": name,
            "n": len(runs),
            "rate": runs["rate"].iloc[0],
            "shared": runs["rate_shared"].iloc[0],
            column: runs[column].mean(skipna=False),
            f"{column}_shared": runs[f"{column}_shared"].mean(skipna=False),
        }
        differences = (runs[column] - runs[f"{column}_shared"]).to_list()
        rows.append(row | estimate(differences, "difference", alone=True))
    return pd.DataFrame(rows)


def edges(trials: Path, rates: pd.Series) -> list[str]:
    """Arms at the smallest or largest rate that was tried: a wider list may have a better.

    Args:
        trials: ``tune.json``.
        rates: chosen, by arm.

    Raises:
        RecordError: no such file, or not of ``regimes tune``.
    """
    try:
        inputs.add_input(trials)
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


def arms_as_text(rows: pd.DataFrame, metric: Metric) -> Table:
    """`table`, rounded."""
    columns = {
        "arm": word("arm"),
        "rate": number("rate", "g"),
        "n": word("n"),
        f"{metric.heading} [95 %]": mean(metric.name, f".{metric.digits}f", ALIKE),
        "floats, of dense": _percent("floats_of_dense"),
        "bytes": _percent("bytes_of_dense"),
    }
    return as_table(rows, columns)


def _percent(column: str) -> Cell:
    return lambda row: "" if math.isnan(row[column]) else f"{100 * row[column]:.1f} %"


def differences_as_text(pairs: pd.DataFrame, metric: Metric) -> Table:
    """`comparisons` or `timings`, rounded."""
    return as_text(pairs, metric, "control, same floats", "other floats")


def own_minus_shared_as_text(rows: pd.DataFrame, metric: Metric) -> Table:
    """`own_minus_shared`, rounded."""
    columns = {
        "arm": word("arm"),
        "n": word("n"),
        "own rate": number("rate", "g"),
        metric.heading: number(metric.name, f".{metric.digits}f"),
        f"at {rows['shared'].iloc[0]:g}": number(f"{metric.name}_shared", f".{metric.digits}f"),
        f"own - shared, {metric.unit} [95 %]": difference_text(metric),
    }
    return as_table(rows, columns)


def figure(runs: Sequence[Record]) -> style.Drawing:
    """The fronts of these runs, and what is drawn; errors as `entries`."""
    by_run, shown = entries(runs), tested_by(runs[0])
    pairs = comparisons(by_run, shown)
    return tournament_figure.figure(table(by_run, shown), runs[0], NETWORKS, pairs)


def main(
    records: Records, trials: Path | None = None, shared: Path | None = None, out: Out = None
) -> list[Path]:
    """Draw the fronts of the tournament under RECORDS and print its tables.

    Args:
        trials: tune.json of what chose the rates: says which lie at the edge of what was tried.
        shared: the same arms and seeds, all at one rate: compared with these.
    """
    files, runs = Files(records, out), load_all(records)
    by_run, metric = entries(runs), tested_by(runs[0])
    rows = table(by_run, metric)
    pairs = {"differences": comparisons(by_run, metric), "timings": timings(by_run, metric)}
    texts = [arms_as_text(rows, metric)]
    texts += [differences_as_text(table, metric) for table in pairs.values() if len(table)]
    if shared:
        differences = own_minus_shared(by_run, entries(load_all(shared)), metric.name)
        texts.append(own_minus_shared_as_text(differences, metric))
        files.table("shared", differences)
    files.page("tables", f"{style.describe_setting(runs[0])}.", *texts)
    if trials and (far := edges(trials, rows.set_index("arm")["rate"])):
        print(f"at the edge of the rates that were tried: {', '.join(far)}")
    drawn = tournament_figure.figure(rows, runs[0], NETWORKS, pairs["differences"])
    files.figure("tournament", drawn)
    files.table("arms", rows)
    for name, pair_rows in pairs.items():
        files.table(name, pair_rows)
    return files.print_paths()
