"""The house style of all figures: how a schedule looks, how a figure is captioned and saved.

Colours are seaborn's colour-blind-safe set; every schedule also has a line style and a marker of
its own, so that a grey print reads as well. ``save`` writes the same bytes for the same numbers.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from regimes.records import write_output, write_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from regimes.records import Record

WIDTH = 7.2  # inches: two columns of a paper
DPI = 200
CAPTION_LETTERS = 132  # of size 7 that fit into WIDTH


@dataclass(frozen=True)
class Look:
    """How one schedule is drawn everywhere."""

    label: str
    colour: str
    dash: Any = "-"
    marker: Any = "o"
    width: float = 1.4

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of ``Axes.plot``."""
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "linewidth": self.width,
            "marker": self.marker,
            "markersize": 8 if self.marker in ("*", (6, 1, 0)) else 4.5,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            "zorder": 2 + self.width,
        }


_C = sns.color_palette("colorblind").as_hex()
_C[8] = "#7d6b00"  # the palette's yellow is too pale for a line
LOOKS = {
    "dense": Look("dense (no compression)", "#000000", "-", "s"),
    "low": Look("low compression", _C[0], (0, (6, 1.2)), "o"),
    "high": Look("high compression", _C[3], (0, (1.2, 1.2)), "v"),
    "accordion": Look("ACCORDION", _C[1], "-", "*", 2.2),
    "low-in-critical": Look("low in critical, high elsewhere", _C[2], (0, (4, 1.2, 1.2, 1.2)), "D"),
    "high-in-critical": Look("high in critical, dense elsewhere", _C[4], (0, (8, 2)), "X"),
    "dense-deleted": Look("control: dense, early epochs deleted", _C[7], (0, (2, 1)), "^"),
    "low-early": Look("control: low early only", _C[9], (0, (4, 1, 1, 1, 1, 1)), "<"),
    "low-late": Look("control: low late only", _C[7], (0, (2.5, 2.5)), ">"),
    "adaqs": Look("AdaQS (Guo et al., 2020)", _C[4], (0, (5, 1, 1, 1)), "H"),
    "smith": Look("Smith et al. (2017)", _C[5], (0, (7, 1.5, 1.5, 1.5)), "h"),
    "mid": Look("middle compression", _C[9], (0, (3, 1)), "p"),
    "high-longer": Look("high compression, as many floats as low", _C[8], (0, (2, 1.5)), "d"),
    "high-stretched": Look("the same, decays stretched", _C[5], (0, (4, 1, 1.5, 1)), "8"),
    "large-batch-8x": Look("large batch, 8 times the small", _C[8], (0, (2, 3)), (3, 0, 30)),
    "accordion-batch-8x": Look("ACCORDION, 8 times the small", _C[4], (0, (9, 1)), (6, 1, 0), 1.8),
}
LIKE = {  # what plays the same part as one above, in a figure of its own
    "small-batch": ("low", "small batch"),
    "large-batch": ("high", "large batch"),
    "small-in-critical": ("low-in-critical", "small in critical, large elsewhere"),
    "large-in-critical": ("high-in-critical", "large in critical, small elsewhere"),
    "accordion-batch": ("accordion", "ACCORDION"),
    "rank 4": ("low", "rank 4"),
    "rank 2": ("mid", "rank 2"),
    "rank 1": ("high", "rank 1"),
    "accordion 4-1": ("accordion", "ACCORDION, ranks 4 and 1"),
    "accordion 4-2": ("accordion-batch-8x", "ACCORDION, ranks 4 and 2"),
    "none": ("dense", "no deficit"),
}
SPARE = (
    (_C[5], (0, (1, 1.5)), "P"), (_C[2], (0, (5, 1.5, 2, 1.5)), "<"), (_C[4], (0, (3, 1.5)), "D"),
    (_C[7], (0, (6, 2)), ">"), (_C[6], (0, (2, 2, 4, 2)), "^"), (_C[8], (0, (1, 1, 3, 1)), "X"),
    (_C[9], (0, (8, 1.5)), "d"), (_C[0], (0, (1, 3)), "h"),
)  # fmt: skip
LEVELS = {"high": "#e4e4e4", "low": _C[0], "dense": "#1a1a1a"}  # light to dark: more traffic


def look(name: str, spare: int = 0) -> Look:
    """A schedule's look; one that the table lacks has a spare one under its own name."""
    if name in LIKE:
        return replace(LOOKS[LIKE[name][0]], label=LIKE[name][1])
    return LOOKS.get(name, Look(name, *SPARE[spare % len(SPARE)]))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The looks of one figure's schedules, in order; those that the table lacks have markers that
    no other one has."""
    found = {name: look(name) for name in order(names)}
    strangers = [name for name in found if name not in LOOKS and name not in LIKE]
    taken = {seen.marker for name, seen in found.items() if name not in strangers}
    free = [i for i, (*_, marker) in enumerate(SPARE) if marker not in taken]
    return found | {name: look(name, free[i % len(free)]) for i, name in enumerate(strangers)}


def order(names: Iterable[str]) -> list[str]:
    """The table's order, then the unknown ones by name."""
    known = list(LOOKS)
    roles = {name: LIKE.get(name, (name,))[0] for name in names}
    return sorted(
        roles, key=lambda n: (known.index(roles[n]) if roles[n] in known else len(known), n)
    )


