"""How far a run is and what its rows count: from its header and rows alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARKS = ("start", "resume", "end", "stopped")


def complete(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Has the run trained all its units, or spent its budget of floats?"""
    budget, wanted = header.get("budget"), units(header)
    spent = budget is not None and sum(row["floats"] for row in rows) >= budget
    return spent or (wanted is not None and len(rows) >= wanted)


def ended(events: Sequence[dict[str, Any]]) -> bool:
    """Did the run end by itself since it was last started or resumed? A trainer writes the event
    "end" after its last checkpoint, so that a run with all rows and without it has no final
    weights."""
    marks = [event["event"] for event in events if event["event"] in MARKS]
    return marks[-1:] == ["end"]


def units(header: dict[str, Any]) -> int | None:
    """How many units (epochs, or of ``unit_steps`` steps) a run has; None while nobody has said how
    long a user's own training, which the hook records, will be."""
    return header["units"] if "units" in header else header["config"]["epochs"]


def length(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> int:
    """How many units a run has; those that it has trained where that is not known."""
    wanted = units(header)
    return len(rows) if wanted is None else wanted


def count_units(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """ "24 epochs", "24 units of 50 steps"; "3 epochs so far" of an unknown number."""
    so_far = " so far" if units(header) is None else ""
    return f"{_counted(length(header, rows), header)}{so_far}"


def progress(header: dict[str, Any], rows: Sequence[dict[str, Any]], of: str = "/") -> str:
    """ "3/24 epochs", or "3 epochs so far".

    Args:
        of: stands between the numbers.
    """
    all_of_them = count_units(header, rows)
    return all_of_them if units(header) is None else f"{len(rows)}{of}{all_of_them}"


def _counted(number: int, header: dict[str, Any]) -> str:
    word, _, rest = unit_name(header).partition(" ")
    return f"{number} {word}{'s' * (number != 1)} {rest}".rstrip()


def unit_name(header: dict[str, Any]) -> str:
    """What a row is: "epoch", or "unit of 50 steps"."""
    steps = header["config"].get("unit_steps")
    return f"unit of {steps} steps" if steps else "epoch"


def share_of_low(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Floats sent so far over those of low compression in the same steps; None without a low."""
    low = header["per_step"].get("low", {}).get("floats")
    steps = sum(row["steps"] for row in rows)
    return sum(row["floats"] for row in rows) / (low * steps) if low and steps else None
