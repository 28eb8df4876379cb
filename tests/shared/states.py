"""Saved states, read and changed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def column(place: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One entry of each layer, of a state or of a part."""
    return {name: layer[key] for name, layer in place["layers"].items()}


def owed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The residuals of one process."""
    return column(state["parts"][0], "residual")
