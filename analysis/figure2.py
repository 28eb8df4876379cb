"""Figure 2 (and 1, 18-20): what compression costs inside and outside the critical regimes.

Run, then draw (2 minutes and 10 seconds on two cores)::

    regimes ablate smoke --seeds 5
    python -m analysis.figure2 runs/smoke

- 2a: the gradient norm per layer falls fast in the critical windows (paper, section 3).
- 2b: low compression in the critical windows alone is enough; high compression in them is not
  made up for by sending everything elsewhere. ACCORDION finds the windows. The controls spend
  their traffic at another time.
- The levels that ACCORDION chose, per layer and epoch (appendix).
- The table: accuracy, traffic, and paired differences between schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from analysis import style
from analysis.compare import (
    LAST,
    SCHEDULES,
    as_text,
    compressed,
    curves,
    groups,
    levels,
    norms,
    table,
    windows,
    write_tables,
)
from regimes.errors import RecordError
from regimes.records import Record, load_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RECOVER, DAMAGE = "Low compression where it is critical", "High compression where it is critical"
PANELS = {  # the two halves of the argument; schedules of neither list go to the first
    RECOVER: ("low", "high", "low-in-critical", "accordion", "low-early", "low-late"),
    DAMAGE: ("dense", "low", "high-in-critical", "dense-deleted"),
}


# -- the figures -----------------------------------------------------------------------------


def figure2a(runs: Iterable[Record], schedule: str = "low") -> tuple[Figure, pd.DataFrame]:
    """Gradient norm per layer against epoch, and the numbers behind it."""
    found = groups(runs, [schedule])
    chosen, critical = found[schedule], windows(found)
    numbers, layers, config = norms(chosen), compressed(chosen[0]), chosen[0].config
    colours = sns.color_palette("viridis", len(layers) + 1)[: len(layers)]  # the last is too pale
    with style.theme():
        fig = style.figure(3.3)
        ax = fig.add_subplot()
        style.shade(ax, critical)
        style.mark_decays(ax, config)
        for (depth, rows), colour in zip(numbers.groupby("depth"), colours, strict=True):
            positive = rows["norm"].where(rows["norm"] > 0)
            i, width = int(str(depth)), 1.4 if len(layers) <= 14 else 0.8
            dash = ("-", (0, (5, 1)), (0, (1.5, 1)))[i % 3]
            ax.plot(
                rows["epoch"],
                positive,
                color=colour,
                linestyle=dash,
                linewidth=width,
                label=_layer(layers[i]),
            )
        ax.set(xlabel="epoch", ylabel=f"gradient norm ({config['signal']})")
        ax.margins(x=0.01)
        style.log_axis(ax)
        size = 7.5 if len(layers) <= 30 else 4.5
        title = "layer, from input to output"
        fig.legend(
            loc="outside right upper",
            title=title,
            ncols=1 if len(layers) <= 14 else 2,
            fontsize=size,
        )
        shaded = "Shaded: the hand-made critical windows. " if critical else ""
        style.caption(
            fig,
            f"Norm of a layer's gradient accumulated over an epoch (signal {config['signal']!r}), "
            f"schedule {schedule!r}, mean over {style.seeds_in_words([len(chosen)])}. {shaded}"
            f"{style.setting(chosen[0])}.",
        )
    return fig, numbers


def figure2b(runs: Iterable[Record]) -> tuple[Figure, pd.DataFrame]:
    """Accuracy against epoch and against floats, per schedule, and the numbers behind it."""
    found = groups(runs, SCHEDULES)
    numbers, one = curves(found), found["low"][0]
    strangers = tuple(name for name in found if name not in style.LOOKS)
    with style.theme():
        fig = style.figure(6.6)
        grid = fig.add_gridspec(2, 1, hspace=0.04)
        halves = [fig.add_subfigure(grid[i]) for i in range(2)]
        for (title, names), half in zip(PANELS.items(), halves, strict=True):
            left, right = half.subplots(1, 2, sharey=True)
            style.shade(left, windows(found))
            style.mark_decays(left, one.config)
            for name in names + (strangers if title == RECOVER else ()):
                if name in found:
                    _draw(left, right, numbers[numbers["schedule"] == name], style.look(name))
            left.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=_limits(numbers["accuracy"]))
            left.margins(x=0.01)
            right.set(xscale="log", xlabel="floats communicated (the paper's count)")
            half.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3,
                        title=title, handlelength=4)  # fmt: skip
        counts = [len(group) for group in found.values()]
        sooner = found.get("dense-deleted", [one])[0].config["epochs"] - one.config["epochs"]
        early = f"The last control decays {-sooner} epochs earlier. " if sooner else ""
        spread = "bands and bars: 95 % t interval of the mean"
        style.caption(
            fig,
            f"Mean over {style.seeds_in_words(counts)}; "
            f"{spread if max(counts) > 1 else 'one seed, so no interval'}. Shaded: the hand-made "
            "critical windows. Right: the same curves; a large marker is the end of training. "
            f"{early}{style.setting(one)}.",
        )
    return fig, numbers


def _limits(accuracy: pd.Series) -> tuple[float, float]:
    return max(0.0, float(accuracy.min()) - 4), min(101.0, float(accuracy.max()) + 4)


def _draw(left: Axes, right: Axes, rows: pd.DataFrame, look: style.Look) -> None:
    """Left, against epochs: mean and band. Right, against floats: mean; at its end the interval."""
    every = max(1, len(rows) // 8)
    first = sum(map(ord, look.marker)) % every  # the markers of two schedules fall apart
    left.plot(rows["epoch"], rows["accuracy"], markevery=(first, every), label=look.label,
              **look.line)  # fmt: skip
    left.fill_between(
        rows["epoch"], rows["ci_low"], rows["ci_high"], color=look.colour, alpha=0.12, linewidth=0
    )
    right.plot(rows["floats"], rows["accuracy"], **{**look.line, "marker": ""})
    end = rows.iloc[-1]
    half = 0.0 if math.isnan(end["ci_high"]) else end["ci_high"] - end["accuracy"]
    bar = {**look.line, "markersize": 1.5 * look.line["markersize"], "linestyle": "", "zorder": 9}
    right.errorbar(end["floats"], end["accuracy"], half, capsize=2.5, elinewidth=1, **bar)


def level_map(
    runs: Iterable[Record], schedule: str = "accordion", seed: int | None = None
) -> tuple[Figure, pd.DataFrame]:
    """The level of each compressed layer per epoch in one run; below, the share at low of all."""
    found = groups(runs, [schedule])
    chosen = found[schedule]
    shown = next((run for run in chosen if seed in (None, run.seed)), None)
    if shown is None:
        raise RecordError(
            f"no {schedule!r} run of seed {seed}: there are {[r.seed for r in chosen]}"
        )
    numbers, layers = levels(chosen), compressed(shown)
    names = [layer["name"] for layer in layers]
    image = numbers[numbers["seed"] == shown.seed].pivot(
        index="layer", columns="epoch", values="level"
    )
    with style.theme():
        size = 7.0 if len(layers) <= 30 else 4.5
        map_height = max(1.4, len(layers) * size / 45)
        fig = style.figure(map_height + 2.2)
        ratios = {"height_ratios": [map_height, 1.0]}
        top, bottom = fig.subplots(2, 1, sharex=True, gridspec_kw=ratios)
        fig.legend(handles=_paint(top, image.loc[names]), loc="outside upper right", ncols=3)
        top.set_yticks(range(len(layers)), [_layer(layer) for layer in layers], fontsize=size)
        _shares(bottom, numbers)
        for ax in (top, bottom):
            style.mark_decays(ax, shown.config, labelled=ax is top)
        style.caption(
            fig,
            f"Top: compression level of each compressed layer (network order) in the run of seed "
            f"{shown.seed}. Bottom: share of layers at low compression, thick: mean over "
            f"{style.seeds_in_words([len(chosen)])}, thin: each seed. "
            f"{style.setting(shown)}.",
        )
    return fig, numbers


def _shares(ax: Axes, numbers: pd.DataFrame) -> None:
    """Share of layers at low against epoch: each seed thin, their mean thick."""
    shares = numbers.assign(low=numbers["level"] == "low").groupby(["seed", "epoch"])["low"].mean()
    for _, share in shares.groupby("seed"):
        ax.step(share.index.get_level_values("epoch"), 100 * share, where="mid", color="#999999",
                linewidth=0.7)  # fmt: skip
    mean = 100 * shares.groupby("epoch").mean()
    ax.step(mean.index, mean, where="mid", color=style.LEVELS["low"], linewidth=2)
    ax.set(xlabel="epoch", ylabel="layers at\nlow (%)", ylim=(-4, 104))


def _paint(ax: Axes, image: pd.DataFrame) -> list[Patch]:
    """Levels as colours, light to dark, with white lines between the rows; the legend's entries."""
    present = set(image.to_numpy().ravel())
    known = [*style.LEVELS, *sorted(present - set(style.LEVELS))]
    colours = [style.LEVELS.get(level, "#999999") for level in known]
    codes = image.map(known.index).to_numpy()
    ax.imshow(codes, ListedColormap(colours), norm=BoundaryNorm(np.arange(len(known) + 1) - 0.5,
              len(known)), aspect="auto", interpolation="nearest")  # fmt: skip
    for edge in range(1, len(codes)):
        ax.axhline(edge - 0.5, color="white", linewidth=0.8)
    ax.grid(False)
    ax.tick_params(axis="y", length=0)
    words = {"low": "low compression", "high": "high compression"}
    return [
        Patch(facecolor=colour, edgecolor="#888888", label=words.get(level, level))
        for level, colour in zip(known, colours, strict=True)
        if level in present
    ]


