"""The figure of a search for harm: one column wide. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from regimes.harms.decide import Call
from regimes.harms.found import WORDS, Harm
from regimes.plotting import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 3.4  # inches: one column of a paper
COLOURS: dict[Call, str] = {"safe": "#0173b2", "harmful": "#d55e00", "open": "#949494"}
MOST_ARMS = 6  # panels of a figure


def figure(found: Harm) -> Figure:
    """A panel for each arm, and the learning rate below where it is known."""
    arms = found.known.rules.arms[:MOST_ARMS]
    rates = bool(found.rates)
    with style.theme():
        fig = style.figure(0.9 + 1.25 * len(arms) + 0.55 * rates, WIDTH)
        heights = [1.0] * len(arms) + [0.4] * rates
        axes = fig.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
        for ax, arm in zip(axes[:, 0], arms, strict=False):
            _harms(ax, found, arm)
        if rates:
            _rates(axes[-1, 0], found)
        axes[-1, 0].set_xlabel("epoch" if found.unit == "epoch" else found.unit)
        calls = {found.known.of(p).call for arm in arms for p in found.known.windows(arm)}
        handles = [Patch(color=COLOURS[c], label=WORDS[c]) for c in COLOURS if c in calls]
        fig.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1)
        most = max((found.known.of(p).n for a in arms for p in found.known.windows(a)), default=0)
        few = "fewer than three seeds have no interval" if most < 3 else "bars: 95 % t interval"
        style.caption(fig, f"Harm of a pulse over these units, at the end of the run; {few}.")
    return fig


def _harms(ax: Axes, found: Harm, arm: str) -> None:
    """Each window as a line over its units, at its mean harm, with the interval."""
    margin = found.known.rules.margin
    ax.axhline(0, color="#949494", linewidth=0.8)
    ax.axhline(margin, color="black", linewidth=0.8, linestyle=style.DOTTED)
    for pulse in found.known.windows(arm):
        verdict, ((first, stop),) = found.known.of(pulse), pulse.spans
        colour = COLOURS[verdict.call]
        ax.axvspan(first - 0.5, stop - 0.5, color=colour, alpha=0.12, linewidth=0)
        if not math.isfinite(verdict.harm):
            text = "breaks" if verdict.n else "?"
            ax.text((first + stop - 1) / 2, margin, text, ha="center", color=colour, fontsize=7)
            continue
        ax.plot([first - 0.4, stop - 0.6], [verdict.harm] * 2, color=colour, linewidth=2)
        if math.isfinite(verdict.low):
            ax.plot([(first + stop - 1) / 2] * 2, [verdict.low, verdict.high], color=colour)
    ax.set_ylabel(f"harm ({found.shown.unit})")
    ax.set_title(found.kinds[arm].text, loc="left")
    right: Any = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    ax.text(0.995, margin, "margin", fontsize=6, **right)
    ax.grid(visible=False)


def _rates(ax: Axes, found: Harm) -> None:
    units = range(len(found.rates))
    ax.plot(units, found.rates, color="#555555", linewidth=1.2, drawstyle="steps-mid")
    ax.set(ylim=(0, 1.15), xlim=(-0.6, len(found.rates) - 0.4), ylabel="rate")
