"""Records of a user's own training: what their headers know, and what they do not.

A hook knows its own arguments, the optimiser and what is sent, but not the data, the schedule or
the precision. What is not known is missing or null. Earlier versions wrote the trainer's defaults
there (a constant schedule, a weight decay of 1e-4, ...), which readers remove.
"""

from __future__ import annotations

from typing import Any, cast

from regimes.records.schema import Header, is_hooked

OWN = "own"  # in place of the unknown name of data or of an optimiser
# Keys of a hook's configuration that are known: of every hook, and of local steps.
COMPRESSION = ("compressor", "levels", "policy", "start_compressing_after", "signal")
KNOWN = ("name", "seed", "unit_steps", "workers", "batch_size", *COMPRESSION, "dtype")
LOCAL_STEPS = ("sync_policy", "sync_levels", "outer")
# Fields that readers look for in every run.
OPTIMIZER = ("optimizer.name", "optimizer.options", "optimizer.schedule")
LOOKED_FOR = ("data", "batch_size", *OPTIMIZER, "precision", "deterministic")
NOT_RECORDED = "not recorded"  # in place of such a field, in a text


def without_defaults(header: Header) -> Header:
    """Return a hook's header with the known part of its configuration; a trainer's header as it
    is."""
    if not is_hooked(header):
        return header
    config = header["config"]
    keys = [*KNOWN, *(LOCAL_STEPS if config.get("sync_policy") else ())]
    keys += [key for key in ("instruments", "gather", "nodes") if config.get(key)]
    known = {key: config[key] for key in keys if key in config}
    known |= {key: {"name": config[key]["name"]} for key in ("data", "model")}
    # the length of the training, which a script does not say
    known |= {"epochs": None, "optimizer": _optimizer(config.get("optimizer") or {})}
    return cast("Header", {**header, "config": known})


def _optimizer(table: dict[str, Any]) -> dict[str, Any]:
    """What is known of the optimiser: its name alone if an earlier version wrote a schedule."""
    keys = ("name", "options", "groups") if table.get("schedule") is None else ("name",)
    known = {key: table[key] for key in keys if key in table}
    known |= {"lr": None, "schedule": None}  # the rates stand in the rows
    return known | {"name": None} if known.get("name") in (None, OWN) else known


def unknown_fields(header: Header) -> list[str]:
    """List the fields that a reader looks for and a hook's header lacks; none of a trainer's."""
    if not is_hooked(header):
        return []
    config = header["config"]
    known = {**config, **{f"optimizer.{k}": v for k, v in config["optimizer"].items()}}
    if config["data"]["name"] == OWN:
        del known["data"]
    return [name for name in LOOKED_FOR if known.get(name) is None]
