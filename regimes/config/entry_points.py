"""What packages offer by entry points; a checkout's own, too, where it is not installed."""

from __future__ import annotations

import functools
import tomllib
from importlib import metadata
from pathlib import Path

PROJECT = "regimes"
CHECKOUT = Path(__file__).parents[2]  # in an installation: site-packages


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """The entry points of a group, by name.

    Python knows them from the metadata of installed packages. A checkout that only stands on the
    path has none, so its own are read from its ``pyproject.toml``.
    """
    points = [*metadata.entry_points(group=group)]
    if not _installed():
        own = _declared(CHECKOUT / "pyproject.toml").get(group, {})
        points += [metadata.EntryPoint(name, value, group) for name, value in own.items()]
    return sorted(points, key=lambda point: point.name)


def _installed() -> bool:
    try:
        metadata.distribution(PROJECT)
    except metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _declared(file: Path) -> dict[str, dict[str, str]]:
    """The entry points by group of this project's ``pyproject.toml``; none of another's."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return {}
    return project.get("entry-points", {}) if project.get("name") == PROJECT else {}
