"""What a figure shows, read from its artists, held against the tables that are saved beside it.

`complaints` has a sentence for each line, bar, band and cell with numbers that no row has, for
entries of a legend that nothing is drawn like, and for axes without a quantity. An invisible artist
counts as none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.offsetbox import DrawingArea
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

Frame = pd.DataFrame
KNOWN = (  # an axis is of one of these, with its unit or what it is a share of
    r"epoch|unit of \d+ steps|\bsteps?\b|floats|bytes|seconds|\bs on\b|%|nats|bits per byte|points"
    r"|perplexity|error|learning rates?\b|eigenvalue|gradient norm|overlap|batch size|samples"
    r"|kappa|probability|share|coordinates|speed-up|workers|bit/s|batch per worker|stable rate"
    r"|\bMB\b|λ|σ|trace|called critical|harm"
)
NARROW = 1e-9  # of its value: an interval that is none
THIN = 0.8  # points, of lines that are not of one seed


def complaints(
    figure: Figure, tables: Sequence[Frame], computed: Collection[int] = ()
) -> list[str]:
    """All that is wrong; without what only a rendered figure says (`misplaced`).

    Args:
        computed: axes with means or medians of the rows.
    """
    found = [*_legends(figure), *_labels(figure)]
    columns = [_numbers(table) for table in tables]
    for at, ax in enumerate(figure.axes):
        if at not in computed and ax.get_label() != "<colorbar>":
            found += [f"axes {at}: no row has {words}" for words in _strange(ax, columns)]
    return found


# -- rows ------------------------------------------------------------------------------------

Rows = dict[str, list[float]]  # numbers by column, of 7 digits


def _numbers(table: Frame) -> Rows:
    flat = table.reset_index(drop=True).select_dtypes(["number", "bool"]).astype(float)
    return {str(name): _digits(flat.iloc[:, i]) for i, name in enumerate(flat.columns)}


def _digits(numbers: Any) -> list[float]:
    return [float(f"{x:.6e}") for x in numbers]


def _strange(ax: Axes, tables: Sequence[Rows]) -> Iterator[str]:
    """What is drawn of numbers that stand in no row together. Along an axis of names stand places,
    and a logarithmic axis has no room for all of an interval's lower end."""
    shared = ax.get_shared_y_axes().get_siblings(ax)
    parts, named = Parts.of(ax), any(_written(one.yaxis) for one in shared)
    found = [("a line", line.points) for line in parts.lines]
    for bar in parts.bars:
        found += (
            [("a bar", end) for end in np.moveaxis(bar.points, 1, 0)] if len(bar.points) else []
        )
    logarithmic = ax.get_yscale() == "log"
    found += [
        ("a band", band.points[:, [0, i]]) for band in parts.bands for i in (1, 2)[logarithmic:]
    ]
    for kind, xy in found:
        x, y = _digits(xy[:, 0]), _digits(xy[:, 1])
        if not any(_together(rows, x, None if named else y) for rows in tables):
            yield f"{kind} of {len(xy)} points from {xy[0]}"
    for image in ax.images:
        cells = np.ma.asarray(image.get_array(), float)
        cells = _digits(cells.compressed()[np.isfinite(cells.compressed())])
        if not any({*cells} <= {x for column in rows.values() for x in column} for rows in tables):
            yield "the cells of an image"


def _together(rows: Rows, x: Sequence[float], y: Sequence[float] | None) -> bool:
    """Are there two columns whose rows have all these pairs?"""
    first = [column for column in rows.values() if {*x} <= {*column}]
    if y is None:
        return bool(first)
    second = [column for column in rows.values() if {*y} <= {*column}]
    pairs = {*zip(x, y, strict=True)}
    return any(pairs <= {*zip(a, b, strict=True)} for a in first for b in second)


def colour_alone(figure: Figure) -> list[str]:
    """Lines of one axes that only their colour tells apart: neither dash, marker nor width. Those
    of each seed are thin."""
    found = []
    for at, ax in enumerate(figure.axes):
        looks: dict[tuple[Any, ...], dict[str, None]] = {}
        for part in Parts.of(ax).lines:
            width = part.artist.get_linewidth()  # type: ignore[attr-defined]
            if width >= THIN and len(part.points) > 1:
                seen = part.seen
                filled = seen.fill and str(seen.fill == "#ffffff")
                looks.setdefault((seen.dash, seen.marker, filled, width), {})[seen.colour] = None
        for (dash, marker, *_), colours in looks.items():
            if len(colours) > 1:
                found.append(f"axes {at}: {len(colours)} lines of dash {dash}, marker {marker}")
    return found


