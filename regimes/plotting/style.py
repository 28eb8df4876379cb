"""The common style of all figures: theme, captions, axes, files. Colours of lines: `looks`."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator

from regimes.base.config import as_level
from regimes.base.statistics import LEAST
from regimes.plotting import canvas
from regimes.plotting.canvas import Canvas
from regimes.plotting.groups import find_decays
from regimes.policies.schedules import in_words
from regimes.records import NOT_RECORDED, OWN, Record, count_units, write_output, write_table

WIDTH = 7.2  # inches: two columns of a paper
DPI = 200  # pixels per inch of a saved picture
MANY = 6  # curves in a panel, from which on they are thinned (`panels.draw_curves`)
CAPTION_LETTERS = 132  # of size 7 that fit into WIDTH
DOTTED = (0, (1, 1.6))  # matplotlib's: offset, (points on, points off)


def theme() -> AbstractContextManager[None]:
    """Set matplotlib's parameters while a figure is drawn or saved; other figures keep theirs."""
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
            "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
        }
    )


class Shown(Canvas):
    """Draws a figure that Jupyter shows as the last value of a cell, without pyplot.

    Attributes:
        data: the numbers that it shows; empty where they are not known.
    """

    data = pd.DataFrame()

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure and its numbers, see `Drawing.save`."""
        known = None if self.data.empty else self.data
        return _save_file(self, known, Path(path))

    def _repr_png_(self) -> bytes:
        with theme():
            return render_figure(self, "png")


class Drawing(NamedTuple):
    """Holds a figure and its numbers. Jupyter shows the figure; ``figure, data = ...`` takes it
    apart.

    Attributes:
        figure: matplotlib's.
        data: the numbers that the figure shows, in full precision.
    """

    figure: Figure
    data: pd.DataFrame

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure and its numbers; returns the files.

        Args:
            path: "mine.pdf" writes this file alone; "mine" writes mine.png, mine.svg (or the
                formats of the present `canvas.use_options`) and the numbers, mine.csv.

        Raises:
            RecordError: they cannot be written.
        """
        return _save_file(self.figure, self.data, Path(path))

    def _repr_png_(self) -> bytes:
        with theme():
            return render_figure(self.figure, "png")


def figure(height: float, width: float = WIDTH) -> Shown:
    """Make an empty figure, inches; not known to pyplot, so it needs no closing. The present
    `canvas.use_options` may give it another width."""
    return Shown(width, height, DPI)


# -- texts of all figures --------------------------------------------------------------------


def describe_setting(run: Record, compression: bool = True) -> str:
    """Describe data set, model, scale and workers of a run, in words.

    Args:
        compression: and compressor and levels; False where what is drawn differs in them.
    """
    c, h = run.config, run.header
    parameters = sum(math.prod(layer["shape"]) for layer in h["layers"])
    unit, batch = _samples(run)
    if c.get("batch_size"):
        samples = f"\xa0×\xa0{c['batch_size']} {batch}"
    else:
        samples = f", batch {NOT_RECORDED}" if run.hooked else ""
    return (
        f"Setting: {_data(run, unit)}; {c['model']['name']}, {parameters:,} parameters; "
        f"{count_units(h, run.rows)}; W\xa0=\xa0{c['workers']} worker"
        f"{'' if c['workers'] == 1 else 's'}{samples}"
        f"{f'; {describe_levels(c)}' if compression else ''}"
    )


def _data(run: Record, unit: str) -> str:
    data, known = run.config["data"], run.header["data"]
    if known.get("train") is None or known.get("test") is None:  # a user's own training
        return f"data {NOT_RECORDED}" if data["name"] == OWN else data["name"]
    path, size = data.get("path"), data.get("image_size")
    name = Path(path).name if data["name"] == "folder" and path else data["name"]
    pixels = f" at {size} × {size} pixels" if size else ""
    return f"{name}, {known['train']:,} training and {known['test']:,} test {unit}{pixels}"


