"""Saved states, read and changed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def column(place: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One entry of each layer, of a state or of a part."""
    return {name: layer[key] for name, layer in place["layers"].items()}


def owed(state: Mapping[str, Any], part: int = 0) -> dict[str, Any]:
    """The residuals of one process."""
    return column(state["parts"][part], "residual")


def as_of_0_3(state: Mapping[str, Any]) -> dict[str, Any]:
    """A process's file of a run, without local steps, in the layout of version 0.3."""
    (part,) = state["parts"]
    own = {"residuals": column(part, "residual"), "hidden": part["hidden"]}
    shared = {key: state[key] for key in ("model", "optimizer", "gauges", "union")}
    shared |= {"memories": column(state, "memory")}
    return {"own": own, "workers": part["workers"], "shared": shared}


def as_hook_of_0_3(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one process of a hook in the layout of version 0.3."""
    (part,) = state["parts"]
    own = {key: part[key] for key in ("sums", "traffic", "meter")}
    names = {"shapes": "shape", "memories": "memory", "levels": "level"}
    kept = {k: v for k, v in state.items() if k not in ("format", "processes", "layers", "parts")}
    return {
        **kept,
        **own,
        **{old: column(state, new) for old, new in names.items()},
        "residuals": column(part, "residual"),
        "worker": part["process"],
        "workers": state["processes"],
    }