# -- artists ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """How something is drawn; None: not."""

    colour: str
    dash: str | None = None
    marker: str | None = None
    fill: str | None = None

    def fits(self, other: Seen) -> bool:
        """May both be of one series?"""
        pairs = ((self.dash, other.dash), (self.marker, other.marker), (self.fill, other.fill))
        return self.colour == other.colour and all(a == b or None in (a, b) for a, b in pairs)


def seen_of(line: Line2D) -> Seen:
    drawn = line.get_linestyle().lower().strip() not in ("none", "")
    marked = str(line.get_marker()).lower().strip() not in ("none", "")
    return Seen(
        to_hex(line.get_color()),
        str(line._unscaled_dash_pattern) if drawn else None,  # type: ignore[attr-defined]
        str(line.get_marker()) if marked else None,
        to_hex(line.get_markerfacecolor()) if marked else None,
    )


@dataclass(frozen=True)
class Part:
    """A line, bars or a band of data, in its coordinates.

    Attributes:
        points: of a line, (n, 2); of a band, its lower and upper edge: x, low, high, (n, 3); of
            bars, both ends: (n, 2, 2).
    """

    artist: Artist
    seen: Seen
    points: np.ndarray


@dataclass(frozen=True)
class Parts:
    """Those of one axes that can be seen: neither a bar's caps nor a line across the axes, nor
    what is narrower than rounding."""

    lines: list[Part]
    bars: list[Part]
    bands: list[Part]

    @classmethod
    def of(cls, ax: Axes) -> Parts:
        errors = [each for each in ax.containers if isinstance(each, ErrorbarContainer)]
        caps = {id(cap) for each in errors for cap in each.lines[1]}
        bars = [_bars(part) for each in errors for part in each.lines[2]]
        bands = [_band(part) for part in ax.collections if isinstance(part, PolyCollection)]
        lines = [
            Part(line, seen_of(line), points(line))
            for line in ax.lines
            if id(line) not in caps and line.get_transform() == ax.transData
        ]
        return cls(
            *(
                [part for part in parts if part.artist.get_visible() and len(part.points)]
                for parts in (lines, bars, bands)
            )
        )


def points(line: Line2D) -> np.ndarray:
    xy = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
    return _sorted(xy[np.isfinite(xy).all(1)])


def _bars(part: LineCollection) -> Part:
    ends = [_sorted(np.asarray(segment)) for segment in part.get_segments() if len(segment) == 2]
    kept = [each for each in ends if not np.allclose(each[0], each[1], rtol=NARROW, atol=0)]
    return Part(part, Seen(to_hex(part.get_edgecolor()[0][:3])), np.array(kept))


def _band(part: PolyCollection) -> Part:
    paths = [path.vertices for path in part.get_paths() if len(path.vertices)]
    table = pd.DataFrame(np.concatenate([*paths, np.empty((0, 2))]), columns=["x", "y"])
    edges = table.groupby("x")["y"].agg(["min", "max"]).reset_index().to_numpy()
    seen = Seen(to_hex(part.get_facecolor()[0][:3]))
    return Part(part, seen, edges[edges[:, 2] - edges[:, 1] > NARROW * abs(edges[:, 2])])


def uprights(ax: Axes) -> list[Line2D]:
    """Black lines from the bottom of the axes to its top."""
    return [
        line
        for line in ax.lines
        if line.get_visible()
        and to_hex(line.get_color()) == "#000000"
        and line.get_transform() == ax.get_xaxis_transform()
    ]


def legends(figure: Figure) -> list[Legend]:
    found = [*figure.legends, *(legend for part in figure.subfigs for legend in part.legends)]
    found += [legend for ax in figure.axes if (legend := ax.get_legend())]
    return [legend for legend in found if legend.get_visible()]


