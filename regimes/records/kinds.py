"""What a value out of JSON may be, and the first thing that is not so. No torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

DEPTH = 16  # tables in tables that are free
BIG, LARGEST = 2**63, sys.float_info.max
MOST = 1e100  # of what is counted or lasts: sums and squares of it stay finite
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
NUMBERS_OR_NULL = {int, float, type(None)}


@dataclass(frozen=True)
class Kind:
    """A value: what it should be, and whether it is."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Fields:
    """A table: keys that it must have, others that it may have, and the kind of further ones; None
    is `FREE`."""

    needed: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)
    further: Any = None

    @cached_property
    def known(self) -> dict[str, Any]:
        return self.others | self.needed


@dataclass(frozen=True)
class Each:
    """A list, or a table, of any length, with values of one kind."""

    of: Any
    container: type = list


@dataclass(frozen=True)
class Maybe:
    """What may be null."""

    kind: Any


def whole(least: int, most: int, says: str) -> Kind:
    """A whole number in a range; true and false are none."""
    return Kind(f"a whole number {says}", lambda x: type(x) is int and least <= x <= most)


def _shallow(value: Any, depth: int = DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_shallow(x, depth - 1) for x in inner)


def _numbers(values: Any) -> bool:
    """Finite, or null? Every row has lists of them: by what runs through a list at once."""
    if type(values) is not list or not set(map(type, values)) <= NUMBERS_OR_NULL:
        return False
    known = [x for x in values if x is not None]
    return not known or (min(known) >= -LARGEST and max(known) <= LARGEST)


def _whys(values: Any) -> bool:
    return type(values) is list and all(
        x is None or (type(x) is dict and _shallow(x)) for x in values
    )


COUNT, STEPS = whole(0, BIG, "from 0 up"), whole(1, BIG, "from 1 up")
WHOLE = whole(-BIG, BIG, "of at most 63 bits")
NUMBER = Kind("a finite number", lambda x: type(x) in (int, float) and -LARGEST <= x <= LARGEST)
AMOUNT = Kind(f"a number from 0 to {MOST}", lambda x: type(x) in (int, float) and 0 <= x <= MOST)
SECONDS = Kind(  # below zero in a few records of version 0.2 and before, where a wait was booked
    f"a number from -{MOST} to {MOST}", lambda x: type(x) in (int, float) and -MOST <= x <= MOST
)
TEXT = Kind("a text", lambda x: type(x) is str)
NAME = Kind(
    "a text of 1 to 1000 letters without control characters",
    lambda x: type(x) is str and 0 < len(x) <= 1000 and not CONTROL.search(x),
)
TRUE_OR_FALSE = Kind("true or false", lambda x: type(x) is bool)
LEVEL = Kind("a number or a text", lambda x: type(x) is str or NUMBER.fits(x))
FREE = Kind(f"at most {DEPTH} tables deep", _shallow)
NUMBERS = Kind("a list of finite numbers or null", _numbers)
AMOUNTS = Kind(
    f"a list of numbers from 0 to {MOST}",
    lambda x: (
        _numbers(x) and None not in x and min(x, default=0) >= 0 and max(x, default=0) <= MOST
    ),
)
TEXTS = Kind("a list of texts", lambda x: type(x) is list and set(map(type, x)) <= {str})
WHYS = Kind("a list of tables or null", _whys)


def fault(value: Any, kind: Any) -> str | None:
    """The first thing that is not as it should be, or None.

    >>> fault({"time": {"end": "noon"}}, Fields({"time": Each(COUNT, dict)}))
    "time.end is 'noon', expected a whole number from 0 up"
    """
    found = _found(value, kind)
    return None if found is None else f"{found[0].lstrip('.') or 'it'} {found[1]}"


def _found(value: Any, kind: Any) -> tuple[str, str] | None:
    """(where, what) of the first fault; the place is only put together where there is one."""
    if isinstance(kind, Kind):
        return None if kind.fits(value) else ("", f"is {value!r:.40}, expected {kind.expected}")
    if isinstance(kind, Maybe):
        return None if value is None else _found(value, kind.kind)
    container: Any = kind.container if isinstance(kind, Each) else dict
    if type(value) is not container:
        return "", f"is {value!r:.40}, expected {'a list' if container is list else 'a table'}"
    known, each = ({}, kind.of) if isinstance(kind, Each) else (kind.known, kind.further or FREE)
    for key, inner in value.items() if container is dict else enumerate(value):
        if found := _found(inner, known.get(key, each)):
            return f".{key!s:.40}{found[0]}", found[1]
    missing = next((key for key in getattr(kind, "needed", ()) if key not in value), None)
    return None if missing is None else (f".{missing}", "is missing")