def _samples(run: Record) -> tuple[str, str]:
    """The units of a data set and of a batch."""
    data, words = run.config["data"], run.header["data"].get("words")
    if data["name"] == OWN:
        return "samples", "samples"
    if not words:
        return ("samples", "samples") if run.hooked else ("images", "images")
    kind = data.get("tokenizer", "bytes") if data["name"] != "wikitext-2" else "words"
    token = {"words": f"tokens of {words:,} words", "bpe": f"byte pairs out of {words:,}"}
    streams = data.get("windows", "streams" if kind == "words" else "contiguous") == "streams"
    return token.get(kind, "bytes"), "streams" if streams else f"windows of {data['sequence']}"


def describe_levels(config: dict[str, Any]) -> str:
    """Say what a run's levels mean: of the batch size or the period, where these change."""

    def listed(values: dict[str, Any] | None) -> str:
        said = {name: as_level(value) for name, value in (values or {}).items()}
        return ", ".join(f"{name}\xa0=\xa0{value}" for name, value in said.items())

    periods = listed(config.get("sync_levels")) if config.get("sync_policy") else ""
    sizes, dense = listed(config.get("batch_levels")), config["policy"].get("level") == "dense"
    if dense and periods:
        return f"steps between synchronisations ({periods}), no compression"
    if dense and sizes:
        return f"batch per worker ({sizes}), no compression"
    ranks = listed(config["levels"])
    compressed = f"{config['compressor']['name']} ({ranks})" if ranks else "no compression"
    if config.get("sync_policy") and not periods:
        compressed = f"synchronised {in_words(config['sync_policy'], {})}, {compressed}"
    return f"{compressed}; batch per worker ({sizes})" if sizes else compressed


def seeds_in_words(counts: Sequence[int]) -> str:
    """Write the number of seeds: "n = 5 seeds", or a range."""
    count = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"n\xa0=\xa0{count}\xa0seed{'' if max(counts) == 1 else 's'}"


def intervals_in_words(
    counts: Sequence[int], drawn: int = 0, bands: bool = True, bars: bool = True
) -> str:
    """Say what bands and bars mean, those that are drawn.

    Args:
        counts: seeds of each schedule.
        drawn: schedules in a panel of curves; many have no bands.
        bands, bars: whether the figure has a panel with them.
    """
    if max(counts) < LEAST:
        return "fewer than three seeds, so no interval"
    kinds = [*(["bands"] if bands and drawn <= MANY else []), *(["bars"] if bars else [])]
    return f"{' and '.join(kinds)}: 95 % t interval of the mean"


def add_caption(fig: Figure, text: str) -> None:
    """Write a small wrapped paragraph below the figure; the layout makes room for it."""
    if canvas.keep_text(fig, caption=text):
        return
    wrapped = canvas.wrap_text(fig, text, CAPTION_LETTERS / WIDTH, 7)
    fig.supxlabel(wrapped, x=0.012, ha="left", fontsize=7, color="#444444", linespacing=1.35)


# -- axes ------------------------------------------------------------------------------------


class _LogTicks(LogLocator):
    """Ticks at 1, 2 and 5; at 1 alone where these would be too close, as on a low panel."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        assert self.axis is not None
        room = self.axis.get_tick_space()
        self.set_params(subs=(1, 2, 5), numticks=9)
        every = super().tick_values(vmin, vmax)  # none over many decades
        self.set_params(subs=(1,), numticks=max(2, min(9, room)))
        decades = super().tick_values(vmin, vmax)
        shown, alone = (sum(vmin <= x <= vmax for x in ticks) for ticks in (every, decades))
        return decades if not shown or (shown > room and alone > 1) else every


def log_axis(ax: Axes) -> None:
    """Make the y axis logarithmic, with written ticks at 1, 2 and 5, or at 1 alone."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(_LogTicks())
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def mark_decays(ax: Axes, run: Record, labelled: bool = True, behind: str | None = None) -> None:
    """Draw a dotted vertical line before each epoch that is the first at a lower learning rate,
    with the factor above it where the previous one leaves room. Works before and after the curves
    are drawn. The x axis always shows a past decay, and never grows for a future one.

    Args:
        behind: colour of a solid line behind the dotted one, for dark pictures.
    """
    texts: dict[float, Text] = {}
    centred: Any = {"fontsize": 7, "ha": "center", "va": "bottom"}
    # a line over the whole height that, unlike ``axvline``, does not change the limits
    upright: Any = {"ydata": [0, 1], "transform": ax.get_xaxis_transform()}
    for first, factor in find_decays(run):
        x = first - 0.5
        if behind:
            ax.add_artist(Line2D([x, x], color=behind, linewidth=2.2, zorder=1, **upright))
        dotted = Line2D([x, x], color="black", linewidth=1, linestyle=DOTTED, zorder=1.5, **upright)
        ax.add_artist(dotted)
        if first < len(run.rows):
            ax.update_datalim([(x, 0)], updatey=False)
        if labelled:
            words = f"lr ÷ {factor:.3g}" if math.isfinite(factor) else "lr 0"
            texts[x] = ax.text(x, 1.01, words, transform=ax.get_xaxis_transform(), **centred)
    ax.autoscale_view(scaley=False)
    _show_where_room(ax, texts)
    # curves that are drawn later change the limits
    ax.callbacks.connect("xlim_changed", lambda changed: _show_where_room(changed, texts))


