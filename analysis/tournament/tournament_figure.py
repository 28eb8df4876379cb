"""The figure of `tournament`: a line per arm, the best at the top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from regimes.base.console.units import format_quantity
from regimes.plotting import canvas, style
from regimes.plotting.groups import tested_by
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline

from ..common import markov, names
from ..common.paired import ALPHA, are_shown, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regimes.plotting.looks import Metric
    from regimes.records import Record

LADDERS = {**names.LADDERS, "period": names.PERIODS}  # controls of one kind, by their floats
BLIND = {"static": "a constant rank", "period": "a constant period"}  # what needs no schedule
SLOW = "100Mbit/s,50us"  # the network whose seconds are drawn
GREY, INK = "#8a8a8a", "#0b3c6f"
CONTROLS = frozenset(name for ladder in LADDERS.values() for name in ladder)


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


def figure(
    rows: pd.DataFrame, run: Record, networks: Sequence[str], pairs: pd.DataFrame
) -> style.Drawing:
    """A line per arm, from the best to the worst: the metric; the difference to the simplest
    control at the same floats; floats and bytes; seconds on a slow network. And what is drawn.

    Args:
        rows: of `tournament.table`.
        run: any of them, for the setting.
        networks: of ``rows``; the seconds of `SLOW`, or of the first, are drawn.
        pairs: of `equal_floats.comparisons`.
    """
    shown, kind = tested_by(run), _simplest({*rows["arm"]})
    rows = rows.sort_values(shown.name, ascending=shown.lower, kind="stable", ignore_index=True)
    rows = rows.assign(place=range(len(rows)), control=rows["arm"].isin(CONTROLS))
    network = SLOW if SLOW in networks else networks[0]
    against = rows[["arm", "place"]].merge(pairs[pairs["control"] == kind], on="arm")
    against = against[against["n"] > 0].reset_index(drop=True)
    with style.theme():
        fig = style.figure(1.9 + 0.165 * len(rows))
        ratios = [3, 3] if canvas.is_stacked(fig) else [3, 3, 3, 2.4]
        axes = fig.subplots(1, len(ratios), sharey=True, width_ratios=ratios)
        _metric(axes[0], rows, shown)
        markov.mark(axes[0], run, "x")
        _against(axes[1], against, shown, BLIND[kind])
        if len(axes) > 2:  # a page has no room for four with a line for each arm
            _traffic(axes[2], rows)
            _seconds(axes[3], rows, network)
        axes[0].set_yticks(range(len(rows)), [names.spoken(arm) for arm in rows["arm"]], fontsize=7)
        for label, control in zip(axes[0].get_yticklabels(), rows["control"], strict=True):
            label.set_color("#666666" if control else "black")
        axes[0].set_ylim(len(rows) - 0.5, -0.5)
        add_headline(fig, _title(against, shown, BLIND[kind]))
        style.add_caption(fig, _caption(rows, run, BLIND[kind], network))
    return style.Drawing(fig, _numbers(rows, against, shown, network))


def _simplest(arms: set[str]) -> str:
    """The kind of control that the others are held against: the first that was run."""
    return next((kind for kind in kinds(arms) if kind in BLIND), "static")


def _numbers(
    rows: pd.DataFrame, against: pd.DataFrame, shown: Metric, network: str
) -> pd.DataFrame:
    """What is drawn: a row per arm and panel."""
    metric = rows.rename(columns={shown.name: "value"})
    parts = {shown.name: metric[["arm", "place", "n", "value", "ci_low", "ci_high"]]}
    columns = ["arm", "place", "n", "difference", "ci_low", "ci_high", "p_holm"]
    parts["difference"] = against[columns].rename(columns={"difference": "value"})
    for name, column in (
        ("floats", "floats_of_dense"),
        ("bytes", "bytes_of_dense"),
        (network, network),
    ):
        factor = 1.0 if name == network else 100.0
        parts[name] = rows[["arm", "place", "n"]].assign(value=factor * rows[column])
    return pd.concat([part.assign(panel=name) for name, part in parts.items()], ignore_index=True)


def _metric(ax: Axes, rows: pd.DataFrame, shown: Metric) -> None:
    for control, colour in ((False, INK), (True, GREY)):
        part = rows[rows["control"] == control]
        bars = [part[shown.name] - part["ci_low"], part["ci_high"] - part[shown.name]]
        look: Any = {"marker": "s" if control else "o", "markersize": 4, "linestyle": ""}
        ends = np.nan_to_num(bars)
        ax.errorbar(part[shown.name], part["place"], xerr=ends, color=colour, capsize=2, **look)
    ax.set_xlabel(shown.axis.replace("lower is", "left:").replace("higher is", "right:"))
    ax.xaxis.set_major_locator(MaxNLocator(4))


def _against(ax: Axes, rows: pd.DataFrame, shown: Metric, control: str) -> None:
    """Filled where the difference survives correction."""
    ax.axvline(0, color="black", linewidth=0.8, linestyle=style.DOTTED)
    for row, full in zip(rows.to_dict("records"), are_shown(rows), strict=True):
        ends = [row["difference"] - row["ci_low"]], [row["ci_high"] - row["difference"]]
        ax.errorbar(
            row["difference"],
            row["place"],
            xerr=np.nan_to_num(ends),
            color=INK,
            marker="o",
            markersize=4,
            markerfacecolor=INK if full else "white",
            capsize=2,
        )
    side = "left" if shown.lower else "right"
    ax.set_xlabel(f"minus {control}\nat its floats ({shown.unit})\n{side}: better")
    ax.xaxis.set_major_locator(MaxNLocator(4))


def _traffic(ax: Axes, rows: pd.DataFrame) -> None:
    """Bytes where they are more than the floats: what a policy's instruments send."""
    for column, look in (
        ("bytes_of_dense", {"markerfacecolor": "white", "markersize": 6.5}),
        ("floats_of_dense", {"markersize": 3.5}),
    ):
        ax.plot(100 * rows[column], rows["place"], "o", color=INK, linestyle="", **look)
    marks = "\N{BLACK CIRCLE} floats   \N{WHITE CIRCLE} bytes"
    ax.set(xscale="log", xlabel=f"sent, of dense's (%)\n{marks}\nleft: cheaper")
    values = pd.concat([rows["floats_of_dense"], rows["bytes_of_dense"]]).dropna()
    _few_ticks(ax, float(values.max() / values.min()) if len(values) else 1.0)


