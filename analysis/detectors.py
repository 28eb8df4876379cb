"""Detectors beside each other: when each calls a run critical, and how far they agree.

Run, then draw (a minute per run on one core, and 10 seconds)::

    regimes ablate small --seeds 5 --schedules low accordion
    python -m analysis.detectors runs/small/low runs/small/accordion

The tables are those of ``regimes detect``; the figure has one band per detector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pandas as pd
import tyro
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis import style
from regimes import bench
from regimes.records import Record
from regimes.replay import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = "Blues"  # light to dark, so that a grey print reads as well


def bands(runs: Sequence[Record], result: Comparison) -> tuple[Figure, pd.DataFrame]:
    """One panel per schedule, one band per detector: the share of layers critical in each epoch.

    Args:
        result: ``regimes.bench.bench(runs, ...)``.

    Returns:
        The figure, and its numbers: schedule, detector, epoch, n, critical (mean over seeds).
    """
    by = ["schedule", "detector", "epoch"]
    numbers = result.epochs.groupby(by, as_index=False, sort=False).agg(
        n=("critical", "size"), critical=("critical", "mean")
    )
    costs = bench.over_seeds(result.detectors, "detectors")
    schedules = style.order(numbers["schedule"])
    names = list(dict.fromkeys(numbers["detector"]))
    with style.theme():
        fig = style.figure(0.9 + len(schedules) * (0.55 + 0.27 * len(names)))
        panels = fig.subplots(len(schedules), 1, squeeze=False)[:, 0]
        for ax, schedule in zip(panels, schedules, strict=True):
            shown = numbers[numbers["schedule"] == schedule]
            table = shown.pivot(index="detector", columns="epoch", values="critical").loc[names]
            image = _paint(ax, table)
            _totals(ax, costs[costs["schedule"] == schedule].set_index("detector").loc[names])
            one = next(run for run in runs if run.name == schedule)
            for first in one.config["optimizer"].get("decay_epochs", ()):
                ax.axvline(first - 0.5, color="white", linewidth=2.2, zorder=1)  # behind the dots
            style.mark_decays(ax, one.config)
            ax.set_title(style.look(schedule).label, loc="left")
        panels[-1].set_xlabel("epoch")
        bar = fig.colorbar(image, ax=list(panels), shrink=0.6, aspect=20, pad=0.02)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        bar.set_label("layers (and seeds) called critical")
        style.caption(fig, _words(runs, result))
    return fig, numbers


def _paint(ax: Axes, table: pd.DataFrame) -> AxesImage:
    """Bands, white lines between them."""
    image = ax.imshow(table.to_numpy(), cmap=COLOURS, vmin=0, vmax=1, aspect="auto",
                      interpolation="nearest")  # fmt: skip
    ax.set_yticks(range(len(table)), [_short(name) for name in table.index])
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for edge in range(1, len(table)):
        ax.axhline(edge - 0.5, color="white", linewidth=2.5)
    ax.grid(False)
    return image


def _short(name: str) -> str:
    """A long name on two lines."""
    first, _, rest = name.partition(" ")
    return f"{first}\n{rest}" if rest else first


def _totals(ax: Axes, rows: pd.DataFrame) -> None:
    """Right of each band: share critical and traffic."""
    for x, words in ((1.085, "critical"), (1.175, "of low")):
        ax.text(x, 1.01, words, transform=ax.transAxes, fontsize=7, ha="right", va="bottom")
    for i, (share, cost) in enumerate(zip(rows["critical"], rows["of_low"], strict=True)):
        for x, words in ((1.085, f"{share:.0%}"), (1.175, "–" if pd.isna(cost) else f"{cost:.2f}")):
            ax.text(x, i, words, transform=ax.get_yaxis_transform(), fontsize=7, ha="right",
                    va="center")  # fmt: skip


def _words(runs: Sequence[Record], result: Comparison) -> str:
    counts = result.detectors.groupby(["schedule", "detector"]).size().tolist()
    return (
        f"Mean over {style.seeds_in_words(counts)} per schedule. The darker, the more compressed "
        "layers the detector calls critical in the epoch (those of one verdict for the model: the "
        "more seeds), replayed over runs of the schedule named above each panel. Of low: traffic "
        "of spending there and nowhere else, over low compression throughout. "
        f"{style.setting(runs[0])}."
    )


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    detectors: tuple[str, ...] = (),
    out: Path | None = None,
) -> list[Path]:
    """Print the tables of `regimes detect` and draw the bands.

    Args:
        runs: runs, or folders of runs.
        detectors: NAME or NAME:key=value,key=value; default all whose signal was recorded.
        out: folder for tables and figure; default figures/NAME/detectors.
    """
    out = out or Path("figures", runs[0].resolve().name, "detectors")
    result = bench.main(runs, detectors, out)
    fig, numbers = bands(bench.read(runs), result)
    paths = style.save(fig, out / "bands", numbers)
    print(*paths, sep="\n")
    return paths


if __name__ == "__main__":
    from analysis.command import start

    start(main, "analysis.detectors")
