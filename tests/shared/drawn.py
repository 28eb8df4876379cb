"""What a figure shows, read from its artists, held against the table that is saved beside it.

`complaints` has a sentence for each row that is not drawn, for each line, bar or band that no row
has, and for what is missing or out of place around them. An invisible artist counts as none, so
that a test can take one away and see that it is missed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator

from regimes.plotting.looks import style_of

Frame = pd.DataFrame
KNOWN = (  # an axis is of one of these, with its unit or what it is a share of
    r"epoch|unit of \d+ steps|\bsteps?\b|floats|bytes|seconds|\bs on\b|%|nats|bits per byte|points"
    r"|perplexity|error|learning rates?\b|eigenvalue|gradient norm|overlap|batch size|samples"
    r"|kappa|probability|share|coordinates|speed-up|workers|bit/s|batch per worker|stable rate"
    r"|\bMB\b|λ|σ|trace|called critical|harm"
)
SHADE = "#ececec"  # of a hand-made window
NARROW = 1e-9  # of its value: an interval that is none
THIN = 0.8  # points, of lines that are not of one seed


@dataclass(frozen=True)
class Panel:
    """Rows of the table as points of one axes.

    Attributes:
        at: which axes of the figure.
        x, y: columns.
        rows: which rows, or what is made of them.
        by: one line for each of their values; the first is what the legend tells apart.
        label: what the legend says of such a value; None: nothing.
        ends: columns of the interval of y; None: none is drawn.
        xends: of x.
        bands: the intervals are a band, not bars.
        thin: a line has the colour of its legend entry alone.
        own: the axes have a legend of their own.
        steps: where a line between two rows changes its value: "mid", "post"; else it is straight.
        ticks: what stands at the y of a row.
    """

    at: int
    x: str
    y: str
    rows: Callable[[Frame], Frame] = lambda table: table
    by: tuple[str, ...] = ()
    label: Callable[[Any], str] | None = lambda name: style_of(name).label
    ends: tuple[str, str] | None = None
    xends: tuple[str, str] | None = None
    bands: bool = False
    thin: bool = False
    own: bool = False
    steps: str = ""
    ticks: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Image:
    """Rows of the table as cells of colour.

    Attributes:
        cells: lines (what is at their left) by columns (x).
        colour: what the legend says of a cell that is a word; None: cells are numbers.
    """

    at: int
    cells: Callable[[Frame], Frame]
    name: Callable[[Any], str] = str
    colour: Callable[[Any], str] | None = None


@dataclass
class Shown:
    """A figure and what it should show.

    Attributes:
        words: its caption.
        says: what the caption has to say.
        unit: what an axis is called along which the run's decays are marked.
        decays: units that are the first at a lower rate.
        windows: hand-made ones, ``[first, stop)``.
        cut: axes whose limits leave out points on purpose.
    """

    figure: Figure
    table: Frame
    panels: Sequence[Panel | Image]
    words: str
    says: Sequence[str] = ()
    unit: str = "epoch"
    decays: Sequence[int] = ()
    windows: Sequence[Sequence[int]] = ()
    cut: Sequence[int] = ()
    explained: set[int] = field(default_factory=set)  # ids of artists
    known: list[dict[str, Seen]] = field(default_factory=list)  # of each axes, by its legend
    parts: list[Parts] = field(default_factory=list)  # of each axes


def complaints(shown: Shown) -> list[str]:
    """All that is wrong; without what only a rendered figure says (`misplaced`)."""
    shown.parts = [Parts.of(ax) for ax in shown.figure.axes]
    shown.explained, shown.known = set(), entries(shown)
    found = [*_legends(shown), *_labels(shown.figure), *_caption(shown)]
    for panel in shown.panels:
        check = _image if isinstance(panel, Image) else _panel
        found += [f"axes {panel.at}: {words}" for words in check(shown, panel)]
    for at, ax in enumerate(shown.figure.axes):
        wrong = [*_unexplained(shown, at), *_marks(shown, ax)]
        wrong += [] if at in shown.cut else _outside(ax, shown.parts[at])
        found += [f"axes {at}: {words}" for words in wrong]
    return found


def colour_alone(figure: Figure) -> list[str]:
    """Lines of one axes that only their colour tells apart; those of each seed are thin."""
    found = []
    for at, ax in enumerate(figure.axes):
        looks: dict[tuple[str | None, str | None, str | None], dict[str, None]] = {}
        for part in Parts.of(ax).lines:
            if part.artist.get_linewidth() >= THIN and len(part.points) > 1:  # type: ignore[attr-defined]
                seen = part.seen
                filled = seen.fill and str(seen.fill == "#ffffff")
                looks.setdefault((seen.dash, seen.marker, filled), {})[seen.colour] = None
        for (dash, marker, _), colours in looks.items():
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

    def fits(self, other: Seen, thin: bool) -> bool:
        """May both be of one series?"""
        if thin:
            return self.colour == other.colour
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


def uprights(ax: Axes, colour: str = "#000000") -> list[Line2D]:
    """Lines from the bottom of the axes to its top."""
    return [
        line
        for line in ax.lines
        if line.get_visible()
        and to_hex(line.get_color()) == colour
        and line.get_transform() == ax.get_xaxis_transform()
    ]


def legends(figure: Figure) -> list[Legend]:
    found = [*figure.legends, *(legend for part in figure.subfigs for legend in part.legends)]
    found += [legend for ax in figure.axes if (legend := ax.get_legend())]
    return [legend for legend in found if legend.get_visible()]


def names(figure: Figure) -> list[Annotation]:
    """Names that are joined to what they name: they have its colour. An arrow has none."""
    return [
        text
        for ax in figure.axes
        for text in ax.texts
        if isinstance(text, Annotation)
        and text.arrow_patch
        and text.get_visible()
        and text.get_text()
    ]


def title(figure: Figure) -> str:
    """Of the whole figure: by itself, above a legend or above its first axes; the longest."""
    found = [figure.get_suptitle(), *(legend.get_title().get_text() for legend in figure.legends)]
    found.append(figure.axes[0].get_title(loc="left"))  # where a legend stands at the right
    return " ".join(max(found, key=len).split())


def entries(shown: Shown) -> list[dict[str, Seen]]:
    """How a text of the legends, at the left of a line of its own, or joined to a line, is drawn:
    for each axes, by its own legend, or by all of them."""
    shared = {
        " ".join(t.get_text().split()): Seen(to_hex(t.get_color())) for t in names(shown.figure)
    }
    for ax, parts in zip(shown.figure.axes, shown.parts, strict=True):
        at = _written(ax.yaxis)
        for line in sorted(parts.lines, key=lambda part: len(part.points)) if at else ():
            if len(y := {*line.points[:, 1]}) == 1 and (text := at.get(y.pop())):
                shared[text] = line.seen
    own: dict[Any, dict[str, Seen]] = {}
    for legend in legends(shown.figure):
        boxes = zip(legend.get_texts(), legend.findobj(DrawingArea), strict=True)
        told = {text.get_text(): _entry(box.get_children()) for text, box in boxes}
        own[legend.axes] = own.get(legend.axes, {}) | told
        shared |= told
    owners = {panel.at for panel in shown.panels if isinstance(panel, Panel) and panel.own}
    return [own.get(ax, {} if at in owners else shared) for at, ax in enumerate(shown.figure.axes)]


def _written(axis: Axis) -> dict[float, str]:
    """What was given to stand along an axis, by its place."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    texts = [text.get_text() for text in axis.get_ticklabels()]
    if not texts:  # they stand at the axes that it shares the axis with
        return {}
    return dict(zip(map(float, axis.get_ticklocs()), texts, strict=True))


