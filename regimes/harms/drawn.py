"""The figure of a search for harm: one column wide. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from regimes.harms.decide import WORDS, Call, Known
from regimes.plotting import style
from regimes.statistics import LEAST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regimes.plotting.looks import Metric

WIDTH = 3.4  # inches: one column of a paper
COLOURS: dict[Call, str] = {"safe": "#0173b2", "harmful": "#d55e00", "open": "#949494"}
MOST_ARMS = 6  # panels of a figure


def figure(
    known: Known, texts: Mapping[str, str], shown: Metric, unit: str, rates: Sequence[float]
) -> Figure:
    """A panel for each arm, and the learning rate below where it is known.

    Args:
        texts: what is changed, by arm.
        rates: of each unit, as a share of the highest; empty: not known.
    """
    arms = known.rules.arms[:MOST_ARMS]
    windows = [pulse for arm in arms for pulse in known.windows(arm)]
    with style.theme():
        fig = style.figure(0.9 + 1.25 * len(arms) + 0.55 * bool(rates), WIDTH)
        heights = [1.0] * len(arms) + [0.4] * bool(rates)
        axes = fig.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
        for ax, arm in zip(axes[:, 0], arms, strict=False):
            _harms(ax, known, arm)
            ax.set_ylabel(f"harm ({shown.unit})")
            ax.set_title(texts[arm], loc="left")
        if rates:
            _rates(axes[-1, 0], rates)
        axes[-1, 0].set_xlabel(unit)
        axes[-1, 0].set_xlim(-0.6, known.rules.units - 0.4)
        calls = {known.of(pulse).call for pulse in windows}
        handles = [Patch(color=COLOURS[c], label=WORDS[c]) for c in COLOURS if c in calls]
        fig.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1)
        few = max(known.of(pulse).n for pulse in windows) < LEAST
        bars = "fewer than three seeds have no interval" if few else "bars: 95 % t interval"
        style.caption(fig, f"Harm of a pulse over these units, at the end of the run; {bars}.")
    return fig


def _harms(ax: Axes, known: Known, arm: str) -> None:
    """Each window as a line over its units, at its mean harm, with the interval."""
    margin = known.rules.margin
    ax.axhline(0, color="#949494", linewidth=0.8)
    ax.axhline(margin, color="black", linewidth=0.8, linestyle=style.DOTTED)
    for pulse in known.windows(arm):
        verdict, ((first, stop),) = known.of(pulse), pulse.spans
        colour, middle = COLOURS[verdict.call], (first + stop - 1) / 2
        ax.axvspan(first - 0.5, stop - 0.5, color=colour, alpha=0.12, linewidth=0)
        ax.axvline(stop - 0.5, color="white", linewidth=1.5)
        if not math.isfinite(verdict.harm):
            text = "breaks" if verdict.n else "?"
            ax.text(middle, margin, text, ha="center", color=colour, fontsize=7)
            continue
        ax.plot([first - 0.4, stop - 0.6], [verdict.harm] * 2, color=colour, linewidth=2)
        if math.isfinite(verdict.low):
            ax.plot([middle] * 2, [verdict.low, verdict.high], color=colour)
    right: Any = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    ax.text(0.995, margin, "margin", fontsize=6, **right)
    ax.grid(visible=False)


def _rates(ax: Axes, rates: Sequence[float]) -> None:
    ax.plot(range(len(rates)), rates, color="#555555", linewidth=1.2, drawstyle="steps-mid")
    ax.set(ylim=(0, 1.15), ylabel="rate")
