"""Maps over epochs: the level of each compressed layer, and the share that a detector calls
critical."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from regimes.plotting import style
from regimes.plotting.groups import compressed
from regimes.plotting.looks import LEVELS, SPELT, order, style_of
from regimes.records import Record
from regimes.replay import detect
from regimes.replay.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


# -- levels: the darker, the more a layer sends ----------------------------------------------


def levels(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per seed, epoch and compressed layer: the level."""
    names, columns = [layer["name"] for layer in compressed(runs[0])], ["epoch", "layer", "level"]
    tables = [run.layers.loc[run.layers["layer"].isin(names), columns] for run in runs]
    tables = [table.assign(seed=run.seed) for table, run in zip(tables, runs, strict=True)]
    return pd.concat(tables, ignore_index=True)[["seed", *columns]]


def level_map(
    runs: Sequence[Record], shown: Record, width: float = style.WIDTH
) -> tuple[Figure, pd.DataFrame]:
    """The level of each compressed layer per epoch in one run; below, the share of all layers at
    each level except that of the highest compression.

    Args:
        runs: of one schedule.
        shown: which of them is the map.
        width: inches.
    """
    numbers, layers = levels(runs), compressed(shown)
    rows = numbers[numbers["seed"] == shown.seed]
    image = rows.pivot(index="layer", columns="epoch", values="level")
    colours = palette(shown, {*numbers["level"], *shown.config["levels"]})
    with style.theme():
        size = 7.0 if len(layers) <= 30 else 4.5
        map_height = max(1.4, len(layers) * size / 45)
        fig = style.figure(map_height + 2.2, width)
        ratios = {"height_ratios": [map_height, 1.0]}
        top, bottom = fig.subplots(2, 1, sharex=True, gridspec_kw=ratios)
        draw_levels(top, image.loc[[layer["name"] for layer in layers]], colours)
        entries = [
            Patch(facecolor=colour, edgecolor="#888888", label=_label(shown, level))
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
    """A colour for each level, light to dark from the highest compression to the lowest.

    The levels of `looks.LEVELS` have fixed colours; with others among them, all are shades of blue.
    """
    sends = {name: cost["floats"] for name, cost in run.header["per_step"].items()}
    names = sorted({*present}, key=lambda name: (sends.get(name, 0.0), name))
    if {*names} <= LEVELS.keys():
        return {name: LEVELS[name] for name in LEVELS if name in names}
    shades = sns.color_palette("Blues", len(names)).as_hex()
    return dict(zip(names, [LEVELS["high"], *shades[1:]], strict=True))


def _label(run: Record, level: str) -> str:
    """ "low compression (rank 4)"."""
    label = f"{level} compression" if level in ("low", "high") else level
    if (value := run.config["levels"].get(level, "")) == "":
        return label
    return f"{label} ({SPELT.get(run.config['compressor']['name'], '{}').format(value)})"


def draw_levels(ax: Axes, image: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Levels as colours."""
    norm = BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours))
    indices, shades = image.map(list(colours).index), ListedColormap(list(colours.values()))
    _draw(ax, indices, 0.8, cmap=shades, norm=norm)


def _shares(ax: Axes, numbers: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Share of layers at each level against epoch: each seed thin, their mean thick."""
    shown = list(colours)[1:] or list(colours)
    for level in shown:
        at = numbers.assign(at=numbers["level"] == level).groupby(["seed", "epoch"])["at"].mean()
        thin: Any = {"color": colours[level] if len(shown) > 1 else "#999999", "linewidth": 0.5}
        for _, share in at.groupby("seed"):
            epochs = share.index.get_level_values("epoch")
            ax.step(epochs, 100 * share, where="mid", alpha=0.7, **thin)
        mean = 100 * at.groupby("epoch").mean()
        ax.step(mean.index, mean, where="mid", color=colours[level], linewidth=2)
    words = shown[0] if len(shown) == 1 else "level"
    ax.set(ylabel=f"layers at\n{words} (%)", ylim=(-4, 104))


def layer_name(layer: dict[str, Any]) -> str:
    """ "features.0  16×3×3×3"."""
    return f"{layer['name'].removesuffix('.weight')}  {'×'.join(map(str, layer['shape']))}"


# -- detectors ---------------------------------------------------------------------------------


def bands(
    runs: Sequence[Record], result: Comparison, width: float = style.WIDTH
) -> tuple[Figure, pd.DataFrame]:
    """One panel per schedule, one band per detector.

    Args:
        result: ``regimes.replay.detect.bench(runs, ...)``.
        width: inches.

    Returns:
        The figure, and its numbers: schedule, detector, epoch, n, critical (mean over seeds).
    """
    by = ["schedule", "detector", "epoch"]
    numbers = result.epochs.groupby(by, as_index=False, sort=False).agg(
        n=("critical", "size"), critical=("critical", "mean")
    )
    costs = detect.over_seeds(result.detectors, "detectors")
    schedules, names = order(numbers["schedule"]), list(dict.fromkeys(numbers["detector"]))
    with style.theme():
        fig = style.figure(0.9 + len(schedules) * (0.65 + 0.27 * len(names)), width)
        panels = fig.subplots(len(schedules), 1, squeeze=False)[:, 0]
        for ax, schedule in zip(panels, schedules, strict=True):
            shown = numbers[numbers["schedule"] == schedule]
            table = shown.pivot(index="detector", columns="epoch", values="critical").loc[names]
            image = draw_bands(ax, table)
            _totals(ax, costs[costs["schedule"] == schedule].set_index("detector").loc[names])
            run = next(run for run in runs if run.name == schedule)
            style.mark_decays(ax, run, behind="white")
            ax.set_title(style_of(schedule).label, loc="left", pad=13)
        panels[-1].set_xlabel(style.unit_of(runs[0].config))
        bar = fig.colorbar(image, ax=list(panels), shrink=0.6, aspect=20, pad=0.02)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        bar.set_label("layers (and seeds)\ncalled critical")
    return fig, numbers


def draw_bands(ax: Axes, table: pd.DataFrame) -> AxesImage:
    """Shares between 0 and 1, light to dark; a row's name breaks at its first space."""
    image = _draw(ax, table, 2.5, cmap="Blues", vmin=0, vmax=1)
    ax.set_yticks(range(len(table)), [name.replace(" ", "\n", 1) for name in table.index])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def _totals(ax: Axes, rows: pd.DataFrame) -> None:
    """Right of each band: share critical and traffic."""

    def write(columns: tuple[str, str], y: float, coordinates: Any, va: str) -> None:
        for x, words in zip((28, 58), columns, strict=True):  # points right of the panel
            place = (1, y), (x, 0), coordinates, "offset points"
            ax.annotate(words, *place, fontsize=7, ha="right", va=va)

    write(("critical", "of low"), 1.01, "axes fraction", "bottom")
    for i, (share, cost) in enumerate(zip(rows["critical"], rows["of_low"], strict=True)):
        traffic = "–" if pd.isna(cost) else f"{cost:.2f}"
        write((f"{share:.0%}", traffic), i, ax.get_yaxis_transform(), "center")


def _draw(ax: Axes, table: pd.DataFrame, gap: float, **colours: Any) -> AxesImage:
    """The rows of a table as bands of colour, with white lines of width ``gap`` between them;
    ``colours``: of ``Axes.imshow``."""
    image = ax.imshow(table.to_numpy(), aspect="auto", interpolation="nearest", **colours)
    for edge in range(1, len(table)):
        ax.axhline(edge - 0.5, color="white", linewidth=gap)
    ax.grid(False)
    ax.tick_params(axis="y", length=0)
    return image
