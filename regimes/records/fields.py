"""The fields of headers and configurations by dotted path, and in which of them some differ."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regimes.base.config import (
    RunConfig,
    from_dict,
    read_value,
    to_dict,
)
from regimes.base.config.convert import flatten_table
from regimes.base.errors import ConfigError
from regimes.records.earlier import as_present, with_fields_that_left
from regimes.records.schema import Header, Row, is_hooked

SAVING = ("checkpoint_every", "checkpoint_seconds", "checkpoint_keep", "reporters", "timeout")
# "data.weights": the first weights of a user's own model, which each seed may draw anew.
# "role": the part of a schedule in figures, no part of its training.
STORAGE = (
    *SAVING,
    "role",
    *("data.path", "data.download", "data.weights"),
    *("branch.of", "machine.command", "schema"),
)
# Runs of one experiment may differ in these, except in world.workers.
CIRCUMSTANCES = ("code", "machine", "world", "device", "graphs", "bucket_mb")
LONGEST = 24  # letters of a value in a name
Fields = dict[str, Any]


def resolve_config(config: Mapping[str, Any]) -> Fields:
    """Return a recorded configuration, with defaults for the fields that its version lacked or this
    one has no more, so that both versions' records compare."""
    own = as_present(config)
    try:
        return with_fields_that_left(to_dict(from_dict(RunConfig, own)))
    except ConfigError:
        # written by a later version, edited, or with a field that has left: its values replace the
        # defaults
        defaults = with_fields_that_left(to_dict(RunConfig()))
        for name in ("data", "model", "optimizer", "outer"):
            if isinstance(own.get(name), Mapping):
                own[name] = defaults[name] | own[name]
        return defaults | own


def header_fields(header: Header, rows: Sequence[Row]) -> Fields:
    """Return the fields of a header without its name and `STORAGE`: ``{"optimizer.lr": 0.4,
    "data.digest": "e12f..."}``. Fields without a value are left out."""
    config = header["config"]
    # an older version did not write the field "units"
    table: Fields = {"units": config.get("epochs"), **header}
    del table["config"]
    if not is_hooked(header):
        config = _resolved_but_seed(json.dumps({**config, "seed": 0})) | {"seed": config["seed"]}
    elif rows:  # a hook's learning rates stand in its rows alone
        rates = [row["lr"] for row in rows]
        table["rates"] = {"first": rates[0], "highest": max(rates)}
    known = flatten_table(config) | flatten_table(table)
    # what a branch has changed tells it from its trunk; where the trunk is, and its digests, do not
    changed = bool(header.get("trunk", {}).get("before"))
    of_branch = ("branch.", "trunk.before.") if changed else ()
    return {
        k: v
        for k, v in known.items()
        if k not in ("name", *STORAGE)
        and (not k.startswith(("branch.", "trunk.")) or k.startswith(of_branch))
    }


@functools.lru_cache(256)
def _resolved_but_seed(config: str) -> Fields:
    """`resolve_config`, flat, of a configuration as JSON: the runs of an experiment have one except
    for their seed, which has no default and decides no other field."""
    return flatten_table(resolve_config(json.loads(config)))


def is_circumstance(field: str) -> bool:
    """Answer whether runs of the same experiment may differ in a field."""
    return field != "world.workers" and field.partition(".")[0] in CIRCUMSTANCES


def identifying_fields(fields: Fields, per_seed: Iterable[str]) -> Fields:
    """Return the fields without the seed, circumstances, and what each seed has of its own.

    Args:
        per_seed: fields or tables that differ between the seeds of one experiment.
    """
    free = ("seed", *per_seed)
    return {
        field: value
        for field, value in fields.items()
        if not is_circumstance(field)
        and not any(field == name or field.startswith(f"{name}.") for name in free)
    }


def differing_fields(tables: Sequence[Fields]) -> dict[str, list[str]]:
    """Find the fields in which some of the tables differ, each with its value in every table as
    text."""
    if all(table == tables[0] for table in tables):  # nearly always, and found out at once
        return {}
    names = dict.fromkeys(name for table in tables for name in table)
    differences = {}
    for name in names:
        values = [table.get(name) for table in tables]
        if any(value != values[0] for value in values):
            texts = [field_text(name, value) for value in values]
            if len({*texts}) < len({json.dumps(x, sort_keys=True) for x in values}):
                texts = [_full_text(value) for value in values]  # alike when abbreviated
            differences[name] = texts
    return differences


def field_text(field: str, value: Any) -> str:
    """Write a value for a name: short, as ``--set`` and ``--where`` take it."""
    text = _full_text(value)
    if field.endswith("digest"):
        return text[:8]
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _full_text(value: Any) -> str:
    if value is None:
        return "none"
    unquoted = isinstance(value, str) and read_value(value) == value  # the text "4" is quoted
    return value if unquoted else json.dumps(value)


def differences_text(differences: Mapping[str, Sequence[str]], most: int = 4) -> str:
    """Write fields, each with its distinct values."""
    parts = []
    for name, values in differences.items():
        distinct = list(dict.fromkeys(values))
        rest = f" and {len(distinct) - most} more" if len(distinct) > most else ""
        parts.append(f"{name} ({', '.join(distinct[:most])}{rest})")
    return ", ".join(parts)
