"""One panel of curves, for the report and the study."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from regimes.plotting import style
from regimes.plotting.looks import Look, styles_of
from regimes.plotting.metrics import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"floats": "floats sent (the paper's count)", "seconds": "seconds of training"}
LONG = 100  # epochs from which lines are thinner
WIDE = 4  # from this ratio an axis is logarithmic: of the schedules' ends, of a metric's values


def fill(ax: Axes, against: str, numbers: pd.DataFrame, last: pd.DataFrame, shown: Metric) -> None:
    """One curve per schedule: mean and band against epochs, otherwise the mean alone. More than
    `style.MANY` curves are thin, with fewer markers and without bands.

    Args:
        against: "epoch", "floats" or "seconds".
        numbers, last: of `curves.curves` and `curves.ends`.
    """
    looks = styles_of(numbers["schedule"])
    many = len(looks) > style.MANY
    for name, look in looks.items():
        rows = numbers[numbers["schedule"] == name].dropna(subset=[shown.name])
        every = max(1, len(rows) // (3 if many else 8))
        first = sum(map(ord, name)) % every  # so that markers of two schedules do not coincide
        line = look.line if against == "epoch" else {**look.line, "marker": ""}
        line["linewidth"] *= 0.6 if len(rows) > LONG or many else 1.0
        ax.plot(rows[against], rows[shown.name], markevery=(first, every), label=look.label, **line)
        if against == "epoch" and not many:
            floor = rows["ci_low"].clip(lower=rows[shown.name].min() / 10 if shown.log else None)
            band: Any = {"color": look.colour, "alpha": 0.12, "linewidth": 0}
            ax.fill_between(rows["epoch"], floor, rows["ci_high"], **band)
        _end(ax, against, last[last["schedule"] == name].iloc[0], look, shown)
    extremes = numbers[against].agg(["min", "max"])  # epochs without a value included
    ax.update_datalim([(x, 0.0) for x in extremes], updatey=False)
    ax.autoscale_view()


def _end(ax: Axes, against: str, end: pd.Series, look: Look, shown: Metric) -> None:
    """A large marker where training ends, with the intervals of both means."""
    ranges = ((shown.name, "ci_high"), (against, f"{against}_ci_high"))
    half = [0.0 if math.isnan(end[high]) else end[high] - end[key] for key, high in ranges]
    bar = {**look.line, "markersize": 1.5 * look.line["markersize"], "linestyle": "", "zorder": 9}
    ax.errorbar(end[against], end[shown.name], half[0], half[1], capsize=2.5, elinewidth=1, **bar)


def overlay(ax: Axes, rows: pd.DataFrame, shown: Metric) -> None:
    """The authors' logs (`published.of`): thin, black, with the dashes of our schedules."""
    for name, look in styles_of(rows["schedule"]).items():
        log, label = rows[rows["schedule"] == name], f"{look.label}: authors' log"
        thin: Any = {"color": "black", "linewidth": 0.6, "alpha": 0.8, "zorder": 5}
        ax.plot(log["epoch"], log[shown.name], linestyle=look.dash, label=label, **thin)


def format_axis(ax: Axes, against: str, last: pd.DataFrame, config: dict[str, Any]) -> None:
    """Label, margins and scale of the x axis.

    Args:
        config: of one of the runs, for the name of their units.
    """
    ax.set_xlabel(style.unit_of(config) if against == "epoch" else LABELS[against])
    ax.margins(x=0.02)
    if against == "epoch":
        ax.locator_params(axis="x", integer=True)
        return
    if last[against].max() > WIDE * last[against].min() > 0:
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.set_xlim(left=0)
    if against == "floats":
        ax.xaxis.set_major_formatter(EngFormatter(sep="\N{NO-BREAK SPACE}"))


def limits(
    ax: Axes, numbers: pd.DataFrame, shown: Metric, last: pd.DataFrame | None = None
) -> None:
    """The y axis, with room for all curves and for the intervals at their ends. An accuracy stays
    inside 0 to 100 %. A logarithmic metric leaves out first epochs that are more than three times
    as high as any end."""
    ranges = [numbers[shown.name], *([last["ci_low"], last["ci_high"]] if last is not None else [])]
    seen = pd.concat(ranges).dropna()
    low, high = float(seen.min()), float(seen.max())
    if not math.isfinite(low) or not math.isfinite(high):  # a record's 1e308, as a percentage
        return
    if shown.log:
        low = max(low, float(numbers[shown.name].min()) / 2)
        high = high if last is None else min(high, 3 * float(last[shown.name].max()))
        if high > WIDE * low:
            style.log_axis(ax)
        ax.set_ylim(0.93 * low, 1.05 * high)
    elif shown.name == "accuracy":
        ax.set_ylim(max(0.0, low - 4), min(101.0, high + 4))
