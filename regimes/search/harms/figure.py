"""The figure of a search for harm: one column wide, and told apart without colour. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D

from regimes.base.statistics import LEAST
from regimes.plotting import style
from regimes.search.harms.evidence import HarmEvidence
from regimes.search.harms.judge import WORDS, Call, LostTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regimes.plotting.looks import Metric

WIDTH = 3.3  # inches: one column of a paper
COLOURS: dict[Call, str] = {"safe": "#0173b2", "harmful": "#d55e00", "open": "#949494"}
MARKS: dict[Call, dict[str, Any]] = {  # in grey, too: dark and filled, crossed, dashed and empty
    "safe": {"marker": "o"},
    "harmful": {"marker": "X", "markersize": 6},
    "open": {"marker": "o", "markerfacecolor": "white", "linestyle": (0, (2.5, 1))},
}
HATCHES: dict[Call, str | None] = {"safe": None, "harmful": "////", "open": None}
LEFT_OUT: dict[str, Any] = {"color": "black", "marker": "D", "markersize": 3.2, "linewidth": 0.8}
NARROW = 0.12  # share of the run: a window without room for its multiple
MOST_ARMS = 6  # panels of a figure


def draw_harm(
    evidence: HarmEvidence,
    texts: Mapping[str, str],
    metric: Metric,
    unit: str,
    rates: Sequence[float],
) -> style.Shown:
    """Draw a panel for each arm, and the learning rate below where it is known.

    Args:
        texts: what is changed, by arm.
        rates: of each unit, as a share of the highest; empty: not known.
    """
    arms = evidence.rules.arms[:MOST_ARMS]
    windows = [pulse for arm in arms for pulse in evidence.phases(arm)]
    with style.theme():
        fig = style.figure(0.9 + 1.25 * len(arms) + 0.55 * bool(rates), WIDTH)
        heights = [1.0] * len(arms) + [0.4] * bool(rates)
        axes = fig.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
        for ax, arm in zip(axes[:, 0], arms, strict=False):
            _draw_harms(ax, evidence, arm)
            ax.set_ylabel(f"harm ({metric.unit})")
            ax.set_title(texts[arm], loc="left")
        if rates:
            look: Any = {"color": "#555555", "linewidth": 1.2, "drawstyle": "steps-mid"}
            axes[-1, 0].plot(range(len(rates)), rates, **look)
            axes[-1, 0].set(ylim=(0, 1.15), ylabel="rate")
        axes[-1, 0].set_xlabel(unit)
        axes[-1, 0].set_xlim(-0.6, evidence.rules.units - 0.4)
        calls = {evidence.of(pulse).call for pulse in windows}
        handles = [Line2D([], [], label=WORDS[c], **_look(c)) for c in COLOURS if c in calls]
        if evidence.rules.lost_time:
            handles.append(Line2D([], [], label="left out", **LEFT_OUT))
        ncols = 2 if len(handles) > 3 else 3
        fig.legend(handles=handles, loc="outside upper left", ncols=ncols, handlelength=2)
        fig.align_ylabels()
        few = max(evidence.of(pulse).n for pulse in windows) < LEAST
        bars = (
            "fewer than three seeds have no interval" if few else "bars: the interval of the calls"
        )
        words = f"Harm of a pulse over these units, at the end of the run; {bars}"
        untried = " ?: not tried." if any(not evidence.of(pulse).n for pulse in windows) else ""
        left_out = len(evidence.rules.arms) - len(arms)
        more = f" {left_out} more in the table." if left_out else ""
        lost = " Left out: the same units are not trained; x: harm as a multiple of that."
        lost = lost if evidence.rules.lost_time else ""
        style.add_caption(fig, f"{words}.{lost}{untried}{more}")
    return fig


def _draw_harms(ax: Axes, evidence: HarmEvidence, arm: str) -> None:
    """Each window as a line over its units, at its mean harm, with the interval."""
    margin = evidence.rules.margin
    ax.axhline(0, color="#949494", linewidth=0.8)
    ax.axhline(margin, color="black", linewidth=0.8, linestyle=style.DOTTED)
    for pulse in evidence.phases(arm):
        verdict, ((first, stop),) = evidence.of(pulse), pulse.spans
        colour, middle = COLOURS[verdict.call], (first + stop - 1) / 2
        band: Any = {"facecolor": (colour, 0.1), "edgecolor": (colour, 0.3), "linewidth": 0}
        ax.axvspan(first - 0.5, stop - 0.5, hatch=HATCHES[verdict.call], **band)
        ax.axvline(stop - 0.5, color="white", linewidth=1.5)
        if not math.isfinite(verdict.harm):
            text = "breaks" if verdict.n else "?"
            where: Any = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "center"}
            ax.text(middle, 0.5, text, fontsize=7.5, **where)
            continue
        if beside := evidence.lost_time(pulse):
            _draw_lost_time(ax, beside, (first, stop), evidence.rules.units)
        look = _look(verdict.call)
        if math.isfinite(verdict.low):
            ax.plot([middle] * 2, [verdict.low, verdict.high], color=colour, linewidth=1.2)
        ends = [first - 0.4, middle, stop - 0.6]
        ax.plot(ends, [verdict.harm] * 3, markevery=[1], **look)
    right: Any = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    ax.text(0.995, margin, "margin", fontsize=6, **right)
    ax.margins(y=0.18)  # room for the multiples
    ax.grid(visible=False)


def _draw_lost_time(ax: Axes, beside: LostTime, span: tuple[int, int], units: int) -> None:
    """What leaving a window out costs, left of its middle, and the multiple of it where it fits."""
    lost, (first, stop) = beside.lost, span
    if math.isfinite(lost.harm):
        place = (first + stop - 1) / 2 - 0.25 * (stop - first)
        if math.isfinite(lost.low):
            ax.plot([place] * 2, [lost.low, lost.high], color="black", linewidth=0.8)
        ax.plot([place], [lost.harm], **{**LEFT_OUT, "linestyle": "none"})
    if math.isfinite(beside.times) and (stop - first) / units > NARROW:
        above: Any = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "top"}
        ax.text(
            (first + stop - 1) / 2, 0.98, f"{beside.spell(beside.times)} x", fontsize=6, **above
        )


def _look(call: Call) -> dict[str, Any]:
    """The line of a phase of a call."""
    plain = {"color": COLOURS[call], "linewidth": 1.8, "markersize": 4.5, "markeredgewidth": 1}
    return plain | MARKS[call]
