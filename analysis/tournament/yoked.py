"""The control experiment: does it matter *where* ACCORDION spends its floats, or only how many?

Run, then draw (3 minutes on two cores)::

    regimes figure campaign --only smoke-controls --out runs
    regimes figure controls runs/smoke-controls

A *yoked* control sends as much as the ACCORDION run of its seed, layer by layer, at other times:
every layer has as many epochs of low compression as in that run.

- ``first``, ``last``: at the beginning or at the end of training;
- ``random``: in windows of the same lengths, placed at random, each layer by itself;
- ``layers``: every layer follows the schedule of another one. Layers differ in size, so the traffic
  of this control is only nearly the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.base.config import RunConfig, from_dict
from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.plotting.looks import Metric
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.policies.detectors.baselines import place_windows
from regimes.records import Record, load_all
from regimes.records.earlier import as_present

from ..common import compare
from ..common.command import Files, Out, Records
from ..common.estimates import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Windows = list[tuple[int, int]]
ORDERS = ("first", "last", "random", "layers")
LABELS = {
    "yoked first": "as much, in the first epochs",
    "yoked last": "as much, in the last epochs",
    "yoked random": "as much, in random windows",
    "yoked layers": "as much, layers exchanged",
    "accordion": "ACCORDION",
    "low": "low compression throughout",
    "high": "high compression throughout",
}

# -- what to run -----------------------------------------------------------------------------


def yoked(run: Record, order: str) -> RunConfig:
    """The configuration of a control for a finished ACCORDION run; its seed keys random orders.

    Raises:
        RecordError: the run is not finished, or no layer of it was at low compression.
    """
    if not run.finished:
        raise RecordError(f"{run.folder} is not finished: a control needs all its epochs")
    windows, epochs = low_windows(run), len(run.rows)
    if not any(windows.values()):
        raise RecordError(f"{run.folder} was never at low compression: there is nothing to move")
    layers = {name: _moved(order, name, windows, epochs, run.seed) for name in windows}
    config = from_dict(RunConfig, as_present(run.config))
    name = f"yoked {order}"
    return replace(config, name=name, policy={"name": "windows", "layers": layers})


def low_windows(run: Record) -> dict[str, Windows]:
    """Per compressed layer, the maximal windows ``[first, stop)`` of epochs at low compression."""
    windows = {}
    for i, layer in enumerate(run.header["layers"]):
        if layer["compressed"]:
            low = [row["layers"]["level"][i] == "low" for row in run.rows]
            runs = [
                list(epochs) for here, epochs in groupby(range(len(low)), low.__getitem__) if here
            ]
            windows[layer["name"]] = [(epochs[0], epochs[-1] + 1) for epochs in runs]
    return windows


def _moved(order: str, layer: str, windows: dict[str, Windows], epochs: int, seed: int) -> Windows:
    lengths = [stop - first for first, stop in windows[layer]]
    total = sum(lengths)
    if order == "layers":
        names = list(windows)
        shuffled = random.Random(f"layers {seed}").sample(names, len(names))
        return windows[shuffled[(shuffled.index(layer) + 1) % len(shuffled)]]
    if not total or order == "first":
        return [(0, total)] if total else []
    if order == "last":
        return [(epochs - total, epochs)]
    return place_windows(lengths, epochs, random.Random(f"random {seed} {layer}"))


# -- the numbers and the figure --------------------------------------------------------------


def numbers(runs: Iterable[Record], base: str = "accordion") -> pd.DataFrame:
    """Per schedule: the metric with its 95 % t interval, traffic as a share of ``base``'s, and the
    difference to it paired over seeds (`compare.compare_pair`).

    Raises:
        RecordError: see `compare.group_runs`.
    """
    by_schedule = compare.group_runs(runs, [base])
    metric, by_run = compare.summarise_reached(
        [run for group in by_schedule.values() for run in group]
    )
    rows = []
    for name in [name for name in LABELS if name in by_schedule]:
        reached = estimate(by_run.loc[by_run["name"] == name, metric.name].to_list(), metric.name)
        rows.append({"schedule": name} | reached | compare.compare_pair(by_run, name, base, metric))
    return pd.DataFrame(rows)


def figure(runs: Sequence[Record]) -> style.Drawing:
    """A line per schedule, the best at the top: the metric, its paired difference to ACCORDION, and
    what it sends."""
    rows = numbers(runs)
    one = next(run for run in runs if run.name == "accordion")
    metric = compare.tested_by(one)
    rows = rows.sort_values(metric.name, ascending=metric.lower, ignore_index=True)
    rows = rows.assign(place=range(len(rows)))
    others = rows[rows["schedule"] != "accordion"]
    side = "left" if metric.lower else "right"
    with style.theme():
        fig = style.figure(3.2)
        left, middle, right = fig.subplots(1, 3, sharey=True, width_ratios=[3, 3, 2])
        _bars(left, rows, metric.name, f"{metric.name}_ci_low", f"{metric.name}_ci_high")
        middle.axvline(0, color="black", linewidth=0.8, linestyle=style.DOTTED)
        _bars(middle, others, "difference", "ci_low", "ci_high")
        right.plot(rows["traffic_ratio"], rows["place"], "D", color="black", markersize=3.5)
        left.set_yticks(rows["place"], [LABELS[name] for name in rows["schedule"]])
        left.set(ylim=(len(rows) - 0.5, -0.5), xlabel=f"{metric.label}\n{side}: better")
        middle.set_xlabel(f"minus ACCORDION ({metric.unit})\n{side}: better")
        right.set(xlabel="floats sent,\nof ACCORDION's", xlim=(0, None))
        add_headline(fig, _title(rows, metric))
        style.add_caption(
            fig,
            f"Last {compare.LAST} epochs' mean, {style.seeds_in_words(list(rows['n']))}. Middle: "
            "differences paired over seeds. Bars: 95 % t "
            "intervals. Every control sends, layer by layer, what ACCORDION sent with its seed, at "
            f"other times; with layers exchanged, nearly so. {style.describe_setting(one)}.",
        )
    return style.Drawing(fig, rows)


def _bars(ax: Axes, rows: pd.DataFrame, column: str, low: str, high: str) -> None:
    ends = np.nan_to_num([rows[column] - rows[low], rows[high] - rows[column]])
    look: Any = {"marker": "o", "markersize": 4, "linestyle": "", "capsize": 2.5, "elinewidth": 1}
    ax.errorbar(rows[column], rows["place"], xerr=ends, color="black", **look)


def _title(rows: pd.DataFrame, metric: Metric) -> str:
    """How as many floats at the start, and at the end, compare with ACCORDION's."""
    said = []
    for row in rows.to_dict("records"):
        if row["schedule"] not in ("yoked first", "yoked last"):
            continue
        when = row["schedule"].replace("yoked", "in the")
        gap = MeanInterval.at(row, "difference")
        said.append(f"{when} epochs: {gap.text(f'+.{metric.digits}f')}")
    if not said:
        return "Does it matter where ACCORDION spends its floats?"
    return f"ACCORDION's floats in other epochs, {metric.unit}: {', '.join(said)}"


def main(records: Records, out: Out = None, name: str = "controls") -> list[Path]:
    """Draw the control experiment from the records under RECORDS and print its tables.

    Args:
        name: of the files.
    """
    files, runs = Files(records, out), load_all(records)
    fig, pairs = figure(runs)
    rows, _ = compare.table(runs, needed=("accordion",))
    controls = pairs[pairs["schedule"] != "accordion"]
    files.figure(name, (fig, pairs))
    files.compared((rows, controls), f"{style.describe_setting(runs[0])}.", f"{name}-")
    return files.print_paths()
