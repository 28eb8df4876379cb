"""Panels that several figures have: values over learning rates, and differences line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from regimes.plotting import style
from regimes.plotting.looks import Look
from regimes.statistics import t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_rates(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row per value of ``rate``: n, mean and 95 % t interval of a column over its seeds; nan
    where a seed's value is not finite."""
    rows = []
    for rate, seeds in runs.groupby("rate"):
        values = seeds[column].to_list()
        known = all(map(math.isfinite, values))
        mean, low, high = t_interval(values) if known else (math.nan,) * 3
        rows.append({"rate": rate, "n": len(values), "mean": mean, "ci_low": low, "ci_high": high})
    return pd.DataFrame(rows)


def draw_over_rates(ax: Axes, points: pd.DataFrame, look: Look) -> None:
    """A curve of ``over_rates`` with its intervals."""
    bars = [points["mean"] - points["ci_low"], points["ci_high"] - points["mean"]]
    ax.errorbar(
        points["rate"],
        points["mean"],
        np.nan_to_num(bars),
        label=look.label,
        elinewidth=0.6,
        **look.line,
    )


def rates_axis(ax: Axes) -> None:
    """Rates over their logarithm, few of them written out."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def draw_forest(ax: Axes, ends: pd.DataFrame, filled: Sequence[bool]) -> None:
    """A value and its interval per line, from the top, beside a dotted 0.

    Args:
        ends: columns value, low and high; without an interval, nan.
        filled: which markers are.
    """
    ax.axvline(0, color="black", linewidth=0.8, linestyle=style.DOTTED)
    for place, (row, full) in enumerate(zip(ends.to_numpy(), filled, strict=True)):
        value, low, high = row
        ax.errorbar(
            value,
            place,
            xerr=np.nan_to_num([[value - low], [high - value]]),
            marker="o",
            color="black",
            markersize=4,
            markerfacecolor="black" if full else "white",
            capsize=2,
            elinewidth=0.9,
        )
    ax.set_ylim(len(ends) - 0.5, -0.5)
