"""A configuration from a TOML file and from ``--set`` settings, and as TOML.

A plug-in that a setting changes is made once, so that its class checks it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes.base import inputs
from regimes.base.config.arguments import check_arguments
from regimes.base.config.convert import from_dict, to_dict, without_none
from regimes.base.config.registry import find_registry
from regimes.base.config.run import RunConfig
from regimes.base.errors import ConfigError, suggest_nearest

# The tables that name a class, and where its names are registered: a text, because this room
# imports none above it.
PLUG_INS = {
    "compressor": "regimes.compression:REGISTRY",
    "policy": "regimes.policies:REGISTRY",
    "batch_policy": "regimes.policies:REGISTRY",
    "sync_policy": "regimes.policies:REGISTRY",
    "deficit": "regimes.data.deficits:REGISTRY",
}
INSTRUMENTS = "regimes.instruments:REGISTRY"
KEYS = re.compile(r'"([^"]*)"|([^."]+)')  # each key of a path such as a.b."c.d": quoted, or bare
# tables that are created when one of their fields is set
OPTIONAL = (*PLUG_INS, "budget", "branch")


@check_arguments()
def override(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Changes fields of a configuration by settings ``a.b=c``. Values are read as TOML, and bare
    words as text.

    >>> config = override(RunConfig(), ["policy=accordion", "policy.eta=0.3", "levels.low=2"])
    >>> config.policy, config.levels
    ({'name': 'accordion', 'eta': 0.3}, {'low': 2, 'high': 1})

    A new ``name`` of a plug-in drops the fields of the previous one. So does a model of your own,
    ``package.module:callable``; the name of a registered network keeps the other fields of
    ``model``:

    >>> override(config, ["policy.name=static"]).policy
    {'name': 'static'}

    A key with dots in it, such as the name of a layer, stands in quotes:

    >>> override(config, ["policy=windows", 'policy.layers."blocks.0.out"=[[0, 6]]']).policy
    {'name': 'windows', 'layers': {'blocks.0.out': [[0, 6]]}}

    Args:
        config: The configuration; it stays as it is.
        settings: The settings, applied in order.

    Returns:
        The changed configuration.

    Raises:
        ConfigError: a setting has no "=", an unknown key, a wrong type or a number outside its
            bounds; fields do not go together; or a plug-in cannot be made from its table.
    """
    return _change_and_check(config, read_pairs(settings))


def read_pairs(settings: Iterable[str], option: str = "--set") -> list[tuple[str, Any]]:
    """Read the paths and values of settings.

    >>> read_pairs(["optimizer.lr=0.2", "seed=7"])
    [('optimizer.lr', 0.2), ('seed', 7)]

    Raises:
        ConfigError: a setting without "=".
    """
    pairs = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"{option} {setting!r} needs the form key=value, e.g. optimizer.lr=0.2"
            )
        pairs.append((path.strip(), read_value(text.strip())))
    return pairs


