"""`regimes figure`: the figures that installed packages offer by an entry point ::

    [project.entry-points."regimes.figures"]
    mine = "package.module:offers"

where ``offers()`` gives a dictionary of name to `Offer`. The study of the paper is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from regimes.base.config.entry_points import entry_points
from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.base.errors import ConfigError, LackingError, require, suggest_nearest
from regimes.plotting.needs import Needs
from regimes.records import select_while_loading

GROUP = "regimes.figures"


@dataclass(frozen=True)
class Offer:
    """Offers something that can be drawn or printed.

    Attributes:
        says: one sentence.
        start: called with the words after the name: records and options.
        grids: the grids (`regimes presets`) it draws records of; none: its help says what it needs.
        section: the heading under which it is listed.
        needs: of a grid; None: nothing certain, it draws what there is.
    """

    says: str
    start: Callable[[Sequence[str]], object]
    grids: tuple[str, ...] = ()
    section: str = ""
    needs: Needs | None = None


def find_figures() -> dict[str, Offer]:
    """Find all offers by name, in the packages' order.

    Raises:
        ConfigError: a package's offers cannot be loaded, two packages offer the same name, or none
            offers any.
    """
    known: dict[str, Offer] = {}
    for point in entry_points(GROUP):
        try:
            offers: Mapping[str, Offer] = point.load()()
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigError(f"the figures of {point.value} cannot be loaded: {error}") from None
        if twice := ", ".join(sorted(known.keys() & offers.keys())):
            raise ConfigError(
                f"{point.value} offers {twice}, and so does another package: uninstall one of them"
            )
        known |= offers
    if not known:
        raise ConfigError(
            "no installed package offers figures: install Regimes again (`pip install -e .` in a "
            "checkout), or begin one there by `python -m analysis figures`"
        )
    return known


def begin_figure(name: str, words: Sequence[str]) -> bool:
    """Draw or print the offer of that name; with ``--needs GRID`` print what it needs of a grid.

    Returns:
        Whether the grid has it; True of what is drawn.

    Raises:
        ConfigError: no such offer, or one that needs nothing certain of a grid.
        LackingError: records without a schedule or a statistic that it needs.
    """
    known = find_figures()
    if name not in known:
        raise ConfigError(f"no figure {name!r}: {suggest_nearest(name, known, 'regimes figure')}")
    needs = known[name].needs
    grids, words = _take_option(words, "--needs")
    if grids:
        if words or not all(grids):
            raise ConfigError(f"--needs GRID stands alone: regimes figure {name} --needs GRID")
        if needs is None:
            raise ConfigError(f"figure {name} needs no certain schedules: it draws those there are")
        from regimes.plotting.lacking import (
            print_needs as show_needs,  # presets and pandas, so late
        )

        complete = [show_needs(name, needs, grid) for grid in grids]
        return all(complete)
    try:
        draw_figure(known[name].start, words)
    except LackingError as error:
        if needs is None:
            raise
        raise LackingError(
            f"{error}; `regimes figure {name} --needs GRID` lists what a grid lacks"
        ) from None
    return True


def draw_figure(start: Callable[[Sequence[str]], object], words: Sequence[str]) -> None:
    """Start a figure with its own words, under the options of every figure: ``--where``,
    ``--role``, and those of `take_print_options`.

    Raises:
        ConfigError: an option without a value, or with a wrong one.
    """
    where, words = _take_conditions(words)
    roles, words = _take_option(words, "--role")
    changes, rest = take_print_options(words)
    with select_while_loading(where, print_notes=True, roles=roles), _drawn_by(changes):
        start(rest)


def _take_conditions(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the values of ``--where``, an option of every figure; the other words).

    >>> _take_conditions(["runs/small", "--where", "optimizer.lr=0.4", "--out", "figures"])
    (['optimizer.lr=0.4'], ['runs/small', '--out', 'figures'])

    Raises:
        ConfigError: ``--where`` without a value.
    """
    where, rest = _take_option(words, "--where")
    if not all(where):
        raise ConfigError("--where needs FIELD=VALUE, e.g. --where optimizer.lr=0.4")
    return where, rest


_NUMBERS: tuple[tuple[str, Callable[[str], float], str], ...] = (
    ("width", float, "a number of inches, e.g. 3.3"),
    ("height", float, "a number of inches, e.g. 2.5"),
    ("panel", int, "the number of a panel, e.g. 1"),
)


def take_print_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Divide words into how the figure comes out, as `canvas.Options` has it, and the other words:
    ``--style paper``, ``--width``, ``--height``, ``--panel``, ``--format`` and ``--plain`` are for
    every figure.

    >>> take_print_options(["runs/small", "--width", "3.3", "--plain", "--format", "pdf,svg"])
    ({'width': 3.3, 'formats': ('pdf', 'svg'), 'plain': True}, ['runs/small'])

    Raises:
        ConfigError: a width, a height or a panel that is no number.
    """
    changes: dict[str, Any] = {}
    styles, others = _take_option(words, "--style")
    if {*styles} == {"paper"}:  # another one is an option of the figure itself
        words, changes = others, {"width": 3.3, "formats": ("pdf", "png"), "plain": True}
    formats, words = _take_option(words, "--format")
    for name, read, example in _NUMBERS:
        texts, words = _take_option(words, f"--{name}")
        for text in texts:
            try:
                changes[name] = read(text)
            except ValueError:
                require(False, f"--{name}", text, example)
    if formats:
        changes["formats"] = tuple(x for text in formats for x in text.split(","))
    if "--plain" in words:
        words = [word for word in words if word != "--plain"]
        changes["plain"] = True
    return changes, words


@contextmanager
def _drawn_by(changes: Mapping[str, Any]) -> Iterator[None]:
    """Figures come out by these `canvas.use_options`; without any matplotlib is not imported."""
    if not changes:
        yield
        return
    from regimes.plotting.canvas import use_options

    with use_options(**changes):
        yield


def _take_option(words: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """The values of an option, given as ``--name VALUE`` or ``--name=VALUE``; the other words."""
    values, rest, remaining = [], [], iter(words)
    for word in remaining:
        option, sign, value = word.partition("=")
        if option == name:
            values.append(value if sign else next(remaining, ""))
        else:
            rest.append(word)
    return values, rest


def print_figures() -> None:
    """Print all offers, one table per section."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for name, offer in find_figures().items():
        row = (name, offer.says, "\n".join(offer.grids))
        sections.setdefault(offer.section, []).append(row)
    console = stdout.make_console(highlight=False)
    for title, rows in sections.items():
        of_grids = any(grids for _, _, grids in rows)
        heads = ("figure", "shows", "records of")[: 3 if of_grids else 2]
        table = Table(heads, [row[: len(heads)] for row in rows], texts=len(heads), title=title)
        console.print(table.drawn(), "")
    print("regimes figure NAME RECORDS draws; regimes figure NAME --help says what else it takes;")
    print("all take --where FIELD=VALUE, e.g. --where optimizer.lr=0.4: only runs with that value;")
    print("--role ROLE=SCHEDULE, e.g. --role low=mine: the schedule mine is drawn as low;")
    print("regimes figure NAME --needs GRID: what it needs of a grid, before that is trained;")
    print("--style paper: PDF and PNG, 3.3 inches wide, title and caption in a text file beside;")
    print("--width INCHES, --format png,svg,pdf and --plain: each of these by itself;")
    print("--height INCHES, and --panel NUMBER: one panel alone, counted from the upper left")
