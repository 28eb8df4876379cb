"""Progress bars for long work, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from regimes.base.console.notebook import Line, in_notebook

T = TypeVar("T")
SOON = 2.0  # seconds until a bar appears: work that takes less needs none


def track_progress(things: Sequence[T], doing: str) -> Iterator[T]:
    """Yield the things, one after the other. A bar appears on a terminal after `SOON` seconds, and
    is gone at the end; elsewhere nothing is printed.

    Args:
        doing: what is done with each, in a few words.
    """
    start, bar = time.monotonic(), None
    try:
        for done, thing in enumerate(things):
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            elif done and time.monotonic() - start > SOON and sys.stderr.isatty():
                bar = _make_bar(doing, len(things), done)
            yield thing
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def show_spending(
    doing: str, show: Callable[[str], None]
) -> Iterator[Callable[[str, float], None]]:
    """Show a bar of a budget, on a terminal. Yields what is called with each line to show and the
    share of the budget that is spent.

    Args:
        show: prints a line.
    """
    if not sys.stderr.isatty():
        yield lambda line, share: show(line)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    columns = "{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=1.0)

        def update(line: str, share: float) -> None:
            bar.console.print(line, highlight=False, markup=False)
            bar.update(task, completed=min(1.0, share))

        yield update


@contextmanager
def shown_by(show: Callable[[str, float], None] | None) -> Iterator[Callable[[str, float], None]]:
    """Yield what is called with each line and the share of a budget that is spent: ``show``; by
    default one line in a notebook's cell, gone at the end, a bar on a terminal, and elsewhere lines
    on standard error: a search may take hours, and should not be silent."""
    if show is not None:
        yield show
    elif not in_notebook() and not sys.stderr.isatty():
        yield _print_share
    elif not in_notebook():
        with show_spending("searching", lambda line: None) as update:
            yield update
    else:
        cell = Line()
        try:
            yield lambda line, share: cell.show(f"{min(share, 1.0):.0%} of the budget: {line}")
        finally:
            cell.clear()


def _print_share(line: str, share: float) -> None:
    with suppress(OSError, ValueError):  # standard error is closed
        print(f"regimes: {min(share, 1.0):.0%} of the budget: {line}", file=sys.stderr)


def _make_bar(doing: str, total: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(doing, total=total, completed=done)
    bar.start()
    return bar
