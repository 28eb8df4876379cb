"""The figure of a plan: one column wide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from regimes.plotting import style

if TYPE_CHECKING:
    from regimes.plans.curve import Probe
    from regimes.plans.result import Plan

WIDTH, HEIGHT = 3.4, 3.6
MOST = 6  # curves; the best ones and dense
LONG = 24  # letters of a name, of which two have no room side by side
STYLES = [  # colour and marker: told apart in grey by the marker
    ("#000000", "o"),
    ("#0173b2", "s"),
    ("#d55e00", "^"),
    ("#029e73", "D"),
    ("#cc78bc", "v"),
    ("#949494", "P"),
]


def draw_plan(plan: Plan) -> style.Shown:
    """Loss in the end against the seconds of the whole training on the link: solid where a probe
    was as long, dashed beyond, with the 95 % interval of the best method and of dense."""
    known = plan.known
    if len({(p.method, p.steps) for p in known.curve.losses}) == len(plan.table):
        return _whole(plan)
    dense = known.methods[0]
    ranked = [m for m in plan.table["method"] if m != dense][: MOST - 1]
    sign = 1 if plan.shown.lower else -1
    with style.theme():
        fig = style.figure(HEIGHT, WIDTH)
        ax = fig.subplots()
        for (colour, marker), method in zip(STYLES, [dense, *ranked], strict=False):
            second = known.price(method).seconds
            probes = {p: loss for p, loss in known.curve.losses.items() if p.method == method}
            first, longest = min(p.steps for p in probes), max(p.steps for p in probes)
            last = max(known.horizon(method), longest)
            grid = np.geomspace(first, last, 60)
            ends = (x.clip(*known.ends) for x in known.curve.interval(method, grid.tolist()))
            middle, low, high = ends
            near = grid <= longest * 1.001
            beyond = grid >= grid[near].max()
            ax.plot(grid[near] * second, sign * middle[near], color=colour)
            ax.plot(grid[beyond] * second, sign * middle[beyond], color=colour, linestyle="--")
            best = _best(probes)
            at, seen = [n * second for n in best], [sign * loss for loss in best.values()]
            ax.plot(at, seen, color=colour, label=method, marker=marker, markersize=4, linestyle="")
            end: Any = {"color": colour, "markerfacecolor": "white"}  # told apart in grey
            ax.plot(last * second, sign * middle[-1], marker=marker, markersize=4, **end)
            if method in (dense, plan.best):
                band = sign * low, sign * high
                ax.fill_between(grid * second, *band, color=colour, alpha=0.12, linewidth=0)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        aim = known.aim
        if aim.seconds is not None:
            ax.axvline(aim.seconds, color="black", linewidth=0.8, linestyle=style.DOTTED)
        else:
            assert aim.loss is not None
            ax.axhline(sign * aim.loss, color="black", linewidth=0.8, linestyle=style.DOTTED)
        ax.set_xlabel(f"seconds of the training on {plan.where}")
        way = "lower" if plan.shown.lower else "higher"
        better = f"\n{way} is better" if plan.shown.directed else ""
        ax.set_ylabel(f"{plan.shown.label} in the end{better}")
        (least, most), (bottom, top) = plan.shown.ends, ax.get_ylim()
        ax.set_ylim(max(least, bottom), min(most + 1, top))
        wide = max(len(name) for name in [dense, *ranked]) > LONG
        fig.legend(loc="outside upper left", ncols=1 if wide else 2, fontsize=7)
        seeds = {probe.seed for probe in known.curve.losses}
        style.add_caption(
            fig,
            "Marks: the best short training of a length. Lines: fitted to all, at the best rate; "
            "dashed, to the hollow mark: longer than any of the method. "
            f"Bands: 95 % interval of the mean ({style.seeds_in_words([len(seeds)])})."
            + " Results of the smaller model."
            * plan.smaller,
        )
    return fig


def _whole(plan: Plan) -> style.Shown:
    """The loss of each method with its 95 % interval, where all were trained for one time."""
    table = plan.table.iloc[::-1]
    seeds = {probe.seed for probe in plan.known.curve.losses}
    rung = plan.known.rungs[0]
    share = rung / plan.known.rungs[-1]
    with style.theme():
        fig = style.figure(1.4 + 0.28 * len(table), WIDTH)
        ax = fig.subplots()
        middle = table["loss"].to_numpy()
        widths = np.abs(table[["low", "high"]].to_numpy() - middle[:, None]).T
        at = np.arange(len(table))
        ax.errorbar(middle, at, xerr=widths, fmt="o", color="black", markersize=4, capsize=2)
        ax.set_yticks(at, list(table["method"]), fontsize=7)
        ax.set_ylim(-0.5, len(table) - 0.5)
        ax.set_xlabel(f"{plan.shown.label} {'minus dense' if plan.smaller else 'in the end'}")
        trained = "whole" if share >= 1 else f"for {share:.0%} of its time, the rest is fitted"
        style.add_caption(
            fig,
            f"After {plan.known.rungs[-1]:.3g} s of training on {plan.where}. "
            f"Each method was trained {trained}; 95 % intervals of the fitted mean "
            f"({style.seeds_in_words([len(seeds)])})."
            + " Differences to dense of the smaller model."
            * plan.smaller,
        )
    return fig


def _best(probes: Mapping[Probe, float]) -> dict[int, float]:
    """By steps, the lowest mean loss over seeds of the rates that were tried."""
    by_rate: dict[tuple[int, float], list[float]] = {}
    for probe, loss in probes.items():
        by_rate.setdefault((probe.steps, probe.rate), []).append(loss)
    found: dict[int, float] = {}
    for (steps, _), losses in by_rate.items():
        found[steps] = min(found.get(steps, math.inf), fmean(losses))
    return {steps: loss for steps, loss in found.items() if math.isfinite(loss)}