def _entry(parts: Sequence[Artist]) -> Seen:
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


def _close(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-7, atol=1e-12))


# -- rows ------------------------------------------------------------------------------------


def _panel(shown: Shown, panel: Panel) -> Iterator[str]:
    ax, rows = shown.figure.axes[panel.at], panel.rows(shown.table)
    rows = rows[np.isfinite(rows[[panel.x, panel.y]].to_numpy(float)).all(1)]
    known = shown.known[panel.at]
    if rows.empty:
        yield "no row of the table is for it"
    for key, group in rows.groupby(list(panel.by), sort=False) if panel.by else [((), rows)]:
        text = panel.label(key[0]) if panel.label and panel.by else ""
        if text and text not in known:
            yield f"no legend says {text!r}"
            continue
        look = known.get(text)
        wanted = _sorted(group[[panel.x, panel.y]].to_numpy(float))
        hit = next(
            (
                part
                for part in shown.parts[panel.at].lines
                if id(part.artist) not in shown.explained
                and _close(part.points, wanted)
                and (look is None or look.fits(part.seen, panel.thin))
            ),
            None,
        )
        if hit is None:
            yield f"{len(group)} rows of {text or key} are not a line of theirs"
            continue
        shown.explained.add(id(hit.artist))
        if hit.artist.get_drawstyle().removeprefix("steps-").replace("default", "") != panel.steps:
            yield f"the line of {text or key} goes by {hit.artist.get_drawstyle()}"
        for ends, upright in ((panel.ends, True), (panel.xends, False)):
            if ends:
                yield from _ends(shown, panel, group, ends, upright, hit.seen.colour)
    yield from _ticks(ax, panel, rows)