def _layer(layer: dict[str, Any]) -> str:
    return f"{layer['name'].removesuffix('.weight')}  {'×'.join(map(str, layer['shape']))}"


# -- the command -----------------------------------------------------------------------------


def main(folder: Path, out: Path | None = None) -> list[Path]:
    """Draw Figure 2 and its table from the records under FOLDER.

    Args:
        folder: of the runs, e.g. runs/smoke.
        out: folder for the figures; default figures/NAME.
    """
    from rich.console import Console
    from rich.table import Table

    runs = load_all(folder)
    rows, pairs = table(runs)
    out = out or Path("figures", folder.resolve().name)
    about = (
        f"{style.setting(runs[0])}. Accuracy: mean of the last {LAST} epochs; mean ± sd over "
        "seeds. Floats: the paper's count. Differences: paired over seeds, in points of accuracy."
    )
    console = Console(highlight=False)
    for lines in as_text(rows, pairs):
        shown = Table(box=None, header_style="bold", pad_edge=False)
        for i, title in enumerate(lines[0]):
            shown.add_column(title, justify="right" if i else "left", no_wrap=True)
        for line in lines[1:]:
            shown.add_row(*line)
        console.print(shown, "")
    paths = write_tables(out, rows, pairs, about)
    paths += style.save(*_with_stem(figure2a(runs), out / "figure2a"))
    paths += style.save(*_with_stem(figure2b(runs), out / "figure2b"))
    paths += style.save(*_with_stem(level_map(runs), out / "levels"))
    console.print(*map(str, paths), sep="\n")
    return paths


def _with_stem(drawn: tuple[Figure, pd.DataFrame], stem: Path) -> tuple[Figure, Path, pd.DataFrame]:
    return drawn[0], stem, drawn[1]


if __name__ == "__main__":
    from analysis.command import start

    start(main, "analysis.figure2")
