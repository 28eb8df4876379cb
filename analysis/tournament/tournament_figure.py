"""The figure of `tournament`: the metric against floats, bytes and predicted seconds."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator

from regimes.console.units import human
from regimes.plotting import style
from regimes.plotting.groups import tested_by

from ..grids import names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regimes.records import Record

LADDERS = {  # controls of one kind, by their floats
    **names.LADDERS,
    "period": names.PERIODS,
    "event": names.EVENTS,
}
LINES: dict[str, dict[str, Any]] = {  # of the controls, distinguished without colour
    "static": {"linestyle": "-", "marker": "o", "label": "the same rank throughout, and dense"},
    "first": {"linestyle": "--", "marker": "^", "label": "rank 4 first, then rank 1"},
    "last": {"linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v", "label": "rank 1, then rank 4"},
    "coin": {"linestyle": ":", "marker": "x", "label": "rank 4 or 1 by a coin"},
    "event": {"linestyle": "-.", "marker": "", "label": "rank 4 at the event, which it knows"},
    "period": {"linestyle": "-", "marker": "s", "label": "the same period throughout"},
}
GREY, INK = "#8a8a8a", "#0b3c6f"
CONTROLS = frozenset(  # but those that know an event, which are held against the others, too
    name for kind, ladder in LADDERS.items() if kind != "event" for name in ladder
)


def kinds(arms: set[str]) -> list[str]:
    """Kinds of control with two runs or more, one of them of that kind alone: ranks 1 and 4
    throughout are ends of other ladders, too."""
    static = {*LADDERS["static"]}
    own = {
        kind: {*ladder} - (static if kind != "static" else set())
        for kind, ladder in LADDERS.items()
    }
    return [
        kind for kind, ladder in LADDERS.items() if len(arms & {*ladder}) > 1 and arms & own[kind]
    ]


def front(cost: Sequence[float], reached: Sequence[float], lower: bool) -> list[bool]:
    """Which arms are on the Pareto front: no other arm is better in one and at least equal in the
    other.

    >>> front([1, 2, 3], [90, 95, 94], lower=False)
    [True, True, False]
    """
    sign = 1 if lower else -1
    points = [(c, sign * value) for c, value in zip(cost, reached, strict=True)]
    return [not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points) for a in points]


def figure(rows: pd.DataFrame, run: Record, networks: Sequence[str]) -> tuple[Figure, pd.DataFrame]:
    """A panel per cost, the controls as lines and each contestant as a letter; and what is drawn.

    Args:
        rows: of `tournament.table`.
        run: any of them, for the setting.
    """
    shown = tested_by(run)
    costs = {"floats": "floats of a run", "bytes": "bytes that each worker sends"}
    costs |= {text: f"s on {text.replace(',', ', ')} (predicted)" for text in networks}
    contestants = [arm for arm in rows["arm"] if arm not in CONTROLS]
    letters = dict(zip(contestants, string.ascii_uppercase, strict=False))
    numbers = []
    with style.theme():
        fig = style.figure(5.4)
        panels = list(fig.subplots(2, 3, sharey=True).flat)
        for ax, (column, words) in zip(panels, costs.items(), strict=False):
            on = front(rows[column].to_list(), rows[shown.name].to_list(), shown.lower)
            numbers.append(_numbers(rows, column, shown.name, on))
            _controls(ax, rows, column, shown.name)
            _contestants(ax, rows, column, shown.name, letters)
            _front(ax, rows[on], column, shown.name)
            ax.set(xscale="log", xlabel=words)
            ax.xaxis.set_major_locator(_ticks(rows[column].max() / rows[column].min()))
            ax.xaxis.set_major_formatter(lambda value, _: _tick(value))
            ax.xaxis.set_minor_locator(NullLocator())
        for ax in panels[::3]:
            ax.set_ylabel(shown.label)
        _legend(panels[-1], letters, {*rows["arm"]})
        style.caption(fig, _caption(rows, run))
    return fig, pd.concat(numbers, ignore_index=True)


def _numbers(rows: pd.DataFrame, column: str, metric: str, on: Sequence[bool]) -> pd.DataFrame:
    points = rows[["arm", "n", column, metric, "ci_low", "ci_high"]].rename(
        columns={column: "cost"}
    )
    return points.assign(panel=column, front=list(on))


def _controls(ax: Axes, rows: pd.DataFrame, column: str, metric: str) -> None:
    at = rows.set_index("arm")
    for kind in kinds({*rows["arm"]}):
        points = at.loc[[name for name in LADDERS[kind] if name in at.index]]
        look = {key: value for key, value in LINES[kind].items() if key != "label"}
        ax.plot(points[column], points[metric], color=GREY, linewidth=1, markersize=4, **look)


def _contestants(
    ax: Axes, rows: pd.DataFrame, column: str, metric: str, letters: dict[str, str]
) -> None:
    for row in rows.to_dict("records"):
        if row["arm"] in letters:
            ends = [[row[metric] - row["ci_low"]], [row["ci_high"] - row[metric]]]
            look: dict[str, Any] = {"marker": _letter(letters[row["arm"]]), "markersize": 7}
            ax.errorbar(
                row[column],
                row[metric],
                ends,
                color=INK,
                elinewidth=0.7,
                zorder=4,
                linestyle="",
                **look,
            )


def _front(ax: Axes, best: pd.DataFrame, column: str, metric: str) -> None:
    points = best.sort_values(column)
    ax.plot(
        points[column],
        points[metric],
        drawstyle="steps-post",
        color="black",
        linewidth=0.6,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=0.6,
    )


def _ticks(ratio: float) -> Locator:
    """Few ticks, of costs that differ by a ratio."""
    if ratio < 5:
        return MaxNLocator(3, steps=(1, 2, 5, 10))
    return LogLocator(subs=(1, 3) if ratio > 30 else (1, 2, 5))


def _tick(value: float) -> str:
    return human(value) if value >= 1000 else f"{value:g}"


def _letter(letter: str) -> str:
    """A marker."""
    return rf"$\mathrm{{{letter}}}$"


def _legend(ax: Axes, letters: dict[str, str], arms: set[str]) -> None:
    ax.set_axis_off()
    handles = [
        Line2D([], [], color=GREY, linewidth=1, markersize=4, **LINES[kind]) for kind in kinds(arms)
    ]
    handles += [
        Line2D([], [], color=INK, linestyle="", marker=_letter(letter), markersize=6, label=arm)
        for arm, letter in letters.items()
    ]
    handles.append(
        Line2D(
            [],
            [],
            color="black",
            linewidth=0.6,
            marker="o",
            markersize=8,
            markerfacecolor="none",
            label="Pareto front",
        )
    )
    ax.legend(handles=handles, loc="center", handlelength=2.6, labelspacing=0.35)


def _caption(rows: pd.DataFrame, run: Record) -> str:
    return (
        f"Mean of the last units, {style.seeds_in_words(rows['n'].to_list())}; every arm at its "
        "own learning rate, chosen on validation data with other seeds. Bars: 95 % t intervals. "
        "Ringed: no other arm costs as little and reaches as much. Seconds are predicted from "
        "recorded traffic and measured compute and compression (regimes.cost, ring, no overlap), "
        "without what instruments compute for a policy; bytes with what they send. "
        f"{style.setting(run)}."
    )
