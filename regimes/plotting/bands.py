"""One band per detector: the share of layers (and seeds) that it calls critical in each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from regimes.plotting import style
from regimes.plotting.looks import order, style_of
from regimes.plotting.panels import draw_heatmap
from regimes.records import Record
from regimes.replay import detect
from regimes.replay.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


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
    image = draw_heatmap(ax, table, 2.5, cmap="Blues", vmin=0, vmax=1)
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
