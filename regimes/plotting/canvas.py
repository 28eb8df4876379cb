"""How figures come out: their width, their files, with or without title and caption.

`use_options` holds for all figures that are drawn and saved inside it::

    with use_options(width=3.3, plain=True, formats=("pdf",)):
        style.save(*figure(runs), Path("figures/2"), numbers)

In a figure narrower than `COLUMN`, panels that stood beside one another stand below one another,
and the figure grows by the lines that its texts take more than in the width it was laid out for, up
to a page, or up to `PLAIN_HIGHEST` where its texts are left out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend
from matplotlib.text import Annotation, Text
from matplotlib.ticker import LogLocator

from regimes.base.errors import require

FORMATS = ("png", "svg", "pdf")
NARROWEST, WIDEST = 2.5, 20.0  # inches
LOWEST = 1.2  # inches
HIGHEST = 9.0  # inches: a page of a paper
PLAIN_HIGHEST = 4.0  # inches, of a figure in one column without title and caption
SPACING = 1.45  # of lines of text, of their size
TITLE = 8.5  # points, of a panel's title
LETTERS = 15  # of it that fit into an inch
LABEL_LETTERS = 17  # of an axis' label
NAME_LETTERS = 40  # of a line of a legend's entry at one column
SIDE_LETTERS = 30  # of a line of an entry beside a panel
TICK = 0.14  # inches, of a label of a tick and what parts it from the next
COLUMN = 5.0  # inches, below which panels stand below one another


@dataclass(frozen=True)
class Options:
    """Says how figures come out.

    Attributes:
        width, height: inches; None: as each figure is laid out. A paper's column has 3.3.
        panel: the only one that is drawn, counted from 1, from the upper left; None: all.
        plain: no title and no caption in the figure; a text file beside it has both.
        formats: of `FORMATS`.

    Raises:
        ConfigError: a width outside `NARROWEST` to `WIDEST`, a height outside `LOWEST` to
            `WIDEST`, or another format.
    """

    width: float | None = None
    plain: bool = False
    formats: tuple[str, ...] = ("png", "svg")
    height: float | None = None
    panel: int | None = None

    def __post_init__(self) -> None:
        expected = f"inches from {NARROWEST:g} to {WIDEST:g}"
        good = self.width is None or NARROWEST <= self.width <= WIDEST
        require(good, "--width", self.width, expected)
        expected = f"inches from {LOWEST:g} to {WIDEST:g}"
        good = self.height is None or LOWEST <= self.height <= WIDEST
        require(good, "--height", self.height, expected)
        require(self.panel is None or self.panel > 0, "--panel", self.panel, "a number from 1 up")
        for name in self.formats:
            require(name in FORMATS, "--format", name, ", ".join(FORMATS))


_OPTIONS: ContextVar[Options] = ContextVar("figure_options", default=Options())  # noqa: B039 (frozen)


def current_options() -> Options:
    """Return the options by which figures come out now."""
    return _OPTIONS.get()


@contextmanager
def use_options(chosen: Options | None = None, **changes: Any) -> Iterator[Options]:
    """Let figures come out by other options inside it.

    Args:
        chosen: default the context's.
        changes: fields of `Options` in their place.
    """
    now = replace(chosen or current_options(), **changes)
    token = _OPTIONS.set(now)
    try:
        yield now
    finally:
        _OPTIONS.reset(token)


class Canvas(Figure):
    """Draws a figure with its title and caption as text, or leaves these out.

    Attributes:
        headline, caption: the texts; empty without.
        plain: whether they are left out of the figure.
        highest: inches that it may grow to.
    """

    def __init__(self, width: float, height: float, dpi: int) -> None:
        chosen = current_options()
        self.headline = self.caption = ""
        self.plain = chosen.plain
        self.intended = width
        self.narrow = (chosen.width or width) < width
        self.stacked = self.narrow and (chosen.width or width) < COLUMN
        self.fixed, self.panel = chosen.height, chosen.panel
        alone = self.plain and self.stacked
        self.highest = PLAIN_HIGHEST if alone else HIGHEST
        size = chosen.width or width, self.fixed or min(height, self.highest)
        super().__init__(figsize=size, dpi=dpi, layout="constrained")

    def set_size_inches(self, w: Any, h: Any = None, forward: bool = True) -> None:
        """Set the size as matplotlib does; a height that the present options give stays."""
        if h is None:
            w, h = w
        super().set_size_inches(w, getattr(self, "fixed", None) or h, forward)

    def subplots(self, nrows: int = 1, ncols: int = 1, **kwargs: Any) -> Any:
        """Add panels as matplotlib does; below `COLUMN` inches all panels are in one column, row by
        row."""
        if not self.stacked or ncols == 1:
            return super().subplots(nrows, ncols, **kwargs)
        self._grow(ncols)
        return _stack_panels(super().subplots, nrows, ncols, **kwargs)

    def subfigures(self, nrows: int = 1, ncols: int = 1, **kw: Any) -> Any:  # type: ignore[override]
        """Add parts as matplotlib does; below `COLUMN` inches all are in one column."""
        if not self.stacked or ncols == 1:
            return super().subfigures(nrows, ncols, **kw)
        kw.pop("width_ratios", None)
        self._grow(ncols)
        return super().subfigures(nrows * ncols, 1, **kw)

    def legend(self, *args: Any, **kwargs: Any) -> Legend:
        """Add a legend as matplotlib does; in a narrow figure it has as many columns as fit."""
        if not self.narrow:
            return super().legend(*args, **kwargs)
        made, rows = _fit_legend(super().legend, self.bbox.width, *args, **kwargs)
        labels = made.get_texts()
        intended = math.ceil(len(labels) / max(1, kwargs.get("ncols", 1)))
        self.make_room(rows - intended, float(labels[0].get_fontsize()) if labels else 0.0)
        return made

    def make_room(self, lines: int, size: float) -> None:
        """Grow by so many lines of text, in points, up to a page: panels keep their heights."""
        width, height = self.get_size_inches()
        grown = height + max(0, lines) * SPACING * size / 72
        self.set_size_inches(width, max(height, min(self.highest, grown)))

    def _grow(self, times: int) -> None:
        """Room for so many times as many panels below one another, up to a page."""
        width, height = self.get_size_inches()
        grown = height + (times - 1) * max(1.6, height - 1.4)
        self.set_size_inches(width, min(self.highest, grown))


def subplots(part: Figure | SubFigure, nrows: int, ncols: int, **kwargs: Any) -> Any:
    """Add panels to a part of a figure, as `Canvas.subplots` does to a whole one."""
    make = part.subplots
    if is_stacked(part):
        return _stack_panels(make, nrows, ncols, **kwargs)
    return make(nrows, ncols, **kwargs)


def list_above(part: Figure | SubFigure, handles: Sequence[Artist]) -> None:
    """Add a legend above the panels of a part of a figure, which grows by it; in two columns where
    they fit."""
    whole, make = part.canvas.figure, partial(FigureBase.legend, part)
    place: Any = {"loc": "outside upper left", "handlelength": 4, "ncols": 2}
    made, rows = _fit_legend(make, whole.bbox.width, handles=handles, **place)
    if isinstance(whole, Canvas) and rows:
        whole.make_room(rows, float(made.get_texts()[0].get_fontsize()))


def _fit_legend(
    make: Callable[..., Legend], room: float, *args: Any, **kw: Any
) -> tuple[Legend, int]:
    """The legend in at most as many columns as asked for that is no wider than ``room``, pixels;
    and its rows."""
    columns = max(1, kw.pop("ncols", 1))
    while (made := make(*args, ncols=columns, **kw)).get_window_extent().width > room:
        if columns == 1:
            for text in made.get_texts():
                text.set_text("\n".join(textwrap.wrap(text.get_text(), NAME_LETTERS)))
            break
        made.remove()
        columns -= 1
    lines = sum(1 + text.get_text().count("\n") for text in made.get_texts())
    return made, math.ceil(lines / columns)


def _stack_panels(make: Callable[..., Any], nrows: int, ncols: int, **kwargs: Any) -> Any:
    """The axes of ``nrows x ncols`` panels, all in one column: row by row, or column by column
    where the panels of a column share their x axis. A panel that would stand right of a labelled
    one gets its labels from `complete_labels`, once there are some."""
    squeeze, heights = kwargs.pop("squeeze", True), kwargs.pop("height_ratios", None)
    kwargs.pop("width_ratios", None)
    shared = bool(kwargs.get("sharey"))
    by_column, by_row = kwargs.get("sharex") == "col", kwargs.get("sharey") == "row"
    kwargs |= {"sharex": False} if by_column else {}  # in one column it would be all of them,
    kwargs |= {"sharey": False} if by_row else {}  # and each row one panel
    order = np.tile if by_column else np.repeat
    ratios = None if heights is None else order(heights, ncols)
    axes = make(nrows * ncols, 1, squeeze=False, height_ratios=ratios, **kwargs)
    axes = axes.reshape(ncols, nrows).T if by_column else axes.reshape(nrows, ncols)
    for first, *others in axes:
        for ax in others:
            ax.stood_beside, ax.shared = first, shared
            if by_row:
                ax.sharey(first)
    for first, *others in axes.T if by_column else ():
        for ax in others:
            ax.sharex(first)
        for ax in (first, *others)[:-1]:
            ax.tick_params(labelbottom=False)
    return axes if not squeeze else axes[0] if nrows == 1 else axes


def is_stacked(part: Figure | SubFigure) -> bool:
    """Answer whether the panels of a figure stand below one another, because it is narrower than
    `COLUMN`."""
    whole = part.canvas.figure
    return isinstance(whole, Canvas) and whole.stacked


def keep_panel(fig: Figure) -> None:
    """Remove all panels but the one that the present options have asked for; it has its own labels,
    and a legend unless the figure has one or its lines have names. A figure with fewer is whole."""
    number = fig.panel if isinstance(fig, Canvas) else None
    if number is None:
        return
    panels = [ax for ax in fig.axes if ax.get_label() != "<colorbar>" and ax.axison]
    fig.panel = None  # type: ignore[attr-defined]
    if number > len(panels):
        return
    chosen = panels[number - 1]
    fig.draw_without_rendering()
    places = [ax.get_window_extent() for ax in panels]
    rows = len({round(place.y0) for place in places})
    area = max(place.y1 for place in places) - min(place.y0 for place in places)
    area /= fig.bbox.height
    _label_alone(chosen)
    part, handles = chosen.figure, chosen.get_legend_handles_labels()
    for ax in panels:
        if ax is not chosen:
            ax.remove()
    for sub in [sub for sub in fig.subfigs if sub is not part]:
        fig.subfigs.remove(sub)
    if isinstance(part, SubFigure):
        part._subplotspec = GridSpec(1, 1, figure=fig)[0]  # type: ignore[attr-defined]
    chosen.set_subplotspec(GridSpec(1, 1, figure=part)[0])  # type: ignore[arg-type]
    named = any(isinstance(text, Annotation) for text in chosen.texts)
    if len(handles[0]) > 1 and not (named or fig.legends or part.legends or chosen.get_legend()):
        entries = handles[0], ["\n".join(textwrap.wrap(name, SIDE_LETTERS)) for name in handles[1]]
        chosen.legend(*entries, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=4)
    width, height = fig.get_size_inches()
    fig.set_size_inches(width, height * (1 - area * (1 - 1 / rows)))


def _label_alone(chosen: Axes) -> None:
    """Labels of a panel that shared them with those beside, above or below it."""
    for axis, siblings in (
        (chosen.yaxis, chosen.get_shared_y_axes()),
        (chosen.xaxis, chosen.get_shared_x_axes()),
    ):
        which = "y" if axis is chosen.yaxis else "x"
        others = [getattr(ax, f"{which}axis").label for ax in siblings.get_siblings(chosen)]
        if not axis.label.get_text():
            axis.label.set_text(next((x.get_text() for x in others if x.get_text()), ""))
    chosen.tick_params(labelleft=True, labelbottom=True)


def complete_labels(fig: Figure) -> None:
    """Label panels that stood to the right of a labelled one, where panels are stacked, and break
    titles and labels that are longer than their panel."""
    keep_panel(fig)
    if not is_stacked(fig):
        return
    fig.draw_without_rendering()  # from here on the panels are where the layout puts them
    for ax in fig.axes:
        across, up = ax.get_position().size * fig.get_size_inches()
        for place in ("left", "center", "right"):
            title = ax.get_title(place)
            for text in ax.get_children() if title else ():
                if isinstance(text, Text) and text.get_text() == title:
                    letters = round(LETTERS * across * TITLE / float(text.get_fontsize()))
                    text.set_text("\n".join(textwrap.wrap(title, max(letters, 12))))
        _break_label(ax.xaxis.label, round(LABEL_LETTERS * across))
        _break_label(ax.yaxis.label, round(LABEL_LETTERS * up))
        low, high = sorted(ax.get_ylim())
        ticks = [at for at in ax.get_yticks() if low <= at <= high]
        if ax.get_yscale() == "log" and len(ticks) * TICK > up:
            ax.yaxis.set_major_locator(LogLocator(subs=(1,), numticks=len(ticks)))
        if (first := getattr(ax, "stood_beside", None)) is None:
            continue
        if getattr(ax, "shared", False) and not ax.get_ylabel():
            ax.set_ylabel(first.get_ylabel(), fontsize=first.yaxis.label.get_fontsize())
        if not any(label.get_text() for label in ax.get_yticklabels()):
            labels = [label.get_text() for label in first.get_yticklabels()]
            if any(labels) and len(labels) == len(ax.get_yticks()):
                ax.set_yticks(ax.get_yticks(), labels)


def _break_label(label: Text, letters: int) -> None:
    """Break an axis' label of one line that is longer than its panel, into two."""
    text = label.get_text()
    if len(text) > letters and "\n" not in text:
        label.set_text("\n".join(textwrap.wrap(text, len(text) // 2 + 3)))


def legend_columns(labels: Sequence[str], width: float, most: int) -> int:
    """Count how many columns of a legend fit into so many inches, at most ``most``.

    >>> [legend_columns(labels, 4.8, 2) for labels in (["low", "high"], ["a long name" * 4])]
    [2, 1]
    """
    letters = max(map(len, labels), default=0) + 10  # with the line and the space between columns
    return max(1, min(most, int(20 * width / letters)))


def wrap_text(fig: Figure, text: str, per_inch: float, size: float) -> str:
    """Break a text into lines as wide as a figure, which grows by those that a narrow one has more.

    Args:
        per_inch: letters of this size, in points, that fit into an inch.
    """
    text = say_places(fig, text)
    lines = textwrap.wrap(text, round(per_inch * fig.get_size_inches()[0]))
    if isinstance(fig, Canvas) and fig.narrow:
        fig.make_room(len(lines) - len(textwrap.wrap(text, round(per_inch * fig.intended))), size)
    return "\n".join(lines)  # keeps non-breaking spaces


def keep_text(fig: Figure, **texts: str) -> bool:
    """Keep a figure's ``headline`` or ``caption``; returns whether it is left out of the figure."""
    if not isinstance(fig, Canvas):
        return False
    vars(fig).update({name: say_places(fig, text) for name, text in texts.items()})
    return fig.plain


def say_places(fig: Figure, text: str) -> str:
    """Change "Left:" and "Right:" in a text to where the panels stand."""
    if not is_stacked(fig):
        return text
    return text.replace("Left:", "Above:").replace("Right:", "Below:")
