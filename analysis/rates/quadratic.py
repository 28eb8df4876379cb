"""The largest stable rate of a quadratic with compressed gradients: computed, and simulated.

Draw it; no records are needed (seconds on one core)::

    regimes figure quadratic

Computed: one direction; its gradient passes through a linear filter (`quadratic_model`).
Simulated: a matrix of directions of different curvature, with PowerSGD's power iteration and
residual. Two questions: does the simulated limit agree with the limit of a filter that sends the
same share of the energy, and does either predict what a network does (`regimes figure mechanism`)?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from regimes.base.config import DENSE, Level
from regimes.base.console.tables import Table
from regimes.plotting import style
from regimes.plotting.looks import SPARE
from regimes.plotting.words import add_headline

from ..common.command import Files, Out
from ..common.estimates import Cell, as_table, number, word
from .quadratic_model import COLUMNS, FILTERS, ROWS, STEPS, computed, simulated

MOMENTA = (0.0, 0.5, 0.9)  # Nesterov's, as in the presets
PERIODS = (1, 2, 3, 4, 6, 8, 12, 16)  # steps between synchronisations
LEVELS: tuple[Level, ...] = (DENSE, 4, 2, 1)
WITH, WITHOUT = "PowerSGD", "no feedback"
BESIDE = ("delayed", "in turns", "low-pass")  # filters whose limits the table has

# -- numbers ---------------------------------------------------------------------------------


def energy(name: str, period: int) -> float:
    """Mean share of the energy of gradient and residual that a filter sends in a step. A delay
    sends all of an older gradient: of it, one step in ``period``."""
    return 1 - (1 - 1 / period) ** 2 if name == "low-pass" else 1 / period


def lines(momenta: Sequence[float] = MOMENTA, periods: Sequence[int] = PERIODS) -> pd.DataFrame:
    """One row per filter, period and momentum: the share of the energy sent, and the largest
    stable rate times the curvature."""
    return pd.DataFrame(
        [
            {
                "how": name,
                "level": f"p = {period}",
                "momentum": momentum,
                "share": energy(name, period),
                "limit": computed(name, period, momentum),
            }
            for momentum in momenta
            for name in FILTERS
            for period in periods
        ]
    )


def points(momenta: Sequence[float] = MOMENTA, levels: Sequence[Level] = LEVELS) -> pd.DataFrame:
    """The largest stable rates of PowerSGD on a matrix, with and without error feedback; the
    curvature is the largest."""
    rows = []
    for momentum in momenta:
        for name, feedback in ((WITH, True), (WITHOUT, False)):
            for level in levels:
                most, share = simulated(level, momentum, feedback)
                word = DENSE if level == DENSE else f"rank {level}"
                rows.append(
                    {
                        "how": name,
                        "level": word,
                        "momentum": momentum,
                        "share": share,
                        "limit": most,
                    }
                )
    return pd.DataFrame(rows)


def of_dense(rows: pd.DataFrame) -> pd.Series:
    """Each limit over that without compression, of the same kind and momentum."""
    uncompressed = rows[rows["share"] > 1 - 1e-9].set_index(["how", "momentum"])["limit"]
    keys = pd.MultiIndex.from_frame(rows[["how", "momentum"]])
    return pd.Series(
        rows["limit"].to_numpy() / uncompressed.reindex(keys).to_numpy(), index=rows.index
    )


# -- the table and the figure ----------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    """The simulated limits, and the limits of filters at the same share of the energy, rounded."""

    def of_filter(name: str) -> Cell:
        return lambda row: _limit(at_share(rows, name, row["momentum"], row["share"]))

    columns = {
        "": word("how"),
        "momentum": number("momentum", "g"),
        "level": word("level"),
        "sent": number("share", ".2f"),
        "limit": number("limit", ".2f"),
        "of dense's": number("of_dense", ".2f"),
    }
    columns |= {name: of_filter(name) for name in BESIDE}
    return as_table(rows[rows["how"].isin([WITH, WITHOUT])], columns)


def _limit(value: float) -> str:
    return "none" if value == math.inf else "" if math.isnan(value) else f"{value:.2f}"


def at_share(rows: pd.DataFrame, how: str, momentum: float, share: float) -> float:
    """A filter's limit, of dense's, at a share of the energy between two of its own; nan beyond
    them."""
    known = rows[(rows["how"] == how) & (rows["momentum"] == momentum)].sort_values("share")
    shares, limits = known["share"].to_list(), known["of_dense"].to_list()
    for i in range(len(shares) - 1):
        low, high = shares[i], shares[i + 1]
        if low - 1e-12 <= share <= high + 1e-12:
            part = math.log(share / low) / math.log(high / low)
            return float(limits[i] ** (1 - part) * limits[i + 1] ** part)
    return math.nan


def figure(rows: pd.DataFrame) -> style.Drawing:
    """A panel for each momentum: limits of dense's against the share that is sent."""
    momenta = list(dict.fromkeys(rows["momentum"]))
    with style.theme():
        fig = style.figure(3.4)
        for ax, momentum in zip(fig.subplots(1, len(momenta), sharey=True), momenta, strict=True):
            part = rows[rows["momentum"] == momentum]
            for (colour, dash, _), name in zip(SPARE, FILTERS, strict=False):
                line = part[part["how"] == name]
                ax.plot(
                    line["share"],
                    line["of_dense"],
                    color=colour,
                    linestyle=dash,
                    label=f"{name}, computed",
                )
            for name, fill in ((WITH, "black"), (WITHOUT, "white")):
                dots = part[part["how"] == name]
                ax.plot(
                    dots["share"],
                    dots["of_dense"],
                    color="black",
                    marker="o",
                    linestyle="",
                    markerfacecolor=fill,
                    label=f"{name}, simulated",
                )
            ax.set(xscale="log", xlabel="share of the energy sent")
            ax.set_title(f"momentum {momentum:g}", loc="left")
            style.log_axis(ax)
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        fig.axes[0].set_ylabel("largest stable rate, of dense's\nhigher is better")
        handles, labels = fig.axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside upper left", ncols=3, handlelength=3)
        add_headline(fig, _title(rows))
        style.add_caption(
            fig,
            "Computed: one direction of a quadratic. In turns: its residual is sent in every p-th "
            "step; low-pass: 1 / p of it in each step; delayed: the gradient of p - 1 steps ago, "
            f"drawn at 1 / p. Simulated: {ROWS} x {COLUMNS} directions with curvatures from 0.1 to "
            f"1, PowerSGD at ranks 4, 2, 1, one worker, {STEPS} steps; the share is that at the "
            "largest rate at which the weights do not grow.",
        )
    return style.Drawing(fig, rows)


def _title(rows: pd.DataFrame) -> str:
    """The lowest simulated limit of PowerSGD, with the largest momentum, and without feedback."""
    fast = rows[rows["momentum"] == rows["momentum"].max()]
    low = {how: float(fast.loc[fast["how"] == how, "of_dense"].min()) for how in (WITH, WITHOUT)}
    return (
        "On a quadratic, error feedback narrows the stable learning rates: PowerSGD's fall to "
        f"{low[WITH]:.2f} of dense's with momentum {rows['momentum'].max():g}, without feedback to "
        f"{low[WITHOUT]:.2f}"
    )


def table() -> pd.DataFrame:
    """`lines` and `points`, and each limit as a share of dense's."""
    rows = pd.concat([lines(), points()], ignore_index=True)
    return rows.assign(of_dense=of_dense(rows))


def main(out: Out = None) -> list[Path]:
    """Draw the largest stable rates of a quadratic by what is sent of its gradients, and print
    them."""
    files, rows = Files("quadratic", out), table()
    files.page("quadratic", "", as_text(rows))
    files.figure("quadratic", figure(rows))
    return files.print_paths()
