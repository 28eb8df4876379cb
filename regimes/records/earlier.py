"""The configuration of a record that an earlier version wrote: other names and values, and fields
that have left since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {"parcel_mb": "bucket_mb", "autocast": "precision", "tensorboard": "reporters"}
# values, by their old key
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "autocast": {"none": "strict"},
    "tensorboard": {True: ["tensorboard"], False: []},
}
# by dotted path: what a record without the field had
LEFT: dict[str, Any] = {"vmap": False, "optimizer.cycle_factor": 1}


def with_present_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the present names of keys and values."""
    current = {}
    for key, value in config.items():
        renamed = RENAMED_VALUES.get(key, {}) if isinstance(value, str | bool) else {}
        current[RENAMED.get(key, key)] = renamed.get(value, value) if renamed else value
    return current


def as_present(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration as this version would have written it, if it can: `LEFT` with
    another value stays, and no class takes it."""
    plain = with_present_names(config)
    if plain.get("instruments") == []:  # the first records wrote a list where there were none
        plain["instruments"] = {}
    for path, usual in LEFT.items():
        name, _, key = path.rpartition(".")
        table = plain.get(name) if name else plain
        if isinstance(table, Mapping) and type(table.get(key)) is type(usual):
            kept = {k: v for k, v in table.items() if k != key or v != usual}
            plain = {**plain, name: kept} if name else kept
    return plain


def with_fields_that_left(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add `LEFT` to a plain configuration, in those of its tables that it has: records with and
    without these fields then compare."""
    whole = dict(config)
    for path, usual in LEFT.items():
        name, _, key = path.rpartition(".")
        if not name:
            whole.setdefault(key, usual)
        elif isinstance(whole.get(name), Mapping):
            whole[name] = {key: usual} | whole[name]
    return whole
