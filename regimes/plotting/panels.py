"""Panels of the report and the study: curves, maps of levels, bands of detectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from regimes.base.config import as_level
from regimes.plotting import canvas, style
from regimes.plotting.groups import compressed_layers
from regimes.plotting.looks import (
    LEVELS,
    Look,
    Metric,
    level_text,
    order_schedules,
    style_of,
    styles_of,
)
from regimes.policies.replay import detect
from regimes.policies.replay.compare import Comparison
from regimes.records import Record, unit_name

LABELS = {"floats": "floats sent (the paper's count)", "seconds": "seconds of training"}
LONG = 100  # epochs from which lines are thinner
WIDE = 4  # an axis is logarithmic where its largest number is more than so many times its smallest


def draw_curves(
    ax: Axes,
    against: str,
    numbers: pd.DataFrame,
    last: pd.DataFrame,
    metric: Metric,
    names: Mapping[str, str] | None = None,
    marks: bool = True,
) -> None:
    """Draw one curve per schedule: the mean, against epochs with its band. More than `style.MANY`
    curves are thin, with fewer markers and without bands.

    Args:
        against: "epoch", "floats" or "seconds".
        numbers, last: of `curves.tabulate_curves` and `curves.tabulate_ends`.
        names: of the schedules, in place of their looks' labels.
        marks: whether the ends have a large marker and bars.
    """
    looks = named_looks(numbers["schedule"], names)
    many = len(looks) > style.MANY
    for name, look in looks.items():
        rows = numbers[numbers["schedule"] == name].dropna(subset=[metric.name])
        every = max(1, len(rows) // (3 if many else 8))
        first = sum(map(ord, name)) % every  # so that markers of two schedules do not coincide
        line = look.line if against == "epoch" else {**look.line, "marker": ""}
        line["linewidth"] *= 0.6 if len(rows) > LONG or many else 1.0
        ax.plot(
            rows[against], rows[metric.name], markevery=(first, every), label=look.label, **line
        )
        if against == "epoch" and not many:
            floor = rows["ci_low"].clip(lower=rows[metric.name].min() / 10 if metric.log else None)
            band: Any = {"color": look.colour, "alpha": 0.12, "linewidth": 0}
            ax.fill_between(rows["epoch"], floor, rows["ci_high"], **band)
        if marks:
            # a large marker where training ends, with the intervals of both means
            end = last[last["schedule"] == name].iloc[0]
            ranges = ((metric.name, "ci_high"), (against, f"{against}_ci_high"))
            half = [0.0 if math.isnan(end[high]) else end[high] - end[key] for key, high in ranges]
            size = 1.5 * look.line["markersize"]
            bar = {**look.line, "markersize": size, "linestyle": "", "zorder": 9}
            numbers_of_end = end[against], end[metric.name], half[0], half[1]
            ax.errorbar(*numbers_of_end, capsize=2.5, elinewidth=1, **bar)
    extremes = numbers[against].agg(["min", "max"])  # epochs without a value included
    ax.update_datalim([(x, 0.0) for x in extremes], updatey=False)
    ax.autoscale_view()


def named_looks(
    schedules: Iterable[str], names: Mapping[str, str] | None = None
) -> dict[str, Look]:
    """Return `styles_of`, with other labels."""
    looks, given = styles_of(schedules), names or {}
    return {name: replace(look, label=given.get(name, look.label)) for name, look in looks.items()}


def format_axis(ax: Axes, against: str, last: pd.DataFrame, config: dict[str, Any]) -> None:
    """Set label, margins and scale of the x axis.

    Args:
        config: of one of the runs, for the name of their units.
    """
    ax.set_xlabel(unit_name(config) if against == "epoch" else LABELS[against])
    ax.margins(x=0.02)
    if against == "epoch":
        ax.locator_params(axis="x", integer=True)
        return
    if last[against].max() > WIDE * last[against].min() > 0:
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        few, some = (20, 500) if canvas.is_stacked(ax.figure) else (200, 200)
        subs = (1, 2, 5) if high < few * low else (1, 3) if high < some * low else (1,)
        ax.xaxis.set_major_locator(LogLocator(subs=subs))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
    if against == "floats":
        ax.xaxis.set_major_formatter(EngFormatter(sep="\N{NO-BREAK SPACE}"))


def set_limits(
    ax: Axes, numbers: pd.DataFrame, metric: Metric, last: pd.DataFrame | None = None
) -> bool:
    """Set the limits of the y axis. The ends of curves and their intervals get about half of it, so
    that values far from them, as in the first epochs, may be outside. An accuracy stays inside 0 to
    100 %. Returns whether a value is outside."""
    ends = [] if last is None else [last["ci_low"], last["ci_high"]]
    low, high = pd.concat([numbers[metric.name], *ends]).agg(["min", "max"])
    if not math.isfinite(low) or not math.isfinite(high):  # a record's 1e308, as a percentage
        return False
    lowest, highest = low, high
    if metric.log:
        low = max(low, float(numbers[metric.name].min()) / 2)
        high = high if last is None else min(high, 3 * float(last[metric.name].max()))
        if high > WIDE * low:
            style.log_axis(ax)
        ax.set_ylim(0.93 * low, 1.05 * high)
        return bool(highest > 1.05 * high)
    if last is not None and len(last) > 1 and metric.directed:  # one curve is shown whole
        low, high = _cut_limits(low, high, pd.concat([last[metric.name], *ends]), metric.lower)
    if metric.name == "accuracy":
        room = min(4.0, 0.1 * (high - low)) or 4.0  # of one value: 4 points
        ax.set_ylim(max(0.0, low - 1 if low > lowest else low - 4), min(101.0, high + room))
    elif metric.directed and last is not None and high > low:
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    return bool(low > lowest or high < highest)


def _cut_limits(low: float, high: float, ends: pd.Series, lower: bool) -> tuple[float, float]:
    """The limits without the worse side, if the ends would get less than a third of the axis."""
    least, most = ends.min(), ends.max()
    room = max(most - least, 0.15 * (high - low))
    if high - low < 3 * room:
        return low, high
    return (low, min(high, most + room)) if lower else (max(low, least - room), high)


# -- levels: the darker, the more a layer sends ----------------------------------------------


def tabulate_levels(runs: Sequence[Record]) -> pd.DataFrame:
    """Make a table with one row per seed, epoch and compressed layer: the level."""
    names, columns = (
        [layer["name"] for layer in compressed_layers(runs[0])],
        ["epoch", "layer", "level"],
    )
    tables = [run.layers[columns].assign(seed=run.seed) for run in runs]
    table = pd.concat(tables)[["seed", *columns]]
    return table[table["layer"].isin(names)].reset_index(drop=True)


def level_map(runs: Sequence[Record], shown: Record, width: float = style.WIDTH) -> style.Drawing:
    """Draw the level of each compressed layer per epoch in one run; below, the share of all layers
    at each level but the highest compression.

    Args:
        runs: of one schedule.
        shown: which of them is the map.
        width: inches.
    """
    numbers, layers = tabulate_levels(runs), compressed_layers(shown)
    rows = numbers[numbers["seed"] == shown.seed]
    image = rows.pivot(index="layer", columns="epoch", values="level")
    colours = level_palette(shown, {*numbers["level"], *shown.config["levels"]})
    with style.theme():
        size = 7.0 if len(layers) <= 30 else 4.5
        map_height = max(1.4, len(layers) * size / 45)
        fig = style.figure(map_height + 2.2, width)
        top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=[map_height, 1.0])
        draw_levels(top, image.loc[[layer["name"] for layer in layers]], colours)
        entries = [
            Patch(facecolor=colour, edgecolor="#888888", label=_label(shown, level))
            for level, colour in colours.items()
        ]
        fig.legend(handles=entries, loc="outside upper left", ncols=4 if width > 6 else 2)
        top.set_yticks(range(len(layers)), [layer_name(layer) for layer in layers], fontsize=size)
        _draw_shares(bottom, numbers, colours)
        bottom.set_xlabel(unit_name(shown.config))
        bottom.locator_params(axis="x", integer=True)
        for ax in (top, bottom):
            style.mark_decays(ax, shown, labelled=ax is top)
    return style.Drawing(fig, numbers)


def level_share(runs: Sequence[Record], numbers: pd.DataFrame) -> str:
    """Say in words how often the lowest compression was chosen: of all layers, units and seeds."""
    colours = level_palette(runs[0], {*numbers["level"], *runs[0].config["levels"]})
    level = [*colours][-1]
    share = 100 * (numbers["level"] == level).mean()
    units = f"{unit_name(runs[0].config).partition(' ')[0]}s"
    return f"{_label(runs[0], level)} in {share:.0f}\xa0% of layers and {units}"


def level_palette(run: Record, present: Iterable[str]) -> dict[str, Any]:
    """Choose a colour for each level, light to dark from the highest compression to the lowest:
    fixed ones if all are in `looks.LEVELS`, else shades of blue."""
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
    form = level_text(run.config["compressor"]["name"]) or "{}"
    return f"{label} ({form.format(as_level(value))})"


def draw_levels(ax: Axes, image: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Draw levels as colours."""
    norm = BoundaryNorm(np.arange(len(colours) + 1) - 0.5, len(colours))
    indices, shades = image.map(list(colours).index), ListedColormap(list(colours.values()))
    _draw_rows(ax, indices, 0.8, cmap=shades, norm=norm)