def _ends(
    shown: Shown, panel: Panel, group: Frame, ends: tuple[str, str], upright: bool, colour: str
) -> Iterator[str]:
    parts = shown.parts[panel.at]
    drawn = [
        part for part in (parts.bands if panel.bands else parts.bars) if part.seen.colour == colour
    ]
    logarithmic = shown.figure.axes[panel.at].get_yscale() == "log"
    for row in group.to_dict("records"):
        low, high = (float(row[end]) for end in ends)
        if not high - low > NARROW * abs(high):  # also: there is none
            continue
        at = (float(row[panel.x]), float(row[panel.y]))
        if panel.bands:
            hits = [part for part in drawn if _in_band(part, at, low, high, logarithmic)]
        else:
            wanted = [(at[0], e) if upright else (e, at[1]) for e in (low, high)]
            hits = [
                part
                for part in drawn
                if np.isclose(part.points, wanted, rtol=1e-7).all((1, 2)).any()
            ]
        shown.explained |= {id(part.artist) for part in hits}
        if not hits:
            value = panel.y if upright else panel.x
            yield f"nothing from {low:.6g} to {high:.6g} around {value} {row[value]:.6g}"


def _in_band(
    part: Part, at: tuple[float, float], low: float, high: float, logarithmic: bool
) -> bool:
    """A logarithmic axis has no room for all of an interval's lower end."""
    for _, bottom, top in part.points[np.isclose(part.points[:, 0], at[0], rtol=1e-9)]:
        least = _close(bottom, low) or (logarithmic and low < bottom <= at[1])
        if least and _close(top, high):
            return True
    return False


def _ticks(ax: Axes, panel: Panel, rows: Frame) -> Iterator[str]:
    if panel.ticks:
        at = _written(ax.yaxis)
        for row in rows.to_dict("records"):
            if at.get(float(row[panel.y])) != panel.ticks(row):
                yield f"at {row[panel.y]} stands {at.get(row[panel.y])!r}, not {panel.ticks(row)!r}"


def _image(shown: Shown, panel: Image) -> Iterator[str]:
    ax, cells = shown.figure.axes[panel.at], panel.cells(shown.table)
    drawn = [image for image in ax.images if image.get_visible()]
    if len(drawn) != 1:
        yield f"{len(drawn)} images"
        return
    array = np.ma.filled(np.ma.asarray(drawn[0].get_array(), float), np.nan)
    if array.shape != cells.shape:
        yield f"{array.shape} cells, the table has {cells.shape}"
    elif panel.colour is None:
        if not np.allclose(array, cells.to_numpy(float), equal_nan=True):
            yield "the cells are not those of the table"
    else:
        known = {text: seen.colour for text, seen in shown.known[panel.at].items()}
        wanted = cells.map(lambda word: known.get(panel.colour(word)))
        colours = drawn[0].cmap(drawn[0].norm(array))
        if [[to_hex(c) for c in line] for line in colours] != wanted.to_numpy().tolist():
            yield "the cells have not the colours that the legend says"
    names = [panel.name(name) for name in cells.index]
    if [*_written(ax.yaxis).values()] != names:
        yield f"its lines are not called {', '.join(names)}"
    if not _close(drawn[0].get_extent()[:2], (cells.columns[0] - 0.5, cells.columns[-1] + 0.5)):
        yield "its columns stand elsewhere"


