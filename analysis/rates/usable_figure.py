"""The table and the figure of `usable`: metric, training loss and usable range by rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from regimes.base.console.tables import Table
from regimes.plotting import canvas, style
from regimes.plotting.looks import find_metric, styles_of
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline

from ..common import markov
from ..common.estimates import Row, as_table, mean, number, word
from ..common.panels import draw_over_rates, hold, over_rates, rates_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regimes.plotting.looks import Metric
    from regimes.records import Record


NO_MOMENTUM = -1.0  # stands for AdamW in comparisons, in which nan equals nothing


def as_text(rows: pd.DataFrame) -> dict[str, Table]:
    """A table per rule, rounded; ``>=`` where a seed is usable to the last rate that was tried."""
    columns = {
        "arm": word("arm"),
        "best": number("best", "g"),
        "n": word("n"),
        "from": _smallest,
        "to [95 %]": _largest,
        "of dense's": mean("of_dense", ".2g"),
    }
    return {str(rule): as_table(part, columns) for rule, part in rows.groupby("rule", sort=False)}


def _smallest(row: Row) -> str:
    beyond = "<= " if row["usable_min_beyond"] else ""
    return "" if not row["n"] else f"{beyond}{row['usable_min']:.2g}"


def _largest(row: Row) -> str:
    beyond = ">= " if row["usable_max_beyond"] else ""
    return "none" if not row["n"] else beyond + mean("usable_max", ".2g")(row)


def figure(by_run: pd.DataFrame, rows: pd.DataFrame, run: Record, shown: Metric) -> style.Drawing:
    """A row of panels for each momentum, and the means that are drawn.

    Args:
        by_run, rows: of `usable.entries` and `usable.table`.
        run: any of them, for the setting.
    """
    momenta = list(dict.fromkeys(by_run["momentum"].fillna(NO_MOMENTUM)))
    numbers, first = [], rows["rule"].iloc[0] if len(rows) else ""
    every = _looks(by_run)
    with style.theme():
        fig = style.figure(2.6 * len(momenta) + 0.5)
        crowded = canvas.is_stacked(fig) and len(momenta) > 1
        panels = (
            _below(fig, len(momenta)) if crowded else fig.subplots(len(momenta), 3, squeeze=False)
        )
        for axes, momentum in zip(panels, sorted(momenta, reverse=True), strict=True):
            part = by_run[by_run["momentum"].fillna(NO_MOMENTUM) == momentum]
            looks = {arm: look for arm, look in every.items() if arm in {*part["arm"]}}
            for ax, column in zip(axes, (shown.name, "train_loss"), strict=False):
                metric = shown if column == shown.name else find_metric(column)
                numbers.append(_curves(ax, part, metric, column, looks))
            if axes[0] is not None:
                markov.mark(axes[0], run, "y", named=False)
            ranges = rows[(rows["rule"] == first) & rows["arm"].isin(looks)]
            _ranges(axes[2], ranges, looks)
            name = "AdamW" if momentum == NO_MOMENTUM else f"SGD, momentum {momentum:g}"
            (axes[0] or axes[2]).set_title(name, loc="left")
        counts = by_run.groupby(["arm", "rate"]).size().to_list()
        legend(fig, every)
        add_headline(fig, _title(rows[rows["rule"] == first]))
        style.add_caption(fig, _caption(first, counts, run, crowded))
    return style.Drawing(fig, pd.concat(numbers, ignore_index=True))


def _below(fig: Figure, momenta: int) -> list[list[Axes | None]]:
    """The panels of one column, which has room for the ranges and one panel of curves."""
    curves, *ranges = fig.subplots(1 + momenta, 1)
    return [[curves, None, ranges[0]], *([None, None, ax] for ax in ranges[1:])]


def _looks(part: pd.DataFrame) -> dict[str, Any]:
    """The style of each arm: an arm trained with another momentum gets the style of the same arm
    with the preset's momentum."""
    short = {arm: arm.partition(", momentum")[0] for arm in dict.fromkeys(part["arm"])}
    looks = styles_of(dict.fromkeys(short.values()))
    return {arm: looks[name] for arm, name in short.items()}


