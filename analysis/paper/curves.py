"""Metric against epoch, floats and seconds: the plot of Figures 1 and 5-17.

Run a grid, then draw (10 seconds)::

    regimes ablate small --seeds 5
    regimes figure curves runs/small --schedules low high accordion --x epoch floats

Mean and 95 % t interval over seeds. What a schedule has reached at its end is a marker with error
bars, against floats and seconds; against epochs only where that is the only panel. Schedules, and
seeds of one, may end after different numbers of epochs (Figure 8: as many floats, not as many
epochs). ``--published`` draws the authors' logs beside runs of the same setting. `figures` says
which figure of the paper is which grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from regimes.base.errors import require
from regimes.plotting import canvas, panels, style
from regimes.plotting.curves import CLOCK as CLOCK
from regimes.plotting.curves import has_metric, tabulate_curves, tabulate_ends
from regimes.plotting.curves import training_seconds as training_seconds
from regimes.plotting.groups import decay_epochs, in_roles, measured_metric, typical_run
from regimes.plotting.looks import Metric
from regimes.plotting.said import MeanInterval
from regimes.plotting.schedules import pairs_of
from regimes.plotting.words import (
    LAST,
    add_headline,
    describe_difference,
    label_ends,
    names_of,
    spoken_name,
    write_answer,
)
from regimes.records import Record, load_all, run_length, unit_name

from ..common import compare, markov
from ..common.command import Files, Out, Records
from ..common.compare import Groups
from . import published as logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Against = Literal["epoch", "floats", "seconds"]
MOST = 12  # schedules that have their names at the ends of their curves


# -- the figure ------------------------------------------------------------------------------


def figure(
    runs: Iterable[Record],
    *,
    schedules: Sequence[str] = (),
    x: Sequence[Against] = ("epoch", "floats"),
    column: str | None = None,
    overlay: bool = False,
    baseline: str | None = None,
) -> style.Drawing:
    """One panel per ``x``, one curve per schedule, and the numbers drawn.

    Args:
        schedules: which ones; default all there are.
        column: "train_loss", "test_loss" or the metric of the runs, which is the default.
        overlay: the authors' logs of the same setting, against epochs.
        baseline: the schedule that the title compares with.

    Raises:
        RecordError: see `compare.group_runs`; no such column; no such logs; no such baseline.
    """
    by_schedule = compare.group_runs(runs, schedules, only=bool(schedules))
    if baseline is not None:
        pairs_of(list(by_schedule), baseline)  # raises unless it is one of them
    one = next(iter(by_schedule.values()))[0]
    shown = measured_metric(one, column) if column else compare.tested_by(one)
    numbers, last = tabulate_curves(by_schedule, shown), tabulate_ends(by_schedule, shown)
    authors = logs.of(one, shown) if overlay else None
    names = names_of(by_schedule)
    with style.theme():
        fig = style.figure(3.7)
        axes = fig.subplots(1, len(x), sharey=True, squeeze=False)[0]
        for ax, against in zip(axes, x, strict=True):
            # schedules that end at the same epoch would have their markers over each other
            marks = against != "epoch" or len(x) == 1
            panels.draw_curves(ax, against, numbers, last, shown, names, marks)
            if authors is not None and against == "epoch":
                logs.overlay(ax, authors[authors["schedule"].isin(by_schedule)], shown)
            panels.format_axis(ax, against, last, typical_run(by_schedule).config)
            if against == "epoch":
                style.shade_windows(ax, compare.critical_windows(by_schedule))
                style.mark_decays(ax, typical_run(by_schedule))
        axes[0].set_ylabel(shown.axis)
        cut = panels.set_limits(axes[0], numbers, shown, last)
        if shown == compare.tested_by(one):
            for ax in axes:
                markov.mark(ax, one, "y")
        _name_curves(fig, axes, x, last, shown, names)
        answer = None if baseline else alone_enough(by_schedule, shown, schedules)
        add_headline(fig, answer or write_answer(by_schedule, shown, names, baseline))
        style.add_caption(fig, words(by_schedule, x, authors is not None, cut))
    parts = {"curve": numbers, "end": last, "authors": authors}
    drawn = [frame.assign(part=part) for part, frame in parts.items() if frame is not None]
    return style.Drawing(fig, pd.concat(drawn, ignore_index=True))


def alone_enough(by_schedule: Groups, shown: Metric, asked: Sequence[str]) -> str | None:
    """Figure 1's question where its schedules are asked for: is low compression in the critical
    windows alone as good as throughout?"""
    a, b = "low-in-critical", "low"
    if not {a, b} <= {*asked} & {*by_schedule}:
        return None
    low = spoken_name(b, by_schedule[b][0].config)
    _, by_run = compare.summarise_reached([*by_schedule[a], *by_schedule[b]])
    gap = MeanInterval.at(compare.compare_pair(by_run, a, b, shown), "difference")
    alone = f"{low} in the shaded epochs alone"
    return describe_difference(alone, f"{low} throughout", gap, shown, numbers=True)


def _name_curves(
    fig: canvas.Canvas,
    axes: Sequence[Axes],
    x: Sequence[Against],
    last: pd.DataFrame,
    shown: Metric,
    names: Mapping[str, str],
) -> None:
    """Name the schedules at the ends of the last panel's curves; more than `MOST` in a legend."""
    if len(last) > MOST:
        at = list(x).index("epoch") if "epoch" in x else 0
        handles, labels = axes[at].get_legend_handles_labels()
        columns = canvas.legend_columns(labels, style.WIDTH, 3)
        fig.make_room(math.ceil(len(labels) / columns), 7.5)
        fig.legend(handles, labels, loc="outside upper left", handlelength=4, ncols=columns)
        return
    name_ends(axes[-1], x[-1], last, shown, names)


