"""Seconds of a step against the bandwidth of the slow link, one labelled line per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regimes.base.errors import ConfigError
from regimes.plotting import style
from regimes.plotting.words import add_headline, move_apart
from regimes.records import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = {1e6: "1 Mbit/s", 1e8: "100 Mbit/s", 1e10: "10 Gbit/s", 1e12: "1 Tbit/s"}
APART = 0.058  # of the axis, between two labels
KINDS = ("png", "svg", "pdf")
DASHES = ("-", (0, (6, 1.2)), (0, (2, 1)), (0, (4, 1, 1, 1)))


def save_bandwidth(
    path: Path, numbers: pd.DataFrame, table: pd.DataFrame, here: float, title: str, about: str
) -> None:
    """Draw the seconds of a step against the bandwidth of the slow link, into a file.

    Raises:
        ConfigError: the name ends with none of `KINDS`.
    """
    kind = path.suffix.removeprefix(".")
    if kind not in KINDS:
        raise ConfigError(f"--figure {path}: expected a name that ends with .png, .svg or .pdf")
    with style.theme():
        content = style.render_figure(_draw_bandwidth(numbers, table, here, title, about), kind)
    write_output(path, content)


def _draw_bandwidth(
    numbers: pd.DataFrame, table: pd.DataFrame, here: float, title: str, about: str
) -> Figure:
    """One panel: a line per method; a ring where it crosses the line of dense; the user's
    bandwidth.

    Args:
        numbers: method, bandwidth (bits/s), seconds; the first method is the dense one.
        table: method, break_even (bits/s).
        here: bits/s.
        title: which method is fastest there.
        about: the job, in words.
    """
    fig = style.figure(4.6)
    ax = fig.subplots()
    names = list(dict.fromkeys(numbers["method"]))
    for i, name in enumerate(names):
        rows = numbers[numbers["method"] == name]
        colour, dash = ("black", "-") if i == 0 else (f"C{i % 10}", DASHES[i % len(DASHES)])
        ax.plot(rows["bandwidth"], rows["seconds"], color=colour, linestyle=dash, linewidth=1.3)
    ax.set(xscale="log", yscale="log", ylabel="seconds of a step (lower is better)")
    ax.set(xlabel="bandwidth of the slow link")
    ax.set_xticks(list(TICKS), list(TICKS.values()))
    ax.margins(x=0)
    style.log_axis(ax)
    # the crossings with the dense line, and the user's bandwidth
    dense = numbers[numbers["method"] == names[0]]
    low, high = ax.get_xlim()
    known = table.loc[table["break_even"].between(low, high), "break_even"]
    seconds = np.interp(np.log(known), np.log(dense["bandwidth"]), dense["seconds"])
    ax.plot(known, seconds, "o", markerfacecolor="white", markeredgecolor="#333333", markersize=4)
    if low <= here <= high:
        ax.axvline(here, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)))
    _label_lines(ax, numbers, names)
    add_headline(fig, title)
    style.add_caption(
        fig,
        f"{about}. Predicted, not measured. Rings: below this bandwidth the "
        "method is faster than dense. Vertical line: the bandwidth of the job.",
    )
    return fig


def _label_lines(ax: Axes, numbers: pd.DataFrame, names: Sequence[str]) -> None:
    """Names at the left ends of the lines, moved apart where they would overlap."""
    first = numbers.groupby("method", sort=False)["seconds"].first()
    bottom, top = (np.log(edge) for edge in ax.get_ylim())
    order = sorted(names, key=lambda name: float(first[name]))
    ends = np.array([(np.log(first[name]) - bottom) / (top - bottom) for name in order])
    for name, end, at in zip(order, ends, move_apart(ends, APART), strict=True):
        colour = "black" if name == names[0] else f"C{names.index(name) % 10}"
        ax.annotate(
            name,
            xy=(0, end),
            xytext=(-0.05, at),
            xycoords="axes fraction",
            ha="right",
            va="center",
            fontsize=7,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (1, 0.5)},
        )
    ax.yaxis.tick_right()
    ax.yaxis.set_label_position("right")
