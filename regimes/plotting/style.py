"""The house style of all figures: theme, captions, axes, files; `looks` has the schedules' colours.

``save`` writes the same bytes for the same numbers.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator

from regimes.plotting.decays import decays
from regimes.plotting.looks import LEVELS as LEVELS
from regimes.plotting.looks import LOOKS as LOOKS
from regimes.plotting.looks import order as order
from regimes.plotting.looks import style_of as style_of
from regimes.plotting.looks import styles_of as styles_of
from regimes.records import OWN, count_units, unit_name, write_output, write_table
from regimes.replay.agreement import LEAST

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from regimes.records import Record

WIDTH = 7.2  # inches: two columns of a paper
DPI = 200
MANY = 6  # curves in a panel, from which on they are thinned (`panels.fill`)
CAPTION_LETTERS = 132  # of size 7 that fit into WIDTH


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
    """Data set, model, scale and workers of a run, in words, as far as they are known."""
    c, h = run.config, run.header
    parameters = sum(math.prod(layer["shape"]) for layer in h["layers"])
    unit, batch = _samples(run)
    samples = f"\xa0×\xa0{c['batch_size']} {batch}" if c.get("batch_size") else ""
    parts = [
        _data(run, unit),
        f"{c['model']['name']}, {parameters:,} parameters",
        count_units(h, run.rows),
        f"W\xa0=\xa0{c['workers']} worker{'' if c['workers'] == 1 else 's'}{samples}",
        levels(c),
    ]
    return f"Setting: {'; '.join(part for part in parts if part)}"


def _data(run: Record, unit: str) -> str:
    """What was trained on; of somebody's own training at most a name."""
    data, known = run.config["data"], run.header["data"]
    if known.get("train") is None or known.get("test") is None:
        return "" if data["name"] == OWN else data["name"]
    path, size = data.get("path"), data.get("image_size")
    name = Path(path).name if data["name"] == "folder" and path else data["name"]
    pixels = f" at {size} × {size} pixels" if size else ""
    return f"{name}, {known['train']:,} training and {known['test']:,} test {unit}{pixels}"


def _samples(run: Record) -> tuple[str, str]:
    """What the data set and a batch are made of."""
    data, words = run.config["data"], run.header["data"].get("words")
    if data["name"] == "matrix":
        return "entries", "entries"
    if not words:
        return ("samples", "samples") if run.hooked else ("images", "images")
    kind = data.get("tokenizer", "bytes") if data["name"] != "wikitext-2" else "words"
    token = {"words": f"tokens of {words:,} words", "bpe": f"byte pairs out of {words:,}"}
    streams = data.get("windows", "streams" if kind == "words" else "contiguous") == "streams"
    return token.get(kind, "bytes"), "streams" if streams else f"windows of {data['sequence']}"


def levels(config: dict[str, Any]) -> str:
    """What the levels of a run mean, in words: of the batch size or the period, if that is what
    changes."""
    words = config.get("sync_levels") if config.get("sync_policy") else None
    periods = ", ".join(f"{name}\xa0=\xa0{steps}" for name, steps in (words or {}).items())
    if periods and config["policy"].get("level") == "dense":
        return f"steps between synchronisations ({periods}), no compression"
    batches = config.get("batch_levels") or {}
    sizes = ", ".join(f"{name}\xa0=\xa0{size}" for name, size in batches.items())
    if sizes and config["policy"].get("level") == "dense":
        return f"batch per worker ({sizes}), no compression"
    ranks = ", ".join(f"{name}\xa0=\xa0{value}" for name, value in config["levels"].items())
    compressed = f"{config['compressor']['name']} ({ranks})" if ranks else "no compression"
    return f"{compressed}; batch per worker ({sizes})" if sizes else compressed


def seeds_in_words(counts: Sequence[int]) -> str:
    """ "n = 5 seeds", or a range."""
    low, high = min(counts), max(counts)
    return (
        f"n\xa0=\xa0{low if low == high else f'{low} to {high}'}\xa0seed{'' if high == 1 else 's'}"
    )


def intervals_in_words(counts: Sequence[int], drawn: int) -> str:
    """What bands and bars are, of schedules with so many seeds each, so many in a panel."""
    if max(counts) < LEAST:
        return "fewer than three seeds, so no interval"
    return f"{'bars' if drawn > MANY else 'bands and bars'}: 95 % t interval of the mean"


def caption(fig: Figure, text: str) -> None:
    """A small wrapped paragraph below the figure; the layout makes room for it."""
    letters = round(CAPTION_LETTERS * fig.get_size_inches()[0] / WIDTH)
    wrapped = "\n".join(textwrap.wrap(text, letters))  # keeps non-breaking spaces
    fig.supxlabel(wrapped, x=0.012, ha="left", fontsize=7, color="#444444", linespacing=1.35)


def log_axis(ax: Axes) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5, written out; at 1 alone if what is drawn by
    now spans more than four decades."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 1e4 * low else (1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def unit_of(config: dict[str, Any]) -> str:
    """What an axis of epochs counts: "epoch", or "unit of 50 steps"."""
    return unit_name({"config": config})


def mark_decays(ax: Axes, run: Record, labelled: bool = True) -> None:
    """A dotted vertical line before each epoch that is the first at a lower learning rate, its
    factor written above where the one before leaves room."""
    (low, high), last = ax.get_xlim(), -math.inf
    for first, factor in decays(run):
        if not low <= first - 0.5 <= high:
            continue
        ax.axvline(first - 0.5, color="black", linewidth=1, linestyle=(0, (1, 1.6)), zorder=1.5)
        if labelled and first - last > 0.15 * (high - low):
            last = first
            words = f"lr ÷ {factor:.3g}" if math.isfinite(factor) else "lr 0"
            ax.text(first - 0.5, 1.01, words, fontsize=7,
                    ha="center", va="bottom", transform=ax.get_xaxis_transform())  # fmt: skip


def shade(ax: Axes, windows: Iterable[Sequence[int]]) -> None:
    """Grey behind the epochs of each window ``[first, stop)``."""
    for first, stop in windows:
        ax.axvspan(first - 0.5, stop - 0.5, color="#ececec", linewidth=0, zorder=0)


def plain_where_no_formula(fig: Figure) -> None:
    """What stands between two dollars is drawn as a formula; as it is where it is none, such as in
    the name of a stranger's metric."""
    parser = MathTextParser("path")
    for text in fig.findobj(Text):
        try:
            if "$" in text.get_text():
                parser.parse(text.get_text())
        except ValueError:
            text.set_parse_math(False)


# -- to disk ---------------------------------------------------------------------------------


def save(fig: Figure, stem: Path, numbers: pd.DataFrame) -> list[Path]:
    """``stem``.png, .svg, and .csv with the plotted numbers in full precision."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "csv")]
    png, svg = io.BytesIO(), io.BytesIO()
    with theme():
        plain_where_no_formula(fig)
        fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
        fig.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    write_output(paths[0], png.getvalue())
    write_output(paths[1], svg.getvalue())
    write_table(paths[2], numbers)
    return paths
