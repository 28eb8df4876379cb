"""Presets and grids in groups, all of them or those that match some words."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from regimes.config import Registry
from regimes.errors import ConfigError, nearest
from regimes.presets import own
from regimes.presets.offered import OfferedFile
from regimes.presets.registry import GRIDS, PRESETS


class Group(NamedTuple):
    """The presets or grids of one file, or of the files with one ``group``.

    Attributes:
        kind: "preset" or "grid".
        about: the first sentence of the file.
        rows: name, and what its docstring or ``about`` says.
    """

    kind: str
    about: str
    rows: list[tuple[str, str]]


def groups(words: Sequence[str] = ()) -> list[Group]:
    """All groups, or what has each word in its name, its description or its group's.

    Raises:
        ConfigError: nothing matches.
    """
    matching = [group for known in (PRESETS, GRIDS) for group in _of(known, words)]
    if not matching:
        names = {*PRESETS, *GRIDS}
        raise ConfigError(
            f"no preset or grid is about {' '.join(words)!r}: "
            f"{nearest(words[0], names, 'regimes presets')}"
        )
    return matching


def _of(known: Registry, words: Sequence[str]) -> list[Group]:
    files: dict[str, list[tuple[str, str]]] = {}
    for name, make in known.items():
        about, said = _words(make)
        text = f"{known.kind} {name} {about} {said}".lower()
        if all(word.lower() in text for word in words):
            files.setdefault(about, []).append((name, said))
    return [Group(known.kind, about, rows) for about, rows in files.items()]


def _words(make: Any) -> tuple[str, str]:
    """The first sentence of the file that makes it, and what is said of it there."""
    if isinstance(make, OfferedFile):
        return own.read_words(make.path)
    function = make.func if isinstance(make, functools.partial) else make
    first = (sys.modules[function.__module__].__doc__ or "").strip().partition("\n\n")[0]
    about = " ".join(first.split()).partition(";")[0].rstrip(".")
    return about, " ".join((make.__doc__ or "").split())
