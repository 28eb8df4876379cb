"""Plots a column of the epochs, one curve per schedule: for the report and `regimes.plot`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import RecordError, suggest_nearest
from regimes.plotting import canvas, panels, style
from regimes.plotting.curves import has_metric, tabulate_curves, tabulate_ends
from regimes.plotting.groups import (
    Groups,
    critical_windows,
    differing_methods,
    measured_metric,
    tested_by,
    typical_run,
)
from regimes.plotting.looks import Metric
from regimes.plotting.schedules import read_given
from regimes.plotting.words import LAST, add_headline, names_of, write_answer
from regimes.records import Record

WIDTH = 4.8  # inches: letters are legible on a phone
Against = Literal["epoch", "floats"]
Records = str | Path | Record | Iterable[str | Path | Record]
TRAFFIC = Metric("bytes", "MB sent by a worker in an epoch", "MB", "MB", 1e-6)
SENT = Metric("total_bytes", "MB sent by a worker so far", "MB", "MB", 1e-6)
FLOATS = Metric("total_floats", "million floats sent so far", "M floats", "M floats", 1e-6)
PERIOD = Metric("period", "steps between synchronisations", "period", "steps")
BATCH = Metric("batch_size", "batch per worker", "batch", "samples")
COLUMNS = {metric.name: metric for metric in (TRAFFIC, SENT, FLOATS, PERIOD, BATCH)}


@overload
def plot(
    records: Records,
    column: str | None = None,
    against: Against = "epoch",
    where: Sequence[str] = (),
    *,
    ax: None = None,
) -> style.Shown: ...


@overload
def plot(
    records: Records,
    column: str | None = None,
    against: Against = "epoch",
    where: Sequence[str] = (),
    *,
    ax: Axes,
) -> Figure: ...


@check_arguments(error=RecordError)
def plot(
    records: Records,
    column: str | None = None,
    against: Against = "epoch",
    where: Sequence[str] = (),
    *,
    ax: Axes | None = None,
) -> style.Shown | Figure:
    """Draws runs: one curve per schedule, the mean over seeds with its 95 % interval.

    >>> shown = plot("data/reference/smoke-resnet8.tar.xz", "train_loss")
    >>> _ = shown.save("loss.png")

    Args:
        records: A folder of runs, an archive of them, or runs; or several of these.
        column: The column of ``Record.epochs`` that is drawn, such as "train_loss" or "bytes". By
            default it is the metric by which the runs were tested.
        against: The x axis: "epoch" (the units), or "floats" (those sent so far).
        where: Only runs for which this holds, such as ``["optimizer.lr=0.4"]``.
        ax: The axes of a figure of yours, into which the curves and a legend are drawn, without
            title and caption. By default a new figure is made.

    Returns:
        The figure. It has its numbers as ``.data``, and ``.save(path)`` writes both. With ``ax``
        this is your own figure.

    Raises:
        RecordError: there is no run, the runs have different settings, or they lack the column.
    """
    by_schedule = read_given(records, where)
    example = typical_run(by_schedule)
    metric = tested_by(example)
    if column is not None:
        metric = COLUMNS.get(column) or measured_metric(example, column)
    if against not in ("epoch", "floats"):
        raise RecordError(f'against = {against!r}: expected "epoch" or "floats"')
    for runs in by_schedule.values():
        if not all(has_metric(run, metric) for run in runs):
            known = suggest_nearest(metric.name, map(str, runs[0].epochs.columns))
            raise RecordError(f"{runs[0].folder} has no column {metric.name!r}, {known}")
    if ax is not None:
        _draw_curves(ax, by_schedule, against, metric, example)
        ax.legend(handlelength=3.2)
        whole = ax.figure.canvas.figure
        assert whole is not None  # axes that are drawn into are in one
        return whole
    fig, outside = draw_lines(by_schedule, against, metric, example)
    counts = [len(runs) for runs in by_schedule.values()]
    spread = style.intervals_in_words(counts, len(counts), against == "epoch")
    many = f"Means over {style.seeds_in_words(counts)}; {spread}"
    shape = "One seed a curve" if max(counts) == 1 else many
    cut = ". The axis leaves out the first values" if outside else ""
    differ = differing_methods(by_schedule)
    arms = f" Schedules differ in {differ}." if differ else ""
    with style.theme():
        add_headline(fig, write_answer(by_schedule, metric, names_of(by_schedule)))
        style.add_caption(
            fig,
            f"{shape}; in the title means over the last {LAST} units{cut}.{arms}",
        )
    parts = {
        "curve": tabulate_curves(by_schedule, metric),
        "end": tabulate_ends(by_schedule, metric),
    }
    tables = [numbers.assign(part=part) for part, numbers in parts.items()]
    fig.data = pd.concat(tables, ignore_index=True)
    return fig


def draw_lines(
    by_schedule: Groups, against: str, metric: Metric, example: Record
) -> tuple[style.Shown, bool]:
    """Draw the figure without headline and caption; returns also whether values are outside of its
    axis.

    Args:
        example: the configuration and decays of this run stand for all.
    """
    with style.theme():
        fig = style.figure(2.7 + 0.17 * ((len(by_schedule) + 1) // 2), WIDTH)
        ax = fig.add_subplot()
        outside = _draw_curves(ax, by_schedule, against, metric, example)
        handles, labels = ax.get_legend_handles_labels()
        columns = canvas.legend_columns(labels, WIDTH, 2)
        place: Any = "outside upper left"
        fig.legend(handles, labels, loc=place, handlelength=3.2, columnspacing=1, ncols=columns)
    return fig, outside


def _draw_curves(
    ax: Axes, by_schedule: Groups, against: str, metric: Metric, example: Record
) -> bool:
    """One curve per schedule; returns whether values are outside of the axis."""
    numbers, last = tabulate_curves(by_schedule, metric), tabulate_ends(by_schedule, metric)
    outside = False
    panels.draw_curves(ax, against, numbers, last, metric, names_of(by_schedule))
    panels.format_axis(ax, against, last, example.config)
    ax.set_ylabel(metric.axis)
    if metric not in (TRAFFIC, BATCH):
        outside = panels.set_limits(ax, numbers, metric, last)
    elif numbers[metric.name].max() > panels.WIDE * numbers[metric.name].min():
        style.log_axis(ax)
    else:
        ax.set_ylim(bottom=0)
    if against == "epoch":
        style.shade_windows(ax, critical_windows(by_schedule))
        style.mark_decays(ax, example)
    return outside
