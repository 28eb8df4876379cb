"""Figure 2 (and 1, 18-20): what compression costs inside and outside the critical regimes.

Run, then draw (2 minutes and 10 seconds on two cores)::

    regimes ablate smoke --seeds 5
    regimes figure 2 runs/smoke

- 2a: the gradient norm per layer falls fast in the critical windows (paper, section 4.1).
- 2b: low compression in the critical windows alone is enough; high compression in them is not
  made up for by sending everything elsewhere. ACCORDION finds the windows. The controls spend
  their traffic at another time.
- The levels that ACCORDION chose, per layer and epoch (appendix).
- The table: accuracy, traffic, and paired differences between schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import seaborn as sns

from regimes.plotting import canvas, panels, style
from regimes.plotting.groups import in_roles
from regimes.plotting.looks import LOOKS, Metric, style_of
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import (
    add_headline,
    describe_difference,
    names_of,
    spoken_name,
    write_answer,
)
from regimes.records import Record, load_all, unit_name

from ..common.command import Files, Out, Records
from ..common.compare import (
    LAST,
    Groups,
    compare_pair,
    compressed_layers,
    critical_windows,
    group_runs,
    norms,
    schedules,
    summarise_reached,
    table,
    tested_by,
)
from ..common.names import FIGURE2
from .curves import name_ends, tabulate_curves, tabulate_ends
from .figure18_20 import layer_name, level_map

RECOVER, DAMAGE = "Low compression where it is critical", "High compression where it is critical"
PANELS = {  # the two halves of the argument; schedules that no figure knows go to the first
    RECOVER: ("low", "high", "low-in-critical", "accordion", "low-early", "low-late"),
    DAMAGE: ("dense", "low", "high-in-critical", "dense-deleted"),
}


# -- the figures -----------------------------------------------------------------------------


def figure2a(runs: Iterable[Record], schedule: str = "low") -> style.Drawing:
    """Gradient norm per layer against epoch, and the numbers drawn."""
    by_schedule = group_runs(runs, [schedule])
    chosen, critical = by_schedule[schedule], critical_windows(by_schedule)
    numbers, layers, config = norms(chosen), compressed_layers(chosen[0]), chosen[0].config
    unit = unit_name(config).partition(" ")[0]
    colours = sns.color_palette("viridis", len(layers) + 1)[: len(layers)]  # the last is too pale
    with style.theme():
        fig = style.figure(3.3)
        ax = fig.add_subplot()
        style.shade_windows(ax, critical)
        style.mark_decays(ax, chosen[0])
        for (depth, rows), colour in zip(numbers.groupby("depth"), colours, strict=True):
            positive = rows["norm"].where(rows["norm"] > 0)
            i, width = int(str(depth)), 1.4 if len(layers) <= 14 else 0.8
            dash = ("-", (0, (5, 1)), (0, (1.5, 1)))[i % 3]
            ax.plot(
                rows["epoch"],
                positive,
                color=colour,
                linestyle=dash,
                linewidth=width,
                label=layer_name(layers[i]),
            )
        ax.set(xlabel=unit_name(config), ylabel=f"gradient norm ({config['signal']})")
        ax.margins(x=0.01)
        style.log_axis(ax)
        size = 7.5 if len(layers) <= 30 else 4.5
        columns = 1 if len(layers) <= 14 else 2
        said = _fall(numbers, critical, unit)
        if canvas.is_stacked(fig):
            fig.legend(loc="outside upper left", ncols=columns, fontsize=size)
            fig.make_room(math.ceil(len(layers) / columns), size)
            add_headline(fig, said)
        else:
            title = "layer, from input to output"
            fig.legend(loc="outside right upper", title=title, ncols=columns, fontsize=size)
            if not canvas.keep_text(fig, headline=said):
                ax.set_title(said, loc="left", fontsize=9.5, pad=13)
        shaded = "Shaded: the hand-made critical windows. " if critical else ""
        style.add_caption(
            fig,
            f"Norm of a layer's gradient accumulated over one {unit} (signal "
            f"{config['signal']!r}), schedule {schedule!r}, mean over "
            f"{style.seeds_in_words([len(chosen)])}; layers from input to output. {shaded}"
            f"{style.describe_setting(chosen[0])}.",
        )
    return style.Drawing(fig, numbers)


def figure2b(runs: Iterable[Record], half: str | None = None) -> style.Drawing:
    """Accuracy against epoch and against floats, per schedule, and the numbers drawn.

    Args:
        half: RECOVER or DAMAGE; default both, in a column of a paper the first that there is.
    """
    every = group_runs(runs, FIGURE2)
    strangers = tuple(name for name in every if name not in LOOKS)
    shown_here = {*strangers, *sum(PANELS.values(), ())}
    by_schedule = {name: group for name, group in every.items() if name in shown_here}
    numbers, last, one = (
        tabulate_curves(by_schedule),
        tabulate_ends(by_schedule),
        by_schedule["low"][0],
    )
    shown, said = tested_by(one), names_of(by_schedule)
    asked = _halves(by_schedule, strangers)
    if half is None and _in_column():
        half = next(iter(asked))
    if half is not None:
        asked = {half: asked[half]}
    with style.theme():
        fig = style.figure(3.3 * len(asked))
        if canvas.is_stacked(fig):
            fig.set_figheight(fig.highest)
        grid = fig.add_gridspec(len(asked), 1, hspace=0.04)
        places = [fig.add_subfigure(grid[i]) for i in range(len(asked))]
        for (title, drawn), place in zip(asked.items(), places, strict=True):
            left, right = canvas.subplots(place, 1, 2, sharey=True)
            style.shade_windows(left, critical_windows(by_schedule))
            style.mark_decays(left, one)
            part = numbers[numbers["schedule"].isin(drawn)]
            for ax, against in ((left, "epoch"), (right, "floats")):
                panels.draw_curves(ax, against, part, last, shown, said, marks=ax is right)
                panels.format_axis(ax, against, last, one.config)
            cut = panels.set_limits(left, numbers, shown, last)
            left.set_ylabel(shown.axis)
            name_ends(right, "floats", last[last["schedule"].isin(drawn)], shown, said)
            if place.legends:  # the layout makes no room for both
                place.legends[0].set_title(title)
                place.legends[0].get_title().set_fontsize(8.5)
                place.legends[0].set_alignment("left")
            else:
                place.suptitle(title, x=0.012, ha="left", fontsize=8.5)
        counts = [len(group) for group in by_schedule.values()]
        shaded = "Shaded: the hand-made critical windows. " if critical_windows(by_schedule) else ""
        sooner = one.config["epochs"] - by_schedule.get("dense-deleted", [one])[0].config["epochs"]
        early = f"The last control decays {sooner} epochs earlier. " if sooner else ""
        left_out = "The axes leave out the first epochs. " if cut else ""
        most = max(map(len, asked.values()))
        add_headline(fig, _claim(by_schedule, shown, said))
        style.add_caption(
            fig,
            f"Mean over {style.seeds_in_words(counts)}; "
            f"{style.intervals_in_words(counts, most)}. {shaded}"
            "Right: the same curves; a large marker is the end of training. "
            f"{left_out}{early}{_rates(by_schedule)}{style.describe_setting(one)}.",
        )
    parts = {"curve": numbers, "end": last}
    tables = [rows.assign(part=part) for part, rows in parts.items()]
    return style.Drawing(fig, pd.concat(tables, ignore_index=True))


def _in_column() -> bool:
    """Is a figure as narrow as a column, which has no room for both halves?"""
    return (canvas.current_options().width or style.WIDTH) < canvas.COLUMN


def _halves(by_schedule: Groups, strangers: Sequence[str]) -> dict[str, list[str]]:
    """The schedules of each half that has something to compare: more than low compression."""
    drawn = {RECOVER: [*PANELS[RECOVER], *strangers], DAMAGE: [*PANELS[DAMAGE]]}
    there = {title: [n for n in names if n in by_schedule] for title, names in drawn.items()}
    return {title: names for title, names in there.items() if {*names} - {"low"}}


def _claim(by_schedule: Groups, shown: Metric, said: Mapping[str, str]) -> str:
    """What the windows are worth: low compression in them alone, against high throughout and
    against as much of it at the start; high compression in them, against none."""
    config = by_schedule["low"][0].config
    low, high = (spoken_name(name, config) for name in ("low", "high"))
    parts = []
    if gap := _gap(by_schedule, "low-in-critical", "high", shown):
        alone = f"{low} in the shaded epochs alone"
        parts.append(describe_difference(alone, f"{high} throughout", gap, shown, beats=True))
    if parts and (gap := _gap(by_schedule, "low-in-critical", "low-early", shown)):
        control = f"{low} in the first ones alone"
        parts.append(describe_difference("it", control, gap, shown, beats=True))
    if gap := _gap(by_schedule, "high-in-critical", "dense", shown):
        there = f"{high} in the shaded epochs, and none elsewhere,"
        parts.append(describe_difference(there, "no compression", gap, shown, numbers=True))
    if not parts:
        return write_answer(by_schedule, shown, said)
    return "; ".join(part if not i else _lower(part) for i, part in enumerate(parts))


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _gap(by_schedule: Groups, a: str, b: str, shown: Metric) -> MeanInterval | None:
    """``a`` minus ``b`` over common seeds; None where one is not there."""
    if a not in by_schedule or b not in by_schedule:
        return None
    _, by_run = summarise_reached([*by_schedule[a], *by_schedule[b]])
    return MeanInterval.at(compare_pair(by_run, a, b, shown), "difference")


def _rates(by_schedule: Groups) -> str:
    """Which schedule has which learning rate, where they differ."""
    by_rate: dict[float, list[str]] = {}
    for name, runs in by_schedule.items():
        by_rate.setdefault(runs[0].rate, []).append(style_of(name).label)
    said = (f"{rate:g} ({'; '.join(labels)})" for rate, labels in sorted(by_rate.items()))
    return f"Learning rates: {', '.join(said)}. " if len(by_rate) > 1 else ""


def _fall(numbers: pd.DataFrame, critical: Sequence[Sequence[int]], unit: str) -> str:
    """A sentence: how far the norm of the layers falls in the first window, or where there is none
    in the first unit, and after it."""
    wide = numbers.pivot(index="epoch", columns="layer", values="norm")
    begin, stop = critical[0] if critical else (0, 1)
    if not begin < stop < len(wide):
        return "The gradient norm of each layer"
    first, then = (
        float((wide.iloc[end] / wide.iloc[start].where(wide.iloc[start] > 0)).median())
        for start, end in ((begin, stop), (stop, -1))
    )
    if not math.isfinite(first) or not math.isfinite(then):
        return "The gradient norm of each layer"
    return (
        f"The gradient norm of a layer {_times(first)} in the first "
        f"{'window' if critical else unit},\nand "
        f"{_times(then)} after it (median)"
    )


def _times(ratio: float) -> str:
    """How a number changes by a factor.

    >>> _times(0.2), _times(1.5), _times(0.99), _times(5e-324)
    ('falls to 1 / 5.0', 'grows to 1.5 times', 'stays as it is', 'falls to 0')
    """
    if ratio < 1e-9:
        return "falls to 0"
    if abs(math.log(ratio)) < math.log(1.05):  # 1.0 or 1 / 1.0
        return "stays as it is"
    return f"grows to {ratio:.1f} times" if ratio > 1 else f"falls to 1 / {1 / ratio:.1f}"


# -- the command -----------------------------------------------------------------------------


def main(records: Records, out: Out = None) -> list[Path]:
    """Draw Figure 2 and its table, also of the schedules of a tournament, each at its own rate."""
    files, runs = Files(records, out), schedules(load_all(records))
    about = (
        f"{style.describe_setting(runs[0])}. Accuracy: mean of the last {LAST} epochs; mean ± "
        "sd over "
        "seeds. Floats: the paper's count. Differences: paired over seeds, in points of accuracy."
    )
    files.compared(table(runs), about)
    there = {run.name for run in in_roles(runs, FIGURE2)}
    files.figure("figure2a", figure2a(runs))
    files.figure("figure2b", figure2b(runs))
    if _in_column() and {*PANELS[DAMAGE]} & there - {"low"}:
        files.figure("figure2b-damage", figure2b(runs, DAMAGE))
    if "accordion" in there:
        files.figure("levels", level_map(runs))
    return files.print_paths()