def _show_where_room(ax: Axes, texts: dict[float, Text]) -> None:
    """Show each text within the x limits that is far enough from the last one shown."""
    (low, high), last = ax.get_xlim(), -math.inf
    room = 0.3 if canvas.is_stacked(ax.figure) else 0.15
    for x, text in texts.items():
        shown = low <= x <= high and x - last > room * (high - low)
        text.set_visible(shown)
        last = x if shown else last


def shade_windows(ax: Axes, windows: Iterable[Sequence[int]]) -> None:
    """Shade the epochs of each window ``[first, stop)`` in grey."""
    for first, stop in windows:
        ax.axvspan(first - 0.5, stop - 0.5, color="#ececec", linewidth=0, zorder=0)


# -- to disk ---------------------------------------------------------------------------------


def save(fig: Figure, stem: Path, numbers: pd.DataFrame | None) -> list[Path]:
    """Write ``stem``.png and .svg, or the formats of the present `canvas.use_options`, and .csv
    with the plotted numbers in full precision, where they are given; of a plain figure also .txt
    with title and caption. The same numbers give the same bytes."""
    kinds = canvas.current_options().formats
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    # matplotlib reads text between dollars as a formula and fails on an invalid one, such as in the
    # name of a user's metric: that text is drawn as it is
    parser = MathTextParser("path")
    for text in (text for text in fig.findobj(Text) if "$" in text.get_text()):
        try:
            parser.parse(text.get_text())
        except ValueError:
            text.set_parse_math(False)
    for path, kind in zip(paths, kinds, strict=True):
        write_output(path, render_figure(fig, kind, letters=True))
    if numbers is not None:
        paths.append(stem.with_name(f"{stem.name}.csv"))
        write_table(paths[-1], numbers)
    if isinstance(fig, Canvas) and fig.plain:
        paths.append(stem.with_name(f"{stem.name}.txt"))
        write_output(paths[-1], "\n\n".join(filter(None, (fig.headline, fig.caption))) + "\n")
    return paths


def _save_file(fig: Figure, numbers: pd.DataFrame | None, path: Path) -> list[Path]:
    kind = path.suffix.removeprefix(".")
    if kind in canvas.FORMATS:
        with canvas.use_options(formats=(kind,)):
            return save(fig, path.with_suffix(""), None)
    return save(fig, path, numbers)


def render_figure(fig: Figure, kind: str = "svg", letters: bool = False) -> bytes:
    """Write a figure as a file without date and version; returns its bytes.

    Args:
        letters: an SVG has its text as text, in the reader's fonts, and not as outlines.
    """
    buffer = io.BytesIO()
    unsaid = {"png": ("Software",), "pdf": ("Creator", "Producer", "CreationDate")}
    metadata = dict.fromkeys(unsaid.get(kind, ("Date", "Creator")))
    with theme(), mpl.rc_context({"svg.fonttype": "none"} if letters else {}):
        canvas.complete_labels(fig)
        fig.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return _reduce_colours(buffer) if kind == "png" else buffer.getvalue()


def _reduce_colours(png: io.BytesIO) -> bytes:
    """The picture with a palette of 256 colours, in a third of the bytes."""
    from PIL import Image

    with Image.open(png) as image:
        colours = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    colours.save(buffer, "png", optimize=True, dpi=(DPI, DPI))
    return buffer.getvalue()
