"""A compressor at its level, or levels by name, as `regimes.attach` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regimes.compression import Compressor


def leveled(compressor: Any, level: Any) -> Any:
    """A name, a table or an object, with a level, or with levels by name."""
    if isinstance(compressor, Compressor):
        return compressor.with_level(level)
    table = {"name": compressor} if isinstance(compressor, str) else compressor
    return {**table, "levels" if isinstance(level, Mapping) else "level": level}
