"""Figure 4a: do stochastic gradients share their largest coordinates?

Run, then draw (3 minutes on one core, and some seconds)::

    regimes ablate smoke-overlap --seeds 5
    regimes figure 4a runs/smoke-overlap

The paper (section 4.3) says that more than 90 % of the top 10 % coordinates are common to a pair
of stochastic gradients of an epoch. Left: the overlap against epoch for the paper's batch sizes.
Right: the overlap against batch size, up to half of the training set, the most that two disjoint
batches can have: at what size would the claim hold, if at any? Nothing is extrapolated: near half
of the training set two batches make up the whole set, and their noise is no longer independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from regimes.base.errors import LackingError, RecordError
from regimes.plotting import style
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all, unit_name

from ..common.command import Files, Out, Records
from ..common.compare import group_runs
from ..common.estimates import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIM = 0.9  # the paper's
SHOWN = (32, 128, 512)  # batch sizes, left: a small one; the paper's, of a worker and of all
WHEN = ("early", "middle", "late")
DASHES = ((0, (1.2, 1.2)), (0, (5, 1.5)), "-")
COLOURS = ("#d55e00", "#0173b2", "#000000")  # of falling lightness, for a grey print
MARKERS = ("o", "D", "s")


# -- records to numbers ----------------------------------------------------------------------


def overlaps(runs: Sequence[Record]) -> pd.DataFrame:
    """Per epoch and batch size: n seeds, pairs per seed, mean over seeds of the mean over pairs,
    its 95 % t interval, chance, and the mean over seeds of the layers' mean overlap.

    Raises:
        LackingError: a run without overlap readings.
        RecordError: runs with readings of different shares.
    """
    rows = []
    for run in runs:
        lines = readings(run)
        if not lines:
            raise LackingError(
                f'{run.folder} recorded no support overlap: write statistics = ["overlap"] into '
                "its grid, or train it with --set instruments.overlap.every=1, or the grid "
                "smoke-overlap or small-overlap"
            )
        for line in lines:
            for batch, size in line["sizes"].items():
                rows.append(
                    {
                        "epoch": line["epoch"],
                        "batch": int(batch),
                        "seed": run.seed,
                        "pairs": size["pairs"],
                        "overlap": size["mean"],
                        "chance": line["chance"],
                        "percent": line["percent"],
                        "layers": _average_layers(run, line["epoch"], batch),
                    }
                )
    frame = pd.DataFrame(rows)
    if frame["percent"].nunique() > 1:
        raise RecordError("runs of different overlap.percent: draw them apart")
    return pd.DataFrame(
        [_pool_seeds(key, seeds) for key, seeds in frame.groupby(["epoch", "batch"])]
    )


def readings(run: Record) -> list[dict[str, Any]]:
    """A run's readings of the overlap, as its record has them."""
    return [line for line in run.details if line["instrument"] == "overlap"]


def _average_layers(run: Record, epoch: int, batch: str) -> float:
    column = f"overlap:b{batch}"
    if column not in run.layers:
        return float("nan")
    return float(run.layers.loc[run.layers["epoch"] == epoch, column].mean())


def _pool_seeds(key: Any, rows: pd.DataFrame) -> dict[str, Any]:
    """The row of an (epoch, batch size), from a row for each seed."""
    return {
        "epoch": key[0],
        "batch": key[1],
        "n": len(rows),
        "pairs": rows["pairs"].iloc[0],
        **estimate(rows["overlap"].to_list(), "overlap", alone=True),
        "chance": rows["chance"].iloc[0],
        "layers": rows["layers"].mean(),
        "percent": rows["percent"].iloc[0],
    }