def _draw_shares(ax: Axes, numbers: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Draw the share of layers at each level against epochs: seeds thin, their mean thick."""
    shown = list(colours)[1:] or list(colours)
    for level in shown:
        at = 100 * (numbers["level"] == level).groupby([numbers["epoch"], numbers["seed"]]).mean()
        thin: Any = {"color": colours[level] if len(shown) > 1 else "#999999", "linewidth": 0.5}
        for _, share in at.groupby("seed"):
            epochs = share.index.get_level_values("epoch")
            ax.step(epochs, share, where="mid", alpha=0.7, **thin)
        mean = at.groupby("epoch").mean()
        ax.step(mean.index, mean, where="mid", color=colours[level], linewidth=2)
    words = shown[0] if len(shown) == 1 else "level"
    ax.set(ylabel=f"layers at\n{words} (%)", ylim=(-4, 104))


def layer_name(layer: Mapping[str, Any]) -> str:
    """Name a layer with its shape: "features.0 16×3×3×3"."""
    return f"{layer['name'].removesuffix('.weight')}  {'×'.join(map(str, layer['shape']))}"


# -- detectors ---------------------------------------------------------------------------------


def draw_detectors(
    runs: Sequence[Record], result: Comparison, width: float = style.WIDTH
) -> style.Drawing:
    """Draw one panel per schedule, one band per detector.

    Args:
        result: ``regimes.policies.replay.detect.bench_detectors(runs, ...)``.
        width: inches.

    Returns:
        The figure, of as many schedules as a page has room for, and the numbers of all: schedule,
        detector, epoch, n, critical (mean over seeds).
    """
    by = ["schedule", "detector", "epoch"]
    numbers = result.epochs.groupby(by, as_index=False, sort=False).agg(
        n=("critical", "size"), critical=("critical", "mean")
    )
    costs = detect.over_seeds(result.detectors, "detectors")
    schedules, names = (
        order_schedules(numbers["schedule"]),
        list(dict.fromkeys(numbers["detector"])),
    )
    with style.theme():
        each = 0.65 + 0.27 * len(names) + 0.4 * (width > (canvas.current_options().width or width))
        schedules = schedules[: max(1, int((canvas.HIGHEST - 0.9) / each))]
        fig = style.figure(0.9 + len(schedules) * each, width)
        panels = fig.subplots(len(schedules), 1, squeeze=False)[:, 0]
        for ax, schedule in zip(panels, schedules, strict=True):
            shown = numbers[numbers["schedule"] == schedule]
            table = shown.pivot(index="detector", columns="epoch", values="critical").loc[names]
            image = draw_bands(ax, table)
            _write_totals(ax, costs[costs["schedule"] == schedule].set_index("detector").loc[names])
            run = next(run for run in runs if run.name == schedule)
            style.mark_decays(ax, run, behind="white")
            label = style_of(schedule).label + detect.describe_intervals(result, schedule)
            ax.set_title(label, loc="left", pad=13)
        panels[-1].set_xlabel(unit_name(runs[0].config))
        if canvas.is_stacked(fig):
            below: Any = {"location": "bottom", "aspect": 30}
            fig.colorbar(image, ax=list(panels), format=PercentFormatter(1.0), **below).set_label(
                "layers (and seeds) called critical"
            )
        else:
            bar = fig.colorbar(image, ax=list(panels), shrink=0.6, aspect=20, pad=0.02)
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
            bar.set_label("layers (and seeds)\ncalled critical")
    return style.Drawing(fig, numbers)


def draw_bands(ax: Axes, table: pd.DataFrame) -> AxesImage:
    """Draw shares between 0 and 1, light to dark; a row's name breaks at its first space."""
    image = _draw_rows(ax, table, 2.5, cmap="Blues", vmin=0, vmax=1)
    ax.set_yticks(range(len(table)), [name.replace(" ", "\n", 1) for name in table.index])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def _write_totals(ax: Axes, rows: pd.DataFrame) -> None:
    """Write the share critical and the traffic, right of each band."""
    shares, costs = rows["critical"].map("{:.0%}".format), rows["of_low"].map("{:.2f}".format)
    columns = (28, "critical", shares), (58, "of low", costs.replace("nan", "–"))
    for x, head, texts in columns:  # points right of the panel
        look: Any = {"textcoords": "offset points", "fontsize": 7, "ha": "right"}
        ax.annotate(head, (1, 1.01), (x, 0), "axes fraction", va="bottom", **look)
        for i, words in enumerate(texts):
            ax.annotate(words, (1, i), (x, 0), ax.get_yaxis_transform(), va="center", **look)


def _draw_rows(ax: Axes, table: pd.DataFrame, gap: float, **colours: Any) -> AxesImage:
    """The rows of a table as bands, with white lines of width ``gap`` between them; ``colours``: of
    ``Axes.imshow``."""
    image = ax.imshow(table.to_numpy(), aspect="auto", interpolation="nearest", **colours)
    for edge in range(1, len(table)):
        ax.axhline(edge - 0.5, color="white", linewidth=gap)
    ax.grid(False)
    ax.tick_params(axis="y", length=0)
    return image
