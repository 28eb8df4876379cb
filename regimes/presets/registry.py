"""Presets and grids by name, and in groups: all of them, or those that match some words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from regimes.base.config import Registry, RunConfig
from regimes.base.errors import ConfigError, suggest_nearest

Grid = dict[str, RunConfig]
PRESETS = Registry("preset", listed="regimes presets")  # functions that make a RunConfig
GRIDS = Registry("grid", listed="regimes presets")  # functions that make a Grid
preset, grid = PRESETS.register, GRIDS.register


class PresetGroup(NamedTuple):
    """Lists the presets or grids of one module, or of the files with one ``group``.

    Attributes:
        kind: "preset" or "grid".
        about: the first sentence of the file.
        rows: name, and what its docstring or ``about`` says.
    """

    kind: str
    about: str
    rows: list[tuple[str, str]]


def list_groups(words: Sequence[str] = ()) -> list[PresetGroup]:
    """List all groups, or what has each word in its name, its description or its group's.

    Raises:
        ConfigError: nothing matches.
    """
    rows_of: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for known in (PRESETS, GRIDS):
        for name, make in known.items():
            about, description = _describe(make)
            text = f"{known.kind} {name} {about} {description}".lower()
            if all(word.lower() in text for word in words):
                rows_of.setdefault((known.kind, about), []).append((name, description))
    if not rows_of:
        raise ConfigError(
            f"no preset or grid is about {' '.join(words)!r}: "
            f"{suggest_nearest(words[0], {*PRESETS, *GRIDS}, 'regimes presets')}"
        )
    return [PresetGroup(*group, rows) for group, rows in rows_of.items()]


def _describe(make: Any) -> tuple[str, str]:
    """(the heading under which a preset or grid is listed, its description)."""
    if hasattr(make, "words"):  # made of a package's TOML file (`presets.own`), which has no module
        return make.words()
    first = (sys.modules[make.__module__].__doc__ or "").strip().partition("\n\n")[0]
    about = " ".join(first.split()).partition(";")[0].rstrip(".")
    return about, " ".join((make.__doc__ or "").split())
