"""Writes ``docs/findings.md`` and ``docs/findings/``: ``python -m analysis.findings``."""

from __future__ import annotations

from regimes.base.console import stdout

from . import pages
from .checks import ClaimError
from .numbers import NUMBERS
from .sources import ROOT
from .store import Store


def main(again: bool = False) -> None:
    """Write the pages of the findings from the committed records.

    Args:
        again: compute every number, not only the numbers of archives that have changed.
    """
    store = Store(NUMBERS, None if again else pages.NUMBERS_FILE)
    try:
        changed = pages.write(store)
    except ClaimError as error:
        raise SystemExit(f"error: {error}") from None
    written = "\n".join(str(path.relative_to(ROOT)) for path in changed)
    stdout.make_console(highlight=False).print(written or "all pages are as they should be")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
