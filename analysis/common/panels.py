"""A panel that several figures have: values over learning rates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from regimes.plotting.looks import Look, Metric

from .estimates import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_rates(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row per value of ``rate``: n, mean and 95 % t interval of a column over its seeds; nan
    where a seed's value is not finite."""
    rows = []
    for rate, seeds in runs.groupby("rate"):
        values = seeds[column].to_list()
        finite = values if all(map(math.isfinite, values)) else []
        rows.append({"rate": rate, "n": len(values)} | estimate(finite, "mean", alone=True))
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


def hold(ax: Axes, points: pd.DataFrame, metric: Metric) -> None:
    """A linear y axis that holds the means: intervals may leave it: a few bad runs have some that
    go below 0 % or far above all losses."""
    low, high = float(points["mean"].min()), float(points["mean"].max())
    room = 0.06 * (high - low)
    top = min(101.0, high + room) if metric.name == "accuracy" else high + room
    if math.isfinite(room) and room > 0:
        ax.set_ylim(low - room, top)


def rates_axis(ax: Axes) -> None:
    """Rates over their logarithm, few of them written out."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())
