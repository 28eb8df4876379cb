"""Checks of values read from JSON: which values are allowed, and where the first other one is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

DEPTH = 16  # how deep tables and lists of a free value may be nested
BIG = 2**63  # integers of a table have 64 bits
LARGEST = sys.float_info.max
MOST = 1e100  # of counts and durations: sums and squares of them stay finite
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
NUMBERS_OR_NULL = {int, float, type(None)}
SINGLE = {*NUMBERS_OR_NULL, bool, str}  # neither lists nor tables


class ValueKind(NamedTuple):
    """Describes a kind of single value: the test, and how an error describes what was expected."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Object:
    """Describes a table: required and optional keys, and the kind of all others (None is
    `FREE`)."""

    required: dict[str, Any] = field(default_factory=dict)
    optional: dict[str, Any] = field(default_factory=dict)
    extra: Any = None

    @cached_property
    def known(self) -> dict[str, Any]:
        return self.optional | self.required

    @cached_property
    def fits(self) -> Callable[[Any], bool]:
        """Return the test whether a table has no fault. Every row of every file is checked, and
        nearly all are good: the kinds of the keys are looked up once, not at each value."""
        own = {key: _is_of_kind(kind) for key, kind in self.known.items()}.get
        other, required = _is_of_kind(self.extra or FREE), self.required.keys()

        def fits(value: Any) -> bool:
            if type(value) is not dict:
                return False
            for key, inner in value.items():
                if not own(key, other)(inner):
                    return False
            return required <= value.keys()

        return fits


class Items(NamedTuple):
    """Describes a list of values of one kind."""

    of: Any


class Nullable(NamedTuple):
    """Describes a value or null."""

    kind: Any


def integer(least: int, most: int, words: str) -> ValueKind:
    """Make the kind of whole numbers within limits, which ``words`` describe."""
    return ValueKind(f"a whole number {words}", lambda x: type(x) is int and least <= x <= most)


def number(least: float, most: float, words: str) -> ValueKind:
    """Make the kind of numbers within limits, which ``words`` describe."""
    return ValueKind(words, lambda x: type(x) in (int, float) and least <= x <= most)


def _is_of_kind(kind: Any) -> Callable[[Any], bool]:
    """The test whether a value is of a kind."""
    if isinstance(kind, ValueKind | Object):
        return kind.fits
    inner = _is_of_kind(kind[0])
    if isinstance(kind, Nullable):
        return lambda value: value is None or inner(value)
    return lambda value: type(value) is list and all(map(inner, value))


def _shallow(value: Any, depth: int = DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return True
    if depth <= 0:
        return False
    for x in value.values() if isinstance(value, dict) else value:
        if type(x) not in SINGLE and not _shallow(x, depth - 1):
            return False
    return True


def _own_feedback(value: Any) -> bool:
    """Is it a level with error feedback of its own?"""
    if type(value) is not dict or value.keys() != {"level", "error_feedback"}:
        return False
    given = value["error_feedback"]
    return SCALAR.fits(value["level"]) and (type(given) is bool or NUMBER.fits(given))


def _numbers(values: Any, least: float = -LARGEST, most: float = LARGEST) -> bool:
    """Numbers in a range, or null. Every row has many such lists: builtins check one at once."""
    if type(values) is not list or not set(map(type, values)) <= NUMBERS_OR_NULL:
        return False
    known = [x for x in values if x is not None]
    return not known or (min(known) >= least and max(known) <= most)


COUNT, STEPS = integer(0, BIG, "from 0 up"), integer(1, BIG, "from 1 up")
WHOLE = integer(-BIG, BIG, "of at most 63 bits")
NUMBER = number(-LARGEST, LARGEST, "a finite number")
AMOUNT = number(0, MOST, f"a number from 0 to {MOST}")
# Version 0.2 and earlier subtracted waiting times, so that a few of its durations are negative.
SECONDS = number(-MOST, MOST, f"a number from -{MOST} to {MOST}")
TEXT = ValueKind("a text", lambda x: type(x) is str)
NAME = ValueKind(
    "a text of 1 to 1000 letters without control characters",
    lambda x: type(x) is str and 0 < len(x) <= 1000 and not CONTROL.search(x),
)
BOOLEAN = ValueKind("true or false", lambda x: type(x) is bool)
SCALAR = ValueKind("a number or a text", lambda x: type(x) is str or NUMBER.fits(x))
LEVEL = ValueKind(
    "a number or a text, or a table of level and error_feedback",
    lambda x: SCALAR.fits(x) or _own_feedback(x),
)
FREE = ValueKind(f"at most {DEPTH} tables deep", _shallow)
NUMBERS = ValueKind("a list of finite numbers or null", _numbers)
AMOUNTS = ValueKind(
    f"a list of numbers from 0 to {MOST}", lambda x: _numbers(x, 0, MOST) and None not in x
)
TEXTS = ValueKind("a list of texts", lambda x: type(x) is list and set(map(type, x)) <= {str})
TABLES = ValueKind(
    "a list of tables or null",
    lambda x: type(x) is list and {*map(type, x)} <= {dict, type(None)} and _shallow(x, DEPTH + 1),
)


def find_fault(value: Any, kind: Any) -> str | None:
    """Find the first value of another kind, its place and what was expected, in words; None if all
    fit.

    >>> find_fault({"time": {"end": "noon"}}, Object({"time": Object(extra=COUNT)}))
    "time.end is 'noon', expected a whole number from 0 up"
    """
    if _is_of_kind(kind)(value):
        return None
    problem = _first_fault(value, kind)
    return problem and f"{problem[0].lstrip('.') or 'it'} {problem[1]}"


def _first_fault(value: Any, kind: Any) -> Any:
    """(path, problem) or None. The path is only put together where there is a fault."""
    if isinstance(kind, ValueKind):
        return None if kind.fits(value) else ("", f"is {value!r:.40}, expected {kind.expected}")
    if isinstance(kind, Nullable):
        return None if value is None else _first_fault(value, kind.kind)
    is_list = isinstance(kind, Items)
    if type(value) is not (list if is_list else dict):
        return "", f"is {value!r:.40}, expected {'a list' if is_list else 'a table'}"
    known, other = ({}, kind.of) if is_list else (kind.known, kind.extra or FREE)
    for key, inner in enumerate(value) if isinstance(value, list) else value.items():
        if problem := _first_fault(inner, known.get(key, other)):
            return f".{key!s:.40}{problem[0]}", problem[1]
    missing = next((key for key in getattr(kind, "required", ()) if key not in value), None)
    return None if missing is None else (f".{missing}", "is missing")
