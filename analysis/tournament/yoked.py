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
from typing import TYPE_CHECKING

import pandas as pd

from regimes.config import RunConfig, from_dict
from regimes.detectors.baselines import place
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.plotting.looks import style_of
from regimes.records import Record, load_all

from ..common import compare
from ..common.command import Files, Out, Records
from ..common.estimates import estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    config = from_dict(RunConfig, run.config)
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
    return place(lengths, epochs, random.Random(f"random {seed} {layer}"))


# -- the numbers and the figure --------------------------------------------------------------


def numbers(runs: Iterable[Record], base: str = "accordion") -> pd.DataFrame:
    """Per schedule: the metric with its 95 % t interval, traffic as a share of ``base``'s, and the
    difference to it paired over seeds (`compare.pair`).

    Raises:
        RecordError: see `compare.groups`.
    """
    by_schedule = compare.groups(runs, [base])
    metric, by_run = compare.reached([run for group in by_schedule.values() for run in group])
    rows = []
    for name in [name for name in LABELS if name in by_schedule]:
        reached = estimate(by_run.loc[by_run["name"] == name, metric.name].to_list(), metric.name)
        rows.append({"schedule": name} | reached | compare.pair(by_run, name, base, metric))
    return pd.DataFrame(rows)


def figure(runs: Sequence[Record]) -> tuple[Figure, pd.DataFrame]:
    """Accuracy against traffic, and each schedule's paired difference to ACCORDION."""
    rows = numbers(runs)
    one = next(run for run in runs if run.name == "accordion")
    metric = compare.tested_by(one)
    looks = {name: style_of(name, i) for i, name in enumerate(rows["schedule"])}
    with style.theme():
        fig = style.figure(3.2)
        left, right = fig.subplots(1, 2)
        for row in rows.to_dict("records"):
            bar = {**looks[row["schedule"]].line, "linestyle": "", "capsize": 2.5, "elinewidth": 1}
            half = row[f"{metric.name}_high"] - row[metric.name]
            left.errorbar(row["traffic_ratio"], row[metric.name], half, **bar)
        controls = rows[rows["schedule"] != "accordion"].iloc[::-1].to_dict("records")
        for y, row in enumerate(controls):
            bar = {**looks[row["schedule"]].line, "linestyle": "", "capsize": 2.5, "elinewidth": 1}
            right.errorbar(row["difference"], y, xerr=row["ci_high"] - row["difference"], **bar)
        left.set(xlabel="floats sent, of ACCORDION's", ylabel=metric.label)
        right.axvline(0, color="black", linewidth=0.8)
        right.set_yticks(range(len(controls)), [LABELS[row["schedule"]] for row in controls])
        right.set(ylim=(-0.6, len(controls) - 0.4), xlabel=f"minus ACCORDION ({metric.unit})")
        style.caption(
            fig,
            f"Last {compare.LAST} epochs' mean, {style.seeds_in_words(list(rows['n']))}. Left: "
            "ACCORDION is the star. Right: differences paired over seeds. Bars: 95 % t "
            "intervals. Every control sends, layer by layer, what ACCORDION sent with its seed, at "
            f"other times; with layers exchanged, nearly so. {style.setting(one)}.",
        )
    return fig, rows


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
    files.compared((rows, controls), f"{style.setting(runs[0])}.", f"{name}-")
    return files.print_paths()