def _written(axis: Axis) -> dict[float, str]:
    """What was given to stand along an axis, by its place."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    texts = [text.get_text() for text in axis.get_ticklabels()]
    if not texts:  # they stand at the axes that it shares the axis with
        return {}
    return dict(zip(map(float, axis.get_ticklocs()), texts, strict=True))


def entry(parts: Sequence[Artist]) -> Seen:
    drawn = [seen_of(part) for part in parts if isinstance(part, Line2D)]
    if any(isinstance(part, LineCollection) for part in parts):  # caps, then the line, its marker
        drawn = drawn[-2:]
    if drawn:
        ways = ([getattr(s, k) for s in drawn if getattr(s, k)] for k in ("dash", "marker", "fill"))
        return Seen(drawn[0].colour, *(way[0] if way else None for way in ways))
    (patch,) = (part for part in parts if isinstance(part, Patch))
    return Seen(to_hex(patch.get_facecolor()))


def _sorted(xy: np.ndarray) -> np.ndarray:
    return xy[np.lexsort((xy[:, 1], xy[:, 0]))]


# -- around them -----------------------------------------------------------------------------


def _labels(figure: Figure) -> Iterator[str]:
    for at, ax in enumerate(figure.axes):
        if not ax.axison or not ax.get_visible():
            continue
        for axis in "xy":
            label = _label(ax, axis) or (_bar_label(ax) if ax.get_label() == "<colorbar>" else "")
            label = label or (figure.get_supylabel() if axis == "y" else "")
            if not re.search(KNOWN, label) and not _named(ax, axis):
                yield f"axes {at}: {label!r} along {axis} is no quantity with its unit"


def _label(ax: Axes, axis: str) -> str:
    """Its own, or that of the axes that it shares the axis with, or of those below it of the same
    limits."""
    group = ax.get_shared_x_axes() if axis == "x" else ax.get_shared_y_axes()
    alike = [ax, *group.get_siblings(ax)]
    if axis == "x":
        alike += [
            one
            for one in ax.figure.axes
            if one.get_xlim() == ax.get_xlim() and _columns(one) == _columns(ax)
        ]
    found = [getattr(one, f"get_{axis}label")() for one in alike]
    return " ".join(next(filter(None, found), "").split())


def _columns(ax: Axes) -> Any:
    place = ax.get_subplotspec()
    return place and (place.get_gridspec(), place.colspan)


def _bar_label(ax: Axes) -> str:
    return ax.get_ylabel() or ax.get_xlabel()


def _named(ax: Axes, axis: str) -> bool:
    """Does something given stand along it, or along what it shares it with? Blanks are those of a
    line each, which has its name elsewhere."""
    group = ax.get_shared_x_axes() if axis == "x" else ax.get_shared_y_axes()
    found = [_written(getattr(one, f"{axis}axis")) for one in (ax, *group.get_siblings(ax))]
    texts = [text for given in found for text in given.values()]
    numbers = [text for text in texts if text and not re.search("[A-Za-z]{3}", text)]
    return bool(texts) and not numbers


def _legends(figure: Figure) -> Iterator[str]:
    drawn = [line.seen for ax in figure.axes for line in Parts.of(ax).lines]
    images = [image for ax in figure.axes for image in ax.images]
    colours = {to_hex(c) for image in images for c in image.cmap(np.arange(image.cmap.N))}
    for legend in legends(figure):
        texts = [text.get_text() for text in legend.get_texts()]
        if len({*texts}) < len(texts) or not texts:
            yield f"a legend says {texts}"
        for text, box in zip(texts, legend.findobj(DrawingArea), strict=True):
            if not text.strip() or text.startswith("_"):
                yield f"an empty entry of a legend: {text!r}"
            look = entry(box.get_children())
            if look.colour not in colours and not any(look.fits(one) for one in drawn):
                yield f"the legend's {text!r} is not drawn"


# -- rendered --------------------------------------------------------------------------------


def misplaced(figure: Figure) -> list[str]:
    """Texts that leave the figure, or lie over each other."""
    texts: list[tuple[str, Any]] = []
    plain = Text.draw

    def note(text: Text, renderer: Any, *rest: Any, **more: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            # of a name without the line that joins it
            texts.append((text.get_text(), Text.get_window_extent(text, renderer)))
        plain(text, renderer, *rest, **more)

    Text.draw = note  # type: ignore[method-assign]
    try:
        figure.draw_without_rendering()
    finally:
        Text.draw = plain  # type: ignore[method-assign]
    words = [text for text, _ in texts]
    boxes = np.array([box.extents for _, box in texts])  # x0, y0, x1, y1
    whole, low, high = figure.bbox.padded(1), boxes[:, :2], boxes[:, 2:]
    outside = (low < whole.min).any(1) | (high > whole.max).any(1)
    both = np.minimum(high[:, None], high) - np.maximum(low[:, None], low) - 2  # pixels: of ink
    over = np.triu((both > 0).all(2) & (both.prod(2) > 4), 1)
    return [
        *(f"{words[i]!r} leaves the figure" for i in np.flatnonzero(outside)),
        *(f"{words[i]!r} lies over {words[k]!r}" for i, k in np.argwhere(over)),
    ]