def override_table(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Change the keys that a nested table has, as ``override`` does; the text "none" unsets one.

    >>> override_table(RunConfig(), {"levels": {"low": 2}, "seed": 7}).levels
    {'low': 2, 'high': 1}

    Raises:
        ConfigError: an unknown key, a wrong type.
    """
    return _change_fields(config, _flatten_leaves(changes))


def override_fields(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Change fields by dotted path, as ``override`` does, to values of Python.

    >>> override_fields(RunConfig(), {"levels.low": 2, "policy": "static"}).policy
    {'name': 'static'}

    Raises:
        ConfigError: an unknown key, a wrong type; a plug-in that cannot be made from its table.
    """
    return _change_and_check(config, list(values.items()))


def _change_and_check(config: RunConfig, pairs: Sequence[tuple[str, Any]]) -> RunConfig:
    """Change fields. Each plug-in or instrument that has changed is made once, as the run will make
    it, so that a word that it does not know is refused where it is written."""
    changed = _change_fields(config, pairs)
    for field in dict.fromkeys(split_path(path)[0] for path, _ in pairs):
        table = getattr(changed, field)
        if field in PLUG_INS and table is not None:
            find_registry(PLUG_INS[field]).make(table, field)
    for name in dict.fromkeys(name for path, _ in pairs for name in _instruments_in(path, changed)):
        fields = changed.instruments[name]
        find_registry(INSTRUMENTS).make({"name": name, **fields}, f"instruments.{name}")
    return changed


def _instruments_in(path: str, config: RunConfig) -> Iterable[str]:
    """The instruments that a path changes."""
    field, *name = split_path(path)
    return () if field != "instruments" else name[:1] or config.instruments


def _flatten_leaves(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """(a.b.c, value) of a nested table, a plug-in's name before its fields."""
    for key in sorted(table, key=lambda key: key != "name"):
        value, path = table[key], place + (f'"{key}"' if "." in key else key)
        if isinstance(value, Mapping) and value:
            yield from _flatten_leaves(value, f"{path}.")
        else:
            yield path, None if value == "none" else value


def _change_fields(config: RunConfig, pairs: Iterable[tuple[str, Any]]) -> RunConfig:
    """Set each path of (path, value), and check the whole configuration."""
    plain, done = dataclasses.asdict(config), dict[str, list[str]]()
    for path, value in pairs:
        cleared = _set_in_place(plain, path, copy.deepcopy(value))  # later pairs may change it
        parents = split_path(path)[:-1]
        lost = [earlier for earlier, keys in done.items() if cleared and keys[:-1] == parents]
        if lost and split_path(lost[0])[-1] != "name":
            raise ConfigError(
                f"{lost[0]}: set {path} before it: another name has other fields, so what was set "
                "earlier would be lost"
            )
        done[path] = split_path(path)
    return from_dict(RunConfig, without_none(plain))


def split_path(path: str) -> list[str]:
    """Split a path into its keys.

    >>> split_path('policy.layers."blocks.0.out"')
    ['policy', 'layers', 'blocks.0.out']
    """
    return [quoted or bare for quoted, bare in KEYS.findall(path)] or [path]


def _set_in_place(plain: dict[str, Any], path: str, value: Any) -> bool:
    """Change what is at ``a.b.c``, in place; return whether a new name has cleared its table."""
    *parents, key = split_path(path)
    in_plug_in = bool(parents) and parents[0] in PLUG_INS
    table = plain
    for parent in parents:
        if table is plain and parent in OPTIONAL and table[parent] is None:
            table[parent] = {}
        elif table is plain["instruments"] or (in_plug_in and table is not plain):
            # An instrument is switched on, or a table within a plug-in's begins, such as
            # policy.layers: their classes check what is in them.
            table.setdefault(parent, {})
        if not isinstance(table.get(parent), dict):
            if table is plain["levels"] and parent in table:
                raise ConfigError(
                    f"{path} = {value!r}: levels.{parent} = {table[parent]!r} is no table: write "
                    f"levels.{parent} = {{level = {table[parent]}, error_feedback = false}}"
                )
            raise ConfigError(f"unknown key {path!r}: {suggest_nearest(parent, table)}")
        table = table[parent]
    if path in PLUG_INS and isinstance(value, str):
        value = {"name": value}
    renamed = key == "name" and table.get("name") != value
    cleared = renamed and (in_plug_in or (path == "model.name" and ":" in str(value)))
    if cleared:
        table.clear()  # the fields of another class
    table[key] = value
    return cleared


def read_value(text: str) -> Any:
    """Read a value from the command line: TOML; "none" is None; anything else is text.

    >>> [read_value(text) for text in ("4", "1e-3", "true", "[[0, 6]]", "none", "cifar10")]
    [4, 0.001, True, [[0, 6]], None, 'cifar10']
    """
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number with thousands of digits
        return text


def read_tables(path: str | Path) -> dict[str, Any]:
    """Read the content of a TOML file. Non-regular files are refused: reading one could block.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is no TOML.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")
    inputs.add_input(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


@check_arguments()
def load_toml(path: str | Path) -> RunConfig:
    """Reads a configuration file.

    Args:
        path: A TOML file with the keys that differ from their defaults.

    Returns:
        The configuration.

    Raises:
        ConfigError: the file is missing, or has a syntax error, an unknown key, a wrong type, a
            number outside its bounds or fields that do not go together.
    """
    try:
        table = read_tables(path)
        if table.keys() & {"schedules", "include"}:
            raise ConfigError(f"{path} is a grid of schedules: regimes ablate {path} trains it")
        return from_dict(RunConfig, table)
    except FileNotFoundError:
        raise ConfigError(f"cannot read the configuration {path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: no TOML, no UTF-8, or a number with thousands of digits
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None


@check_arguments()
def to_toml(config: RunConfig) -> str:
    """Writes a configuration as TOML. ``load_toml`` reads it back.

    >>> print(to_toml(RunConfig()).partition("\\n")[0])
    name = "run"
    """
    import tomli_w

    return tomli_w.dumps(to_dict(config))
