"""Dataclasses from nested dictionaries and back; every key and type is checked."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import sys
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, time
from typing import Any, Literal, TypeVar, get_args, get_origin

from regimes.base.config.retired import RETIRED
from regimes.base.errors import ConfigError, suggest_nearest, unexpected_value

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Make a nested dictionary of plain types, without the fields that are ``None``."""
    return json.loads(json.dumps(without_none(dataclasses.asdict(config))))


def without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return value


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a dataclass from a nested dictionary; every key and type is checked.

    Args:
        where: the dotted path of the table in a configuration, with a dot at its end.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of the wrong type, or a
            retired field.
    """
    hints = _resolve_hints(cls)  # type: ignore[arg-type]  # classes are hashable
    names = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for key, value in values.items():
        if key in names:
            continue
        if (field := RETIRED.get(where + key)) is None:
            raise ConfigError(f"unknown key {where + key!r}: {suggest_nearest(key, names)}")
        raise ConfigError(
            f"{where}{key} = {value!r}: the field was retired in version {field.since}; "
            f"{field.instead}"
        )
    arguments = {k: convert_value(hints[k], v, where + k) for k, v in values.items()}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where.rstrip('.') or cls.__name__}: {error}") from None


@functools.cache
def _resolve_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def convert_value(kind: Any, value: Any, where: str) -> Any:
    """Check ``value`` against an annotation; integers pass as floats, lists as tuples."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _check_plain(value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_dict(typing.cast(type, kind), value, where + ".")
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is Literal:
        if value in args and not isinstance(value, bool):
            return args[args.index(value)]  # of its type: 2.0 equals 2
        raise ConfigError(f"{where} = {value!r}: {suggest_nearest(str(value), map(str, args))}")
    if origin is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(convert_value(k, v, f"{where}[{i}]") for i, (k, v) in pairs)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): convert_value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # JSON, and so a record, has neither nan nor inf
            raise unexpected_value(where, value, "a finite number")
        return float(value) if isinstance(value, int) else value
    if kind is int and isinstance(value, int) and abs(value) >= 2**63:  # of a tensor of integers
        raise unexpected_value(where, value, "a whole number of at most 63 bits")
    matches = isinstance(kind, type) and isinstance(value, kind)
    if matches and (kind is bool or not isinstance(value, bool)):  # True is an int of Python
        return value
    raise unexpected_value(where, value, _describe(kind))


def _check_plain(value: Any, where: str) -> Any:
    """Check a plug-in's field of any type: TOML's dates and times have no form in JSON."""
    if isinstance(value, date | time):
        raise unexpected_value(where, value, "a number, a text, true or false, a list or a table")
    inner = value.items() if isinstance(value, Mapping) else ()
    for key, one in enumerate(value) if isinstance(value, list | tuple) else inner:
        _check_plain(one, f"{where}.{key}")
    return value


def _convert_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    types = [k for k in kinds if k is not type(None)]
    if isinstance(value, Mapping):
        types = [k for k in types if dataclasses.is_dataclass(k)] or types
    if len(types) == 1 and value is not None:
        return convert_value(types[0], value, where)  # for its more exact error
    for kind in sorted(kinds, key=lambda kind: type(value) is not kind):  # the exact type first
        with suppress(ConfigError):
            return convert_value(kind, value, where)
    raise unexpected_value(where, value, " or ".join(map(_describe, types)))


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is tuple:
        inner = _describe(get_args(kind)[0]).removeprefix("a ")
        return f"a list of {f'{inner}s'.replace('list of', 'lists of').replace('ss', 's')}"
    if get_origin(kind) is Literal:
        return " or ".join(json.dumps(word) for word in get_args(kind))
    if get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "a table"
    return str(kind)


def fields_as_html(config: Any, usual_one: Any) -> str:
    """Make a table of the fields that have other values than in the usual one, by dotted name."""
    usual, rows = flatten_table(to_dict(usual_one)), []
    for name, value in flatten_table(to_dict(config)).items():
        if usual.get(name, ...) != value:
            cells = html.escape(name), html.escape(json.dumps(value, ensure_ascii=False))
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    body = "".join(rows) or "<tr><td>all fields have their defaults</td></tr>"
    return f"<table>{body}</table>"


def flatten_table(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into one, without null: ``{"optimizer.lr": 0.4}``."""
    fields: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            fields |= flatten_table(value, f"{prefix}{key}.")
        elif value is not None:
            fields[f"{prefix}{key}"] = value
    return fields