def _seconds(ax: Axes, rows: pd.DataFrame, network: str) -> None:
    ax.plot(rows[network], rows["place"], "D", color=INK, markersize=3.5)
    ax.set(xscale="log", xlabel=f"predicted seconds\n{network.replace(',', ', ')}\nleft: faster")
    _few_ticks(ax, rows[network].max() / rows[network].min())


def _few_ticks(ax: Axes, ratio: float) -> None:
    if ratio < 5:
        ax.xaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))
    else:
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if ratio > 30 else (1, 2, 5)))
    ax.xaxis.set_major_formatter(
        lambda value, _: format_quantity(value) if value >= 1000 else f"{value:g}"
    )
    ax.xaxis.set_minor_locator(NullLocator())


def _title(against: pd.DataFrame, shown: Metric, control: str) -> str:
    """Which arms are better than the control at their floats, after correction."""
    sign = -1 if shown.lower else 1
    if len(against) and {*verdicts(against)} == {"open"}:
        seeds = MeanInterval.at(against.iloc[0], "difference").seeds
        return (
            f"Open whether a schedule of {len(against)} beats {control} with as many floats{seeds}"
        )
    sure = against[are_shown(against)]
    better = [names.spoken(arm) for arm in sure.loc[sign * sure["difference"] > 0, "arm"]]
    worse = int((sign * sure["difference"] < 0).sum())
    lose = f"; {worse} of {len(against)} lose to it" if worse else ""
    if not len(against):
        return f"No arm sends as much as {control} does"
    if not better:
        return f"No schedule of {len(against)} is shown to beat {control} with as many floats{lose}"
    said = " and ".join(better) if len(better) < 3 else f"{len(better)} of {len(against)} schedules"
    return f"{said} beat{'s' if len(better) == 1 else ''} {control} with as many floats{lose}"


def _caption(rows: pd.DataFrame, run: Record, control: str, network: str) -> str:
    return (
        f"Mean of the last units, {style.seeds_in_words(rows['n'].to_list())}, the best arm at the "
        "top; every arm at its own learning rate, chosen on validation data with other seeds. "
        "Bars: 95 % t intervals. Grey: controls, which measure nothing. Second panel: minus what "
        f"{control} reaches with as many floats (interpolated); filled: p < {ALPHA} after Holm's "
        f"correction. Seconds on {network.replace(',', ', ')} are predicted from recorded traffic "
        "and measured compute and compression (regimes.cost, ring, no overlap). "
        f"{markov.caption(run)}{style.describe_setting(run)}."
    )
