"""The names of parts, presets and grids, and a part from the table that names it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from regimes.base.config.convert import from_dict, without_none
from regimes.base.config.recorded import RECORDED
from regimes.base.errors import ConfigError, RegimesError, suggest_nearest

T = TypeVar("T")


class Registry(dict[str, Any]):
    """Holds the names of one kind of thing: presets, policies, detectors, models, ...

    A name stands for an object, or for ``package.module:Class``, which is imported on demand.

    Attributes:
        recorded: further names, of old records (`RECORDED`): they load as entries do, unlisted.

    Args:
        known: the names that are listed.
        has: attributes that the contract of these parts requires; a user's class may lack them.
        listed: the command that lists the names, if there is one.

    >>> Registry("shape", {"date": "datetime:date"}).find("date")
    <class 'datetime.date'>
    """

    def __init__(
        self,
        kind: str,
        known: Mapping[str, Any] | None = None,
        has: tuple[str, ...] = (),
        listed: str = "",
    ) -> None:
        super().__init__(known or {})
        self.kind, self.has, self.listed = kind, has, listed
        self.recorded = RECORDED.get(kind, {})

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate an object, which is registered under a name."""

        def keep(thing: T) -> T:
            self[name] = thing
            return thing

        return keep

    def unknown(self, name: str) -> ConfigError:
        """Make the error for an unknown name, with the nearest one."""
        return ConfigError(
            f"unknown {self.kind} {name!r}: {suggest_nearest(name, self, self.listed)}"
        )

    def knows(self, name: str) -> bool:
        """Answer whether it is a name, listed or only recorded."""
        return name in self or name in self.recorded

    def find(self, name: str) -> Any:
        """Return the object of a registered name; ConfigError for any other."""
        if name not in self:
            raise self.unknown(name)
        return self.load(name)

    def load(self, name: str) -> Any:
        """Return the object of a name, or of a user's ``package.module:Class``.

        Raises:
            ConfigError: an unknown name, a module or class that cannot be imported.
        """
        target = self.get(name, self.recorded.get(name, name))
        if not isinstance(target, str):
            return target
        if ":" not in target and name not in self:
            raise self.unknown(name)
        return _import_object(self.kind, target)

    def dataclass(self, name: str) -> type:
        """Load a class with the keys of a table as its fields; ConfigError for any other object."""
        cls = self.load(name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            what = f"the {self.kind} {self.get(name, name)!r} is no dataclass"
            raise ConfigError(f"{what}: see the contract it must keep")
        return cls

    def table(self, plug_in: Any) -> dict[str, Any]:
        """Make the table from which `make` makes this plug-in, in plain types: the name of a class,
        or ``package.module:Class``, with its fields; for a class that is no dataclass, with its
        public attributes."""
        kind = type(plug_in)
        known = [*self.items(), *self.recorded.items()]
        names = (name for name, target in known if ":" not in name and _names_class(target, kind))
        if dataclasses.is_dataclass(plug_in):
            fields = [field.name for field in dataclasses.fields(plug_in) if field.init]
        else:
            fields = [key for key in getattr(plug_in, "__dict__", {}) if not key.startswith("_")]
        values = {name: getattr(plug_in, name) for name in fields}
        plain = _to_plain(without_none(values))
        plain.pop("name", None)
        return {"name": next(names, f"{kind.__module__}:{kind.__qualname__}"), **plain}

    def make(self, table: Mapping[str, Any], where: str | None = None) -> Any:
        """Make the plug-in that a configuration table names.

        Args:
            table: ``{"name": ..., field: value, ...}``.
            where: the table's key in the configuration, if that is not the kind's name.

        Raises:
            ConfigError: as `dataclass`; the name is missing, a field is bad, or the class lacks
                what the contract requires.
        """
        where, values = where or self.kind, dict(table)
        name = values.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{where}.name is missing: {suggest_nearest('', self)}")
        try:
            cls = self.dataclass(name)
        except ConfigError as error:
            raise (error if where == self.kind else ConfigError(f"{where}: {error}")) from None
        plug_in: Any = from_dict(cls, values, f"{where}.")
        for part in self.has:
            if not (hasattr(cls, part) or hasattr(plug_in, part)):
                raise ConfigError(f"{where}.name = {name!r} is no {self.kind}: it has no {part}")
        return plug_in


def find_registry(target: str) -> Registry:
    """Import the registry ``package.module:NAME`` of a room above this one, when it is needed."""
    return _import_object("registry", target)


def find_imported(target: str) -> Any:
    """Return the object ``package.module:Class``, if the module has been imported; else None."""
    module, _, attribute = target.partition(":")
    try:
        return operator.attrgetter(attribute)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _import_object(kind: str, target: str) -> Any:
    """The object ``package.module:Class``; ConfigError if it cannot be imported."""
    module, _, attribute = target.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot import the {kind} {target!r}: {error}") from None
    except RegimesError:
        raise
    except Exception as error:  # a package's module may raise anything
        raise ConfigError(f"cannot import the {kind} {target!r}: {error!r}") from error


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """List the names of the arguments without which a function, or a class, cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some builtins nothing is known
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [x.name for x in parameters if x.default is x.empty and x.kind not in several]


def _names_class(target: Any, kind: type) -> bool:
    """Does ``package.module:Class`` name this class? Nothing is imported for the answer."""
    if not isinstance(target, str) or re.split("[:.]", target)[-1] != kind.__name__:
        return False
    return find_imported(target) is kind


def _to_plain(value: Any) -> Any:
    """Nested plain types. Any other value becomes its ``repr``, or the name of its class where the
    ``repr`` holds a memory address: processes compare these tables."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(one) for one in value]
    if type(value).__repr__ is object.__repr__ or callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    return repr(value)