def _unexplained(shown: Shown, at: int) -> Iterator[str]:
    parts = shown.parts[at]
    if shown.figure.axes[at].get_label() != "<colorbar>":
        for kind in ("lines", "bars", "bands"):
            strange = [
                part for part in getattr(parts, kind) if id(part.artist) not in shown.explained
            ]
            if strange:
                yield f"no row has {len(strange)} {kind}, e.g. {strange[0]}"


# -- around them -----------------------------------------------------------------------------


def _outside(ax: Axes, parts: Parts) -> Iterator[str]:
    ends = [each for bar in parts.bars for each in bar.points]
    if ax.get_yscale() == "log":  # has no room for all of an interval's lower end
        ends = [each[each[:, 1] == each[:, 1].max()] for each in ends]
    low, high = np.sort([ax.get_xlim(), ax.get_ylim()]).T
    slack = 1e-9 * (high - low)
    for xy in (*(line.points for line in parts.lines), *ends):
        if len(beyond := xy[((xy < low - slack) | (xy > high + slack)).any(1)]):
            yield f"{len(beyond)} points are outside, e.g. {beyond[0]} of {low} to {high}"


def _marks(shown: Shown, ax: Axes) -> Iterator[str]:
    """Decays and windows."""
    if not along(ax, shown.unit):
        return
    low, high = ax.get_xlim()
    there = [float(line.get_xdata()[0]) for line in uprights(ax)]  # type: ignore[index]
    there = [x for x in there if low <= x <= high]
    if there != [first - 0.5 for first in shown.decays]:
        yield f"the decays {[*shown.decays]} are marked at {there}"
    words = [
        text.get_position()[0]
        for text in ax.texts
        if text.get_visible() and text.get_text().startswith("lr ")
    ]
    if {*words} - {*there}:
        yield f"what is said of decays stands at {words}"
    shaded = [
        p.get_extents().intervalx
        for p in (
            patch.get_path().transformed(patch.get_patch_transform())
            for patch in ax.patches
            if patch.get_visible() and to_hex(patch.get_facecolor()) == SHADE
        )
    ]
    if not _close(shaded, [[a - 0.5, b - 0.5] for a, b in shown.windows]):
        yield f"the windows {[*shown.windows]} are shaded at {shaded}"


def along(ax: Axes, unit: str) -> bool:
    """Is its x axis of the units of a record?"""
    label = _label(ax, "x")
    return label == unit or label.startswith(f"{unit} (")


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


def _legends(shown: Shown) -> Iterator[str]:
    drawn = [line.seen for parts in shown.parts for line in parts.lines]
    colours = {
        to_hex(c)
        for ax in shown.figure.axes
        for image in ax.images
        for c in image.cmap(np.arange(image.cmap.N))
    }
    known = {text: seen for each in shown.known for text, seen in each.items()}
    for legend in legends(shown.figure):
        texts = [text.get_text() for text in legend.get_texts()]
        if len({*texts}) < len(texts) or not texts:
            yield f"a legend says {texts}"
        for text in texts:
            if not text.strip() or text.startswith("_"):
                yield f"an empty entry of a legend: {text!r}"
            look = known[text]
            if look.colour not in colours and not any(look.fits(one, False) for one in drawn):
                yield f"the legend's {text!r} is not drawn"


def _caption(shown: Shown) -> Iterator[str]:
    words = " ".join(shown.words.split())
    for said in shown.says:
        if not re.search(said, words):
            yield f"the caption does not say {said!r}"


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
