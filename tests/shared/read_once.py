"""What every run reads anew and no test changes, read once in each process: the
commit of the checkout, which git says, and the entry points of the installed packages.
"""

from __future__ import annotations

import functools
from typing import Any

from regimes.base.config import entry_points
from regimes.records import provenance


class _Selected:
    """Entry points by group; Python looks through all of them for each group."""

    def __init__(self, points: Any) -> None:
        self.select = functools.cache(lambda group: tuple(points.select(group=group)))


def install() -> None:
    """For the processes that are forked from this one as well."""
    package, commit = provenance.PACKAGE, provenance.find_commit
    known, of_packages = functools.cache(commit), entry_points._of_packages

    def commit_of_package() -> str | None:  # a test may put another package in the place of this
        return known() if package == provenance.PACKAGE else commit()

    @functools.lru_cache(maxsize=1)
    def selected(path: tuple[str, ...]) -> _Selected:
        return _Selected(of_packages(path))

    provenance.find_commit = commit_of_package
    entry_points._of_packages = selected
