"""What packages offer by entry points; a checkout offers its own, installed or not."""

from __future__ import annotations

import functools
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

PROJECT = "regimes"
CHECKOUT = Path(__file__).parents[3]  # in an installation: site-packages


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Find the entry points of a group, by name and package.

    Python knows them from the metadata of installed packages. A checkout's own are read from its
    ``pyproject.toml``: it may only stand on the path, and metadata are as old as its installation.
    """
    points = [*_of_packages(tuple(sys.path)).select(group=group)]
    if own := _read_declared(CHECKOUT / "pyproject.toml"):
        points = [point for point in points if find_owner(point) != PROJECT]
        points += [metadata.EntryPoint(*pair, group) for pair in own.get(group, {}).items()]
    return sorted(points, key=lambda point: (point.name, find_owner(point)))


def find_owner(point: metadata.EntryPoint) -> str:
    """Return the name of the package that offers it; this project, where no metadata say so."""
    return PROJECT if point.dist is None else _name_of(point.dist)


@functools.lru_cache(maxsize=64)
def _name_of(package: metadata.Distribution) -> str:
    return package.name  # parses the metadata anew, 0.4 ms; a run asks for each package many times


@functools.lru_cache(maxsize=1)
def _of_packages(path: tuple[str, ...]) -> Any:
    """All entry points of the packages on a path; reading them takes 15 ms."""
    return metadata.entry_points()


@functools.cache
def _read_declared(file: Path) -> dict[str, dict[str, str]]:
    """The entry points by group of this project's ``pyproject.toml``; none of another's."""
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return {}
    return project.get("entry-points", {}) if project.get("name") == PROJECT else {}