def moments(numbers: pd.DataFrame, config: dict[str, Any]) -> dict[str, int]:
    """The measured epochs that stand for early (the first), middle (nearest to half of the
    training) and late (the last)."""
    epochs = sorted(numbers["epoch"].unique().tolist())
    length = epochs[-1] + 1 if config.get("unit_steps") else config["epochs"]
    middle = min(epochs, key=lambda epoch: (abs(epoch - length // 2), epoch))
    return dict(zip(WHEN, (epochs[0], middle, epochs[-1]), strict=True))


def verdict(numbers: pd.DataFrame, train: int | None) -> str:
    """At what batch size the overlap reaches the paper's 90 %, in words; ``train``: the training
    images, None if the record does not say."""
    largest = int(numbers["batch"].max())
    top = numbers.sort_values("overlap").iloc[-1]
    is_half = train is not None and 2 * largest >= train - 1  # rounded down where train is odd
    half = "half of the training set" if is_half else "the largest one measured"
    if float(top["overlap"]) < CLAIM:
        return (
            f"90 % is not reached at any batch size up to {largest:,} images ({half}) in any "
            f"measured epoch; the highest mean is {100 * top['overlap']:.0f} % "
            f"(batch {top['batch']:,.0f}, after epoch {top['epoch']:.0f})"
        )
    first = numbers[numbers["overlap"] >= CLAIM].sort_values(["batch", "epoch"]).iloc[0]
    return (
        f"90 % is reached first at batch {first['batch']:,.0f} (after epoch {first['epoch']:.0f}: "
        f"{100 * first['overlap']:.0f} %)"
    )


# -- the figure ------------------------------------------------------------------------------


def figure4a(runs: Iterable[Record], schedule: str = "dense") -> style.Drawing:
    """Overlap against epoch and against batch size in training by one schedule."""
    chosen = group_runs(runs, [schedule])[schedule]
    numbers, one = overlaps(chosen), chosen[0]
    measured = sorted({*numbers["batch"]})
    shown = [b for b in SHOWN if b in measured]
    shown = shown if len(shown) > 1 else measured[: len(SHOWN)]
    when = moments(numbers, one.config)
    with style.theme():
        fig = style.figure(3.6)
        halves: Any = fig.subfigures(1, 2)
        left, right = (half.add_subplot() for half in halves)
        style.mark_decays(left, one)
        # as much room as the left panel has for its decays, so that both panels are as tall
        right.text(0.5, 1.01, " ", fontsize=7, va="bottom", transform=right.transAxes)
        for i, batch in enumerate(shown):
            _draw(left, numbers[numbers["batch"] == batch], "epoch", f"{batch}", i)
        for i, (word, epoch) in enumerate(when.items()):
            rows = numbers[numbers["epoch"] == epoch]
            _draw(right, rows, "batch", f"{word} ({epoch})", i)
        _format_size_axis(right, sorted(numbers["batch"].unique().tolist()))
        left.set_xlabel(unit_name(one.config))
        titles = ("batch size (images)", "measured after epoch")
        for half, ax, title in zip(halves, (left, right), titles, strict=True):
            ax.set(ylim=(0, 1), ylabel=f"overlap of the top {numbers['percent'].iloc[0]:g} %")
            _draw_references(ax, float(numbers["chance"].iloc[0]))
            half.legend(
                *ax.get_legend_handles_labels(),
                loc="outside upper center",
                ncols=3,
                title=title,
                handlelength=3,
            )
        add_headline(fig, _title(numbers, max(shown)))
        style.add_caption(fig, _caption(numbers, one, schedule, len(chosen)))
    return style.Drawing(fig, numbers)


def _title(numbers: pd.DataFrame, batch: int) -> str:
    """What two large batches have in common, over the epochs."""
    shares = 100 * numbers.loc[numbers["batch"] == batch, "overlap"].dropna()
    if shares.empty:
        return f"What the top coordinates of two gradients of {batch} images have in common"
    return (
        f"Two gradients of {batch} images share {shares.min():.0f} to {shares.max():.0f}\xa0% of "
        f"their top {numbers['percent'].iloc[0]:g}\xa0% coordinates, by epoch; the paper says "
        f"over {100 * CLAIM:.0f}\xa0%"
    )


def _draw(ax: Axes, rows: pd.DataFrame, x: str, label: str, i: int) -> None:
    """Draw the mean and its 95 % interval in the i-th of three looks."""
    ax.plot(
        rows[x],
        rows["overlap"],
        label=label,
        color=COLOURS[i],
        linestyle=DASHES[i],
        marker=MARKERS[i],
        markersize=4,
        markeredgecolor="white",
        linewidth=1.5,
    )
    band = rows[x], rows["ci_low"], rows["ci_high"]
    ax.fill_between(*band, color=COLOURS[i], alpha=0.15, linewidth=0)


def _format_size_axis(ax: Axes, sizes: list[int]) -> None:
    """Make the x axis logarithmic, with a tick at each measured size unless labels would touch."""
    ax.set(xscale="log", xlabel="batch size (images)")
    ticks = sizes[-1:]
    for size in reversed(sizes):
        if ticks[-1] >= 1.6 * size:
            ticks.append(size)
    ax.set_xticks(ticks, [f"{size:,}" for size in ticks])
    ax.minorticks_off()


def _draw_references(ax: Axes, chance: float) -> None:
    """Draw a line at the paper's claim, and one at the overlap by chance."""
    for height, words in ((CLAIM, "paper: > 90 %"), (chance, f"by chance: {chance:.2f}")):
        ax.axhline(height, color="#555555", linewidth=1, linestyle=(0, (6, 2, 1, 2)), zorder=1)
        ax.text(
            0.01,
            height + 0.012,
            words,
            fontsize=7,
            ha="left",
            va="bottom",
            color="#333333",
            transform=ax.get_yaxis_transform(),
        )


def _caption(numbers: pd.DataFrame, one: Record, schedule: str, seeds: int) -> str:
    table = one.config["instruments"]["overlap"]
    pairs = numbers.drop_duplicates("batch").sort_values("batch")
    counts = ", ".join(f"{b}:\xa0{p}" for b, p in zip(pairs["batch"], pairs["pairs"], strict=True))
    spread = style.intervals_in_words([seeds], bars=False)
    return (
        f"Share of the top {numbers['percent'].iloc[0]:g} % coordinates (whole gradient) that two "
        f"stochastic gradients of disjoint batches have in common, at the weights at the end of an "
        f"epoch (every {table.get('every', 1)}), BatchNorm with each batch's statistics; schedule "
        f"{schedule!r}. Mean over all pairs (batch:\xa0pairs: {counts}), then over "
        f"{style.seeds_in_words([seeds])}; {spread}. "
        f"{verdict(numbers, one.header['data']['train'])}. {style.describe_setting(one)}."
    )


# -- the command -----------------------------------------------------------------------------


def main(records: Records, out: Out = None) -> list[Path]:
    """Draw Figure 4a from the records under RECORDS, once for each schedule with readings of the
    overlap."""
    files, every = Files(records, out), load_all(records)
    runs = [run for run in every if readings(run)] or every  # ``overlaps`` says how to record them
    for schedule, (one, *_) in group_runs(runs).items():
        fig, numbers = figure4a(runs, schedule)
        files.figure(f"figure4a-{schedule}", (fig, numbers))
        print(f"{schedule}: {verdict(numbers, one.header['data']['train'])}")
        when = moments(numbers, one.config)
        for word, epoch in when.items():
            rows = numbers[numbers["epoch"] == epoch]
            texts = [
                f"{r.batch}: {r.overlap:.2f} [{r.ci_low:.2f}, {r.ci_high:.2f}]"
                for r in rows.itertuples()
            ]
            print(f"  {word} (epoch {epoch}, n = {rows['n'].iloc[0]}): {'; '.join(texts)}")
    return files.print_paths()
