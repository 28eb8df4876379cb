"""A level that the script sets at run time, in place of what the policy decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regimes.base.config import DENSE
from regimes.base.errors import ConfigError, suggest_nearest
from regimes.policies import Decision
from regimes.policies.controller import Levels
from regimes.records import Row

_RULE = "set by the script"


def set_entry(level: Any, why: Any, known: Collection[str], unit: int) -> dict[str, Any] | None:
    """Return what a saved state keeps of ``set_level``; None if the policy decides.

    Args:
        known: names of levels beside "dense".
        unit: the first that has the level.

    Raises:
        ConfigError: there is no such level, or the reason is no text.
    """
    if not isinstance(why, str):
        raise ConfigError(f"set_level: why = {why!r:.60}: expected a text")
    if level is None:
        return None
    names = [*known, DENSE]
    if not isinstance(level, str) or level not in names:
        raise ConfigError(f"set_level: {level!r}: {suggest_nearest(str(level), names)}")
    return {"level": level, "unit": unit, "why": why}


def apply_set_level(
    entry: Mapping[str, Any] | None, unit: int, decided: Levels, compressed: Collection[int]
) -> Levels:
    """Return what was decided for a unit, with the level that the script has set for its
    ``compressed`` layers."""
    if entry is None or unit < entry["unit"]:
        return decided
    reason = {"rule": _RULE, **({"why": entry["why"]} if entry["why"] else {})}
    names, reasons = list(decided.names), list(decided.why)
    for i in compressed:
        names[i], reasons[i] = entry["level"], reason
    # these are of the compressed layers alone (`Levels`)
    decisions = {i: Decision(entry["level"], reason) for i in decided.decisions}
    return replace(decided, names=names, why=reasons, decisions=decisions)


def was_set(row: Row) -> bool:
    """Return whether the script has set the level of this unit."""
    reasons: Sequence[Any] = row["layers"]["why"]
    return any(why is not None and why.get("rule") == _RULE for why in reasons)
