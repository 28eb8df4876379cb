"""The map of levels: that of each compressed layer in each epoch; the darker, the more it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from regimes.plotting import style
from regimes.plotting.groups import compressed
from regimes.plotting.looks import LEVELS, SPELT
from regimes.plotting.panels import draw_heatmap
from regimes.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def levels(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per seed, epoch and compressed layer: the level."""
    names = [layer["name"] for layer in compressed(runs[0])]
    parts = [
        run.layers.loc[run.layers["layer"].isin(names), ["epoch", "layer", "level"]].assign(
            seed=run.seed
        )
        for run in runs
    ]
    return pd.concat(parts, ignore_index=True)[["seed", "epoch", "layer", "level"]]


def level_map(
    runs: Sequence[Record], shown: Record, width: float = style.WIDTH
) -> tuple[Figure, pd.DataFrame]:
    """The level of each compressed layer per epoch in one run; below, the share of all layers at
    each level but that of the highest compression.

    Args:
        runs: of one schedule.
        shown: which of them is the map.
        width: inches.
    """
    numbers, layers = levels(runs), compressed(shown)
    image = numbers[numbers["seed"] == shown.seed].pivot(
        index="layer", columns="epoch", values="level"
    )
    colours = palette(shown, {*numbers["level"], *shown.config["levels"]})
    with style.theme():
        size = 7.0 if len(layers) <= 30 else 4.5
        map_height = max(1.4, len(layers) * size / 45)
        fig = style.figure(map_height + 2.2, width)
        ratios = {"height_ratios": [map_height, 1.0]}
        top, bottom = fig.subplots(2, 1, sharex=True, gridspec_kw=ratios)
        draw_levels(top, image.loc[[layer["name"] for layer in layers]], colours)
        entries = [
            Patch(facecolor=colour, edgecolor="#888888", label=_words(shown, level))
            for level, colour in colours.items()
        ]
        fig.legend(handles=entries, loc="outside upper right", ncols=4 if width > 6 else 2)
        top.set_yticks(range(len(layers)), [layer_name(layer) for layer in layers], fontsize=size)
        _shares(bottom, numbers, colours)
        bottom.set_xlabel(style.unit_of(shown.config))
        bottom.locator_params(axis="x", integer=True)
        for ax in (top, bottom):
            style.mark_decays(ax, shown, labelled=ax is top)
    return fig, numbers


def palette(run: Record, present: Iterable[str]) -> dict[str, Any]:
    """A colour for each level, from the highest compression to the lowest, light to dark.

    The levels of every figure keep theirs; with others among them, shades of blue.
    """
    sends = {name: cost["floats"] for name, cost in run.header["per_step"].items()}
    names = sorted({*present}, key=lambda name: (sends.get(name, 0.0), name))
    if {*names} <= LEVELS.keys():
        return {name: LEVELS[name] for name in LEVELS if name in names}
    shades = sns.color_palette("Blues", len(names)).as_hex()
    return dict(zip(names, [LEVELS["high"], *shades[1:]], strict=True))


def _words(run: Record, level: str) -> str:
    """ "low compression (rank 4)"."""
    value = run.config["levels"].get(level, "")
    spelt = SPELT.get(run.config["compressor"]["name"], "{}").format(value)
    named = f"{level} compression" if level in ("low", "high") else level
    return f"{named} ({spelt})" if value != "" else named


def draw_levels(ax: Axes, image: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Levels as colours."""
    edges = np.arange(len(colours) + 1) - 0.5
    draw_heatmap(
        ax,
        image.map(list(colours).index),
        0.8,
        cmap=ListedColormap(list(colours.values())),
        norm=BoundaryNorm(edges, len(colours)),
    )


def _shares(ax: Axes, numbers: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Share of layers at each level against epoch: each seed thin, their mean thick."""
    shown = list(colours)[1:] or list(colours)
    for level in shown:
        at = numbers.assign(at=numbers["level"] == level).groupby(["seed", "epoch"])["at"].mean()
        for _, share in at.groupby("seed"):
            ax.step(
                share.index.get_level_values("epoch"),
                100 * share,
                where="mid",
                color=colours[level] if len(shown) > 1 else "#999999",
                linewidth=0.5,
                alpha=0.7,
            )
        mean = 100 * at.groupby("epoch").mean()
        ax.step(mean.index, mean, where="mid", color=colours[level], linewidth=2)
    words = shown[0] if len(shown) == 1 else "level"
    ax.set(ylabel=f"layers at\n{words} (%)", ylim=(-4, 104))


def layer_name(layer: Mapping[str, Any]) -> str:
    """ "features.0  16×3×3×3"."""
    return f"{layer['name'].removesuffix('.weight')}  {'×'.join(map(str, layer['shape']))}"
