"""Figures 4b, 5 and 10: the batch size as the level.

Run, then draw (10 minutes on two cores, and some seconds)::

    regimes ablate small-batch --seeds 5 --jobs 2
    regimes figure batch runs/small-batch --schedules small-batch accordion-batch smith

Above: the panels of `curves`. Below: the decisions, as samples per step of all workers together,
and the learning rate, which is scaled with them (section 5.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.ticker import NullLocator

from regimes.base.errors import RecordError
from regimes.plotting import canvas, panels, style
from regimes.plotting.groups import in_roles
from regimes.plotting.looks import Metric, styles_of
from regimes.plotting.said import MeanInterval
from regimes.plotting.schedules import summarise_reached
from regimes.plotting.words import add_headline, describe_difference, names_of, write_answer
from regimes.records import Record, load_all

from ..common import compare
from ..common.command import Files, Out, Records
from ..common.compare import Groups
from . import curves as lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECIDED = {"batch": "samples per step", "lr": "learning rate"}


def decided(by_schedule: Groups) -> pd.DataFrame:
    """Per schedule, seed and epoch: batch (samples per step, all workers), lr, steps.

    Raises:
        RecordError: a hook's record has no batch size.
    """
    parts = []
    for name, runs in by_schedule.items():
        for run in runs:
            rows = run.epochs[["epoch", "lr", "steps"]].assign(schedule=name, seed=run.seed)
            if run.epochs["batch_size"].isna().any():
                raise RecordError(f"{run.folder} does not say what its batch size was")
            rows["batch"] = run.config["workers"] * run.epochs["batch_size"]
            parts.append(rows)
    return pd.concat(parts, ignore_index=True)[
        ["schedule", "seed", "epoch", "batch", "lr", "steps"]
    ]


def figure(runs: Iterable[Record], *, schedules: Sequence[str] = ()) -> style.Drawing:
    """Metric against epoch and floats; batch size and learning rate against epoch, but in a column.

    Args:
        schedules: which ones; default all there are.

    Raises:
        RecordError: see `compare.group_runs`.
    """
    by_schedule = compare.group_runs(runs, schedules, only=bool(schedules))
    shown = compare.tested_by(next(iter(by_schedule.values()))[0])
    numbers, last, steps = (
        lines.tabulate_curves(by_schedule),
        lines.tabulate_ends(by_schedule),
        decided(by_schedule),
    )
    names = names_of(by_schedule)
    with style.theme():
        fig = style.figure(5.4)
        short = canvas.is_stacked(fig) and fig.plain  # no room for what was decided
        grid = fig.subplots(1 if short else 2, 2, height_ratios=[3, 2][: 2 - short], squeeze=False)
        for ax, against in zip(grid[0], ("epoch", "floats"), strict=True):
            panels.draw_curves(ax, against, numbers, last, shown, names, marks=against == "floats")
            panels.format_axis(ax, against, last, lines.typical_run(by_schedule).config)
            cut = panels.set_limits(ax, numbers, shown, last)
            ax.set_ylabel(shown.axis)
        lower = [] if short else list(grid[1])
        for ax, (column, label) in zip(lower, DECIDED.items(), strict=False):
            _step(ax, steps, column)
            ax.set(xlabel=grid[0, 0].get_xlabel(), ylabel=label)
            ax.margins(x=0.02)
        for ax in (grid[0, 0], *lower):
            style.shade_windows(ax, compare.critical_windows(by_schedule))
            style.mark_decays(ax, lines.typical_run(by_schedule), labelled=ax is grid[0, 0])
        lines.name_ends(grid[0, 1], "floats", last, shown, names)
        add_headline(fig, _claim(by_schedule, shown, names))
        below = "" if short else "Below, thin: each seed; thick: the median. "
        style.add_caption(fig, below + lines.words(by_schedule, ("epoch", "floats"), cut=cut))
    parts = [numbers.assign(part="curve"), last.assign(part="end")]
    return style.Drawing(fig, pd.concat(parts))


def _claim(by_schedule: Groups, shown: Metric, names: Mapping[str, str]) -> str:
    """What small batches in the windows alone reach, beside small batches throughout; without both
    the curves' own answer."""
    few = {n: by_schedule[n] for n in ("small-batch", "small-in-critical") if n in by_schedule}
    if len(few) < 2:
        return write_answer(by_schedule, shown, names)
    _, by_run = summarise_reached([run for runs in few.values() for run in runs])
    row = compare.compare_pair(by_run, "small-in-critical", "small-batch", shown)
    gap = MeanInterval.at(row, "difference")
    alone = "a small batch in the shaded epochs alone"
    return describe_difference(alone, "a small batch throughout", gap, shown, numbers=True)


def _step(ax: Axes, steps: pd.DataFrame, column: str) -> None:
    """Each seed thin, the median thick, on a logarithmic axis with ticks at what occurs."""
    for name, look in styles_of(steps["schedule"]).items():
        rows = steps[steps["schedule"] == name]
        for _, one in rows.groupby("seed"):
            ax.step(
                one["epoch"], one[column], where="mid", color=look.colour, linewidth=0.5, alpha=0.6
            )
        middle = rows.groupby("epoch")[column].median()
        ax.step(
            middle.index,
            middle,
            where="mid",
            color=look.colour,
            linestyle=look.dash,
            linewidth=look.width,
        )
    ax.set_yscale("log")
    if column == "batch":
        sizes = _apart(sorted(steps["batch"].unique()), 2 if canvas.is_stacked(ax.figure) else 1.3)
        ax.set_yticks(sizes, [f"{size:,}" for size in sizes])
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        style.log_axis(ax)


def _apart(sizes: Sequence[int], times: float) -> list[int]:
    """The sizes far enough apart for a label: each at least so many times the one before."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= times * kept[-1]:
            kept.append(size)
    return kept


def main(
    records: Records,
    out: Out = None,
    schedules: tuple[str, ...] = (),
    name: str = "batch",
) -> list[Path]:
    """Draw schedules of the batch size from the records under RECORDS and print their table.

    Args:
        schedules: which ones; default all.
        name: of the files.
    """
    files, runs = Files(records, out), in_roles(load_all(records), schedules)
    files.figure(name, figure(runs, schedules=schedules))
    chosen = [run for run in runs if not schedules or run.name in schedules]
    tables = compare.table(chosen, needed=(), all_pairs=True)
    files.compared(tables, f"{style.describe_setting(chosen[0])}.", f"{name}-")
    by_schedule = compare.group_runs(runs, schedules, only=bool(schedules))
    files.table(f"{name}-decided", decided(by_schedule))
    return files.print_paths()
