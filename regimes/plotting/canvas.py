"""How figures come out: their width, their files, with or without title and caption.

`use_options` holds for all figures that are drawn and saved inside it::

    with use_options(width=3.3, plain=True, formats=("pdf",)):
        style.save(*figure(runs), Path("figures/2"), numbers)

In a figure narrower than `COLUMN`, panels that stood beside one another stand below one another.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure, SubFigure
from matplotlib.legend import Legend
from matplotlib.text import Text

from regimes.errors import require

FORMATS = ("png", "svg", "pdf")
NARROWEST, WIDEST = 2.5, 20.0  # inches
HIGHEST = 9.0  # inches: a page of a paper
LETTERS = 15  # of a panel's title that fit into an inch
COLUMN = 5.0  # inches, below which panels stand below one another


@dataclass(frozen=True)
class Options:
    """How figures come out.

    Attributes:
        width: inches; None: as each figure is laid out. A paper's column has 3.3.
        plain: no title and no caption in the figure; a text file beside it has both.
        formats: of `FORMATS`.

    Raises:
        ConfigError: a width outside `NARROWEST` to `WIDEST`, or another format.
    """

    width: float | None = None
    plain: bool = False
    formats: tuple[str, ...] = ("png", "svg")

    def __post_init__(self) -> None:
        expected = f"inches from {NARROWEST:g} to {WIDEST:g}"
        good = self.width is None or NARROWEST <= self.width <= WIDEST
        require(good, "--width", self.width, expected)
        for name in self.formats:
            require(name in FORMATS, "--format", name, ", ".join(FORMATS))


_OPTIONS: ContextVar[Options] = ContextVar("figure_options", default=Options())  # noqa: B039 (frozen)


def current_options() -> Options:
    return _OPTIONS.get()


@contextmanager
def use_options(chosen: Options | None = None, **changes: Any) -> Iterator[Options]:
    """Figures come out by other options inside it.

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
    """A figure with its title and caption as text, drawn in it or not.

    Attributes:
        headline, caption: the texts; empty without.
        plain: whether they are left out of the figure.
    """

    def __init__(self, width: float, height: float, dpi: int) -> None:
        chosen = current_options()
        self.headline = self.caption = ""
        self.plain = chosen.plain
        self.narrow = (chosen.width or width) < width
        self.stacked = self.narrow and (chosen.width or width) < COLUMN
        super().__init__(figsize=(chosen.width or width, height), dpi=dpi, layout="constrained")

    def subplots(self, nrows: int = 1, ncols: int = 1, **kwargs: Any) -> Any:
        """As matplotlib's; below `COLUMN` inches all panels are in one column, row by row."""
        if not self.stacked or ncols == 1:
            return super().subplots(nrows, ncols, **kwargs)
        self._grow(ncols)
        return _stack_panels(super().subplots, nrows, ncols, **kwargs)

    def subfigures(self, nrows: int = 1, ncols: int = 1, **kw: Any) -> Any:  # type: ignore[override]
        """As matplotlib's; below `COLUMN` inches all are in one column."""
        if not self.stacked or ncols == 1:
            return super().subfigures(nrows, ncols, **kw)
        kw.pop("width_ratios", None)
        self._grow(ncols)
        return super().subfigures(nrows * ncols, 1, **kw)

    def legend(self, *args: Any, **kwargs: Any) -> Legend:
        """As matplotlib's; in a narrow figure with as many columns as fit."""
        made = super().legend(*args, **kwargs)
        if not self.narrow:
            return made
        labels = [text.get_text() for text in made.get_texts()]
        fitting = legend_columns(labels, self.get_size_inches()[0], max(1, kwargs.get("ncols", 1)))
        if fitting == kwargs.get("ncols", 1):
            return made
        made.remove()
        return super().legend(*args, **{**kwargs, "ncols": fitting})

    def _grow(self, times: int) -> None:
        """Room for so many times as many panels below one another, up to a page."""
        width, height = self.get_size_inches()
        self.set_size_inches(width, min(HIGHEST, height + (times - 1) * max(1.6, height - 1.4)))


def subplots(part: Figure | SubFigure, nrows: int, ncols: int, **kwargs: Any) -> Any:
    """The panels of a part of a figure, as `Canvas.subplots` has them of a whole one."""
    make = part.subplots
    if is_stacked(part):
        return _stack_panels(make, nrows, ncols, **kwargs)
    return make(nrows, ncols, **kwargs)


def _stack_panels(make: Callable[..., Any], nrows: int, ncols: int, **kwargs: Any) -> Any:
    """Axes of ``nrows x ncols`` panels that are all in one column, row by row. Panels that shared
    the labels of their row's first one get them, once it has some."""
    squeeze, heights = kwargs.pop("squeeze", True), kwargs.pop("height_ratios", None)
    kwargs.pop("width_ratios", None)
    ratios = None if heights is None else np.repeat(heights, ncols)
    axes = make(nrows * ncols, 1, squeeze=False, height_ratios=ratios, **kwargs)
    axes = axes.reshape(nrows, ncols)
    for first, *others in axes:
        for ax in others:
            ax.stood_beside, ax.shared = first, bool(kwargs.get("sharey"))
    return axes if not squeeze else axes[0] if nrows == 1 else axes


def is_stacked(part: Figure | SubFigure) -> bool:
    """Do the panels of a figure stand below one another, because it is narrower than `COLUMN`?"""
    whole = part.get_figure(root=True)
    return isinstance(whole, Canvas) and whole.stacked


def complete_labels(fig: Figure) -> None:
    """Where panels are stacked, label those that stood to the right of a labelled one, and break
    titles that are longer than their panel."""
    if not is_stacked(fig):
        return
    for ax in fig.axes:
        letters = round(LETTERS * ax.get_position().width * fig.get_figwidth())
        for place in ("left", "center", "right"):
            title = ax.get_title(place)
            for text in ax.get_children() if title else ():
                if isinstance(text, Text) and text.get_text() == title:
                    text.set_text("\n".join(textwrap.wrap(title, max(letters, 12))))
        if (first := getattr(ax, "stood_beside", None)) is None:
            continue
        if getattr(ax, "shared", False) and not ax.get_ylabel():
            ax.set_ylabel(first.get_ylabel(), fontsize=first.yaxis.label.get_fontsize())
        if not any(label.get_text() for label in ax.get_yticklabels()):
            labels = [label.get_text() for label in first.get_yticklabels()]
            if any(labels) and len(labels) == len(ax.get_yticks()):
                ax.set_yticks(ax.get_yticks(), labels)


def legend_columns(labels: Sequence[str], width: float, most: int) -> int:
    """How many columns of a legend fit into so many inches, at most ``most``.

    >>> [legend_columns(labels, 4.8, 2) for labels in (["low", "high"], ["a long name" * 4])]
    [2, 1]
    """
    letters = max(map(len, labels), default=0) + 10  # with the line and the space between columns
    return max(1, min(most, int(20 * width / letters)))


def says_beside(fig: Figure, **texts: str) -> bool:
    """Keep a figure's ``headline`` or ``caption``; returns whether it is left out of the figure."""
    if not isinstance(fig, Canvas):
        return False
    if fig.stacked:
        for name, text in texts.items():
            texts[name] = text.replace("Left:", "Above:").replace("Right:", "Below:")
    vars(fig).update(texts)
    return fig.plain
