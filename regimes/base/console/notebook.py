"""A notebook's cell: one line of progress, replaced in place and gone at the end, and one sentence
after a stop."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOON = 0.5  # seconds until a line appears: work that takes less needs none
AGAIN = 0.25  # seconds between two lines


def in_notebook() -> bool:
    """Answer whether this code runs in a cell of Jupyter."""
    shell = sys.modules.get("IPython")  # it is imported there, and costs a second elsewhere
    running = shell.get_ipython() if shell is not None else None
    return getattr(running, "kernel", None) is not None


class Stopped(KeyboardInterrupt):
    """Says that the cell was stopped; Jupyter shows the sentence in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@contextmanager
def end_in_one_sentence(kept: Callable[[], str]) -> Iterator[None]:
    """End a stop of the cell in one sentence; elsewhere an interrupt stays as it is.

    Args:
        kept: what is kept of the work, and how to go on.

    Raises:
        Stopped: in a notebook, in place of KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not in_notebook():
            raise
        raise Stopped(f"Stopped: {kept()}.") from None


def describe_kept_runs(out: Path) -> str:
    """Say what a stop leaves of several runs below a folder."""
    return f"the runs that had ended are kept in {out}; run the cell again to go on"


class Line:
    """Displays one line of progress; nothing is displayed of work that takes less than `SOON`
    seconds."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = time.monotonic() + SOON

    def show(self, text: str) -> None:
        """Replace the line, at most four times a second."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + AGAIN
        self._display(f"<span style='font-family:monospace'>{html.escape(text)}</span>")

    def clear(self, text: str = "") -> None:
        """Leave nothing, or a last text."""
        if self._handle is not None or text:
            self._display(f"<span>{html.escape(text)}</span>" if text else "")

    def _display(self, content: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(content), display_id=True)
        else:
            self._handle.update(HTML(content))
