"""What the record of a user's own training says, and what it does not. No torch.

A hook, a callback and local steps know their own arguments, the optimiser and what is sent; they do
not know the data, the schedule or the precision. What is not known is missing or null. Earlier
versions wrote the trainer's defaults in its place (a constant schedule, a warm-up of 5 epochs, a
weight decay of 1e-4, ...); readers leave those out.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
OWN = "own"  # data, or an optimiser, whose name a hook was not told
KNOWN = (
    "name",
    "seed",
    "unit_steps",
    "workers",
    "batch_size",
    "compressor",
    "levels",
    "policy",
    "start_compressing_after",
    "signal",
    "dtype",
)
LATE = ("sync_policy", "sync_levels", "outer")  # of local steps
ASKED = (
    "data",
    "batch_size",
    "optimizer.name",
    "optimizer.options",
    "optimizer.schedule",
    "precision",
    "deterministic",
)
NOT_SAID = "not said"


def hooked(header: Row) -> bool:
    """Has a hook, a callback or ``local_steps`` written the record?"""
    return header.get("written_by") == "hook"


def as_said(header: Row) -> Row:
    """A header whose configuration has only what is known; a trainer's as it is."""
    if not hooked(header):
        return header
    config = header["config"]
    keys = (*KNOWN, *LATE) if config.get("sync_policy") else KNOWN
    known = {key: config[key] for key in keys if key in config}
    known |= {key: {"name": config[key]["name"]} for key in ("data", "model")}
    return {**header, "config": {**known, "epochs": None, "optimizer": _optimizer(config)}}


def _optimizer(config: Row) -> Row:
    """The name alone where the rest is a trainer's block, which says what the schedule is."""
    found = config.get("optimizer") or {}
    kept = ("name", "options", "groups") if found.get("schedule") is None else ("name",)
    known = {key: found[key] for key in kept if key in found}
    known |= {"lr": None, "schedule": None}  # the rates are those of the rows
    return known | {"name": None} if known.get("name") in (None, OWN) else known


def not_said(header: Row) -> list[str]:
    """The fields of the configuration that a reader looks for and the record does not have; none
    of a trainer's record.

    >>> not_said({"config": {}})
    []
    """
    return [name for name in ASKED if _missing(header["config"], name)] if hooked(header) else []


def _missing(config: Row, name: str) -> bool:
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found is None or (name == "data" and found["name"] == OWN)
