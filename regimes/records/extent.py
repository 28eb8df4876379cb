"""How far a run is and what its rows count: from its header and rows alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def complete(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Has the run trained all its units, or spent its budget of floats?"""
    budget = header.get("budget")
    spent = budget is not None and sum(row["floats"] for row in rows) >= budget
    return spent or len(rows) >= units(header)


def units(header: dict[str, Any]) -> int:
    """How many units (epochs, or of ``unit_steps`` steps) a run has; its rows when it is done."""
    return header.get("units", header["config"]["epochs"])


def count_units(header: dict[str, Any]) -> str:
    """ "24 epochs", or "24 units of 50 steps"."""
    word, _, rest = unit_name(header).partition(" ")
    return f"{units(header)} {word}s {rest}".rstrip()


def unit_name(header: dict[str, Any]) -> str:
    """What a row is: "epoch", or "unit of 50 steps"."""
    steps = header["config"].get("unit_steps")
    return f"unit of {steps} steps" if steps else "epoch"


def share_of_low(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Floats sent so far over those of low compression in the same steps; None without a low."""
    low = header["per_step"].get("low", {}).get("floats")
    steps = sum(row["steps"] for row in rows)
    return sum(row["floats"] for row in rows) / (low * steps) if low and steps else None
