"""The names of plug-ins, and a plug-in from its table: a registered name or
``package.module:Class``, and the fields of that dataclass."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from regimes.config.convert import from_dict
from regimes.errors import ConfigError, nearest

T = TypeVar("T")


def plug_in(
    kind: str, table: Mapping[str, Any], registry: Mapping[str, str], where: str | None = None
) -> Any:
    """Make the plug-in that a configuration table names.

    Args:
        kind: "compressor" or "policy", for messages.
        table: ``{"name": ..., field: value, ...}``.
        registry: short name -> ``package.module:Class``.
        where: the table's place in the configuration, if that is not ``kind``.

    Raises:
        ConfigError: an unknown name, a module or class that cannot be imported, bad fields.
    """
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name is missing: {nearest('', registry)}")
    target = registry.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, registry)}")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot import the {kind} {target!r}: {error}") from None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"the {kind} {target!r} is no dataclass: see the contract it must keep")
    return from_dict(cls, values, f"{where or kind}.")


class Registry(dict[str, Any]):
    """The names of one kind of thing: presets, policies, detectors, ...

    A name stands for an object, or for ``package.module:Class`` (imported when it is asked for).
    """

    def __init__(self, kind: str, known: Mapping[str, Any] | None = None) -> None:
        super().__init__(known or {})
        self.kind = kind

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator: what follows is known by this name."""

        def keep(thing: T) -> T:
            self[name] = thing
            return thing

        return keep

    def find(self, name: str) -> Any:
        """What a name stands for, or ConfigError with the nearest name."""
        if name not in self:
            raise ConfigError(f"unknown {self.kind} {name!r}: {nearest(name, self)}")
        return self[name]

    def make(self, table: Mapping[str, Any], where: str | None = None) -> Any:
        """The plug-in that a configuration table names: see ``plug_in``."""
        return plug_in(self.kind, table, self, where)