def _curves(
    ax: Axes | None, part: pd.DataFrame, metric: Metric, column: str, looks: dict[str, Any]
) -> pd.DataFrame:
    drawn = []
    for arm, look in looks.items():
        points = over_rates(part[part["arm"] == arm], column)
        if ax is not None:
            draw_over_rates(ax, points, look)
        drawn.append(points.assign(panel=metric.name, arm=arm))
    if ax is None:
        return pd.concat(drawn, ignore_index=True)
    ax.set(xlabel="learning rate", ylabel=metric.axis)
    rates_axis(ax)
    hold(ax, pd.concat(drawn), metric)
    low, high = ax.get_ylim()
    # A log axis over less than a factor of 4 may have no tick at a power of ten.
    if metric.name == "train_loss" and not high < 4 * low:
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7 * float(pd.concat(drawn)["mean"].min()))
    return pd.concat(drawn, ignore_index=True)


def _ranges(ax: Axes, rows: pd.DataFrame, looks: dict[str, Any]) -> None:
    """Smallest to largest usable rate, an arm a line with its marker at the best rate; an arrow
    where all rates tried on that side are usable at a seed or more."""
    kept = rows[rows["n"] > 0]
    for y, row in enumerate(kept.to_dict("records")):
        rates = [row["usable_min"], row["best"], row["usable_max"]]
        ax.plot(rates, [y] * 3, markevery=[1], **looks[row["arm"]].line)
        for side, arrow in (("usable_min", "<"), ("usable_max", ">")):
            bars = [[row[side] - row[f"{side}_ci_low"]], [row[f"{side}_ci_high"] - row[side]]]
            if row[f"{side}_beyond"]:  # beside the end, which may be the best rate
                ax.annotate(
                    "",
                    (row[side], y),
                    (-9 if arrow == "<" else 9, 0),
                    textcoords="offset points",
                    arrowprops={"arrowstyle": "<|-", "color": "black", "linewidth": 0.8},
                )
            ax.errorbar(
                row[side],
                y,
                xerr=np.nan_to_num(bars),
                color="black",
                marker="none" if row[f"{side}_beyond"] else "|",
                markersize=5,
                elinewidth=0.8,
                capsize=2,
            )
    names = [_with_share(row, looks[row["arm"]].label) for row in kept.to_dict("records")]
    ax.set_yticks(range(len(kept)), names, fontsize=6)
    ax.set(xlabel="usable learning rates\nlonger is better")
    rates_axis(ax)
    ax.invert_yaxis()


def _with_share(row: Row, label: str) -> str:
    """The name of an arm, with its largest usable rate divided by dense's."""
    short, share = label.partition(" (")[0], row["of_dense"]
    return f"{short}: {share:.2f}" if np.isfinite(share) and short != "dense" else short


def legend(fig: Figure, looks: dict[str, Any]) -> None:
    """One legend of all panels, an entry per look."""
    lines = {look.label: Line2D([], [], label=look.label, **look.line) for look in looks.values()}
    columns = canvas.legend_columns([*lines], style.WIDTH, 4)
    place: Any = "outside upper left"
    fig.legend(handles=[*lines.values()], loc=place, ncols=columns, handlelength=3.5)


def _title(rows: pd.DataFrame) -> str:
    """Which arm's range ends the lowest, and whether it is shown to end below dense's."""
    known = rows[np.isfinite(rows["of_dense"]) & (rows["of_dense"] < 1)]
    if known.empty:
        return "No level of compression has a narrower range of usable learning rates than dense"
    with_ends = known[np.isfinite(known["of_dense_ci_high"])]
    known = known if with_ends.empty else with_ends
    row = known.loc[known["of_dense"].idxmin()]
    end = MeanInterval.at(row.drop("n", errors="ignore"), "of_dense")  # n is of all seeds
    said = f"{row['arm']} ends at {end.numbers('.2f')} of dense's"
    if end.verdict(1) == "open":
        return f"Open whether compression narrows the usable learning rates: {said}, no interval"
    if end.is_below(1):
        return f"Compression narrows the usable learning rates: {said}"
    return f"No narrower range of usable learning rates is shown: {said}"


def _caption(rule: str, counts: list[int], run: Record, crowded: bool) -> str:
    left_out = "Other curves are in the figure of two columns. " if crowded else ""
    return (
        f"Means of the last units, {style.seeds_in_words(counts)}; bars: 95 % t intervals. No "
        f"point where a run is not finite. {left_out}Right: with the marker at "
        f"the best rate, usable is {rule}; the number is the largest usable rate divided by "
        "dense's; an arrow where the "
        "range reaches the last rate that was tried, and may go on. Compression: PowerSGD by rank, "
        "or TopK, with error feedback but where it says so. "
        f"{markov.caption(run)}{style.describe_setting(run, compression=False)}."
    )