def theme() -> AbstractContextManager[None]:
    """matplotlib's settings while a figure is drawn or saved; leaves no trace on other figures."""
    return mpl.rc_context(
        {
            **sns.axes_style("ticks"),
            **sns.plotting_context("paper"),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e8e8e8",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
            "font.size": 8,
            "axes.labelsize": 8,
            "axes.titlesize": 8.5,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "legend.title_fontsize": 7.5,
            "svg.hashsalt": "regimes",
        }
    )


def figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, inches; not known to pyplot, so that nothing needs closing."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


# -- what all figures say --------------------------------------------------------------------


def setting(run: Record) -> str:
    """Data set, model, scale and workers of a run, in words."""
    c, h = run.config, run.header
    parameters = sum(math.prod(layer["shape"]) for layer in h["layers"])
    name, path = c["data"]["name"], c["data"].get("path")
    data = Path(path).name if name == "folder" and path else name
    size = c["data"].get("image_size")
    pixels = f" at {size} × {size} pixels" if size else ""
    words = h["data"].get("words")  # of a text
    unit, batch = (f"tokens of {words:,} words", "streams") if words else ("images", "images")
    return (
        f"Setting: {data}, {h['data']['train']:,} training and "
        f"{h['data']['test']:,} test {unit}{pixels}; {c['model']['name']}, "
        f"{parameters:,} parameters; {c['epochs']} epochs; "
        f"W\xa0=\xa0{c['workers']} workers\xa0×\xa0{c['batch_size']} {batch}; {levels(c)}"
    )


def levels(config: dict[str, Any]) -> str:
    """What the levels of a run mean, in words: of the batch size if that is what changes."""
    batches = config.get("batch_levels") or {}
    sizes = ", ".join(f"{name}\xa0=\xa0{size}" for name, size in batches.items())
    if sizes and config["policy"].get("level") == "dense":
        return f"batch per worker ({sizes}), no compression"
    ranks = ", ".join(f"{name}\xa0=\xa0{value}" for name, value in config["levels"].items())
    compressed = f"{config['compressor']['name']} ({ranks})"
    return f"{compressed}; batch per worker ({sizes})" if sizes else compressed


def seeds_in_words(counts: Sequence[int]) -> str:
    """ "n = 5 seeds", or a range."""
    low, high = min(counts), max(counts)
    return (
        f"n\xa0=\xa0{low if low == high else f'{low} to {high}'}\xa0seed{'' if high == 1 else 's'}"
    )


def caption(fig: Figure, text: str) -> None:
    """A small wrapped paragraph below the figure; the layout makes room for it."""
    letters = round(CAPTION_LETTERS * fig.get_size_inches()[0] / WIDTH)
    wrapped = "\n".join(textwrap.wrap(text, letters))  # keeps non-breaking spaces
    fig.supxlabel(wrapped, x=0.012, ha="left", fontsize=7, color="#444444", linespacing=1.35)


def log_axis(ax: Axes) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5, written out."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def mark_decays(ax: Axes, config: dict[str, Any], labelled: bool = True) -> None:
    """A dotted vertical line before each epoch that is the first at a lower learning rate, its
    factor written above where the one before leaves room."""
    optimizer, (low, high), last = config["optimizer"], ax.get_xlim(), -math.inf
    for first in optimizer.get("decay_epochs", ()):
        if first < config["epochs"]:
            ax.axvline(first - 0.5, color="black", linewidth=1, linestyle=(0, (1, 1.6)), zorder=1.5)
            if labelled and first - last > 0.15 * (high - low):
                last = first
                ax.text(first - 0.5, 1.01, f"lr ÷ {optimizer['decay_factor']:g}", fontsize=7,
                        ha="center", va="bottom", transform=ax.get_xaxis_transform())  # fmt: skip


def shade(ax: Axes, windows: Iterable[Sequence[int]]) -> None:
    """Grey behind the epochs of each window ``[first, stop)``."""
    for first, stop in windows:
        ax.axvspan(first - 0.5, stop - 0.5, color="#ececec", linewidth=0, zorder=0)


# -- to disk ---------------------------------------------------------------------------------


def save(fig: Figure, stem: Path, numbers: pd.DataFrame) -> list[Path]:
    """``stem``.png, .svg, and .csv with the plotted numbers in full precision.

    Raises:
        RecordError: the folder cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "csv")]
    png, svg = io.BytesIO(), io.BytesIO()
    with theme():
        fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
        fig.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    write_output(paths[0], png.getvalue())
    write_output(paths[1], svg.getvalue())
    write_table(paths[2], numbers)
    return paths