def name_ends(
    ax: Axes, against: str, last: pd.DataFrame, shown: Metric, names: Mapping[str, str]
) -> None:
    """Write the schedules' names right of a panel, joined to the ends of their curves."""
    looks = panels.named_looks(last["schedule"], names)
    ends = [
        (float(row[against]), float(row[shown.name]), looks[row["schedule"]])
        for row in last.to_dict("records")
        if math.isfinite(row[shown.name])
    ]
    label_ends(ax, [(x, y, look.label, look) for x, y, look in ends])


def words(by_schedule: Groups, x: Sequence[str], overlay: bool = False, cut: bool = False) -> str:
    """The caption.

    Args:
        cut: whether the axis leaves out values.
    """
    one, counts = typical_run(by_schedule), [len(runs) for runs in by_schedule.values()]
    parts = [
        f"Mean over {style.seeds_in_words(counts)}; "
        f"{style.intervals_in_words(counts, len(counts), 'epoch' in x)}; a large marker is the "
        f"{'last value' if one.hooked else 'end of training'}"
    ]
    if compare.critical_windows(by_schedule) and "epoch" in x:
        parts.append("Shaded: the hand-made critical windows")
    notes: dict[str, list[str]] = {}
    names = names_of(by_schedule)
    for name, runs in by_schedule.items():
        for note in _describe_differences(runs, one):
            notes.setdefault(note, []).append(names[name])
    by_labels: dict[str, list[str]] = {}
    for note, labels in notes.items():
        by_labels.setdefault(" and ".join(labels), []).append(note)
    parts += [f"{labels}: {', '.join(several)}" for labels, several in by_labels.items()]
    if "seconds" in x:
        world = one.header["world"]
        plural = "es" if world["processes"] > 1 else ""
        parts.append(
            f"Seconds: compute, compression and communication of {world['processes']} "
            f"process{plural} on {world.get('device', 'cpu')}"
        )
    parts.append(f"In the title: means over the last {LAST} units")
    if cut:
        parts.append("The axis leaves out the first values")
    if overlay:
        parts.append("Thin: the authors' logs, one seed")
    return ". ".join([*parts, f"{markov.caption(one)}{style.describe_setting(one)}."])


def _describe_differences(runs: Sequence[Record], one: Record) -> list[str]:
    """What a reader should know of a schedule that was not trained like most."""
    said = []
    decays = decay_epochs(runs[0])
    if decays != decay_epochs(one):
        said.append(f"decays at epoch {', '.join(map(str, decays)) or 'none'}")
    rate, common = runs[0].rate, one.rate
    if rate != common and math.isfinite(rate) and math.isfinite(common):
        said.append(f"learning rate {rate:g}, in place of {common:g}")
    meant, usual = style.describe_levels(runs[0].config), style.describe_levels(one.config)
    if meant != usual:
        said.append(meant)
    lengths = sorted({len(run.epochs) for run in runs})
    if lengths != [run_length(one.header, one.rows)]:
        spelt = " to ".join(map(str, dict.fromkeys([lengths[0], lengths[-1]])))
        rest = "; the curve goes as far as all seeds" if len(lengths) > 1 else ""
        said.append(f"{spelt} {unit_name(one.config).partition(' ')[0]}s{rest}")
    return said


# -- the command -----------------------------------------------------------------------------


def main(
    records: Records,
    out: Out = None,
    x: tuple[Against, ...] = ("epoch", "floats"),
    metric: str | None = None,
    schedules: tuple[str, ...] = (),
    baseline: str | None = None,
    published: bool = False,
    name: str = "curves",
) -> list[Path]:
    """Draw curves from the records under RECORDS and print the table of their ends, if they were
    tested.

    Args:
        x: one panel for each.
        metric: a column of the epochs, e.g. test_loss; default what the runs were tested by.
        schedules: which ones; default all.
        baseline: the schedule that the title and the table compare the others with; default all
            pairs of up to six.
        published: draw the authors' logs of the same setting beside the runs.
        name: of the files.
    """
    require(bool(x), "--x", (), "epoch, floats or seconds, one or several")
    files, runs = Files(records, out), in_roles(load_all(records), schedules)
    options: Any = {"schedules": schedules, "x": x, "column": metric, "baseline": baseline}
    files.figure(name, figure(runs, overlay=published, **options))
    runs = [run for run in runs if not schedules or run.name in schedules]
    if all(has_metric(run, compare.tested_by(run)) for run in runs):
        tables = compare.table(runs, needed=(), all_pairs=True, baseline=baseline)
        files.compared(tables, f"{style.describe_setting(runs[0])}.", f"{name}-")
    return files.print_paths()
