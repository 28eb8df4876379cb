"""The figure of a plan: one column wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regimes.plotting import style

if TYPE_CHECKING:
    from regimes.search.plans.result import Plan

WIDTH = 3.4


def draw_plan(plan: Plan) -> style.Shown:
    """How many times as fast as dense each method comes to a loss, with 95 % intervals; hollow
    marks are upper bounds."""
    table = plan.table.iloc[::-1]
    with style.theme():
        fig = style.figure(1.4 + 0.28 * len(table), WIDTH)
        ax = fig.subplots()
        ax.axvline(1.0, color="0.5", linewidth=0.8, linestyle=style.DOTTED)
        for at, row in enumerate(table.to_dict("records")):
            known = plan.known.clocks[row["method"]].known
            ax.plot([row["low"], row["high"]], [at, at], color="0.3", linewidth=0.8)
            face = "black" if known else "white"
            ax.plot(row["speed"], at, "o", color="black", markersize=4, markerfacecolor=face)
        ax.set_yticks(np.arange(len(table)), list(table["method"]), fontsize=7)
        ax.set_ylim(-0.5, len(table) - 0.5)
        ax.set_xlim(left=0.0)
        ax.set_xlabel("times as fast as dense")
        seeds = style.seeds_in_words([len(plan.known.seeds)])
        style.add_caption(
            fig,
            f"On {plan.where}: seconds of a step and clocks from short runs of "
            f"{plan.known.length:,} steps ({seeds}); 95 % intervals, hollow: at most."
            + " Short runs of a smaller model."
            * plan.smaller,
        )
    return fig
