"""The range of each number of a configuration: its annotation declares it, its class checks it."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, ClassVar

from regimes.base.errors import unexpected_value

LARGEST = 1e30  # of a rate or a decay: a step multiplies some of them, and float32 ends at 3e38
LONGEST = 1e9  # seconds, or steps of a period
MOST_EPOCHS = 10_000_000  # far beyond any training: a slip of a digit is refused


@dataclass(frozen=True)
class Bounds:
    """Limits finite numbers, and says how an error describes the limits."""

    text: str
    low: float = -inf  # the least; ``above`` excludes the limit itself
    high: float = inf  # the largest; ``below`` excludes the limit itself
    above: float = -inf
    below: float = inf

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and self.above < number < self.below


class Bounded:
    """Raises ConfigError, when made, for the first field with a number outside the bounds in its
    annotation: a base of dataclasses."""

    bounds_prefix: ClassVar[str] = ""  # of the field in the error, e.g. "policy."

    def __post_init__(self) -> None:
        for name, bounds in _resolve_bounds(type(self)).items():  # type: ignore[arg-type]
            for place, given, number in _list_numbers(name, getattr(self, name)):
                if number not in bounds:
                    raise unexpected_value(f"{self.bounds_prefix}{place}", given, bounds.text)


Count = Annotated[int, Bounds("at least 1", low=1)]
Epochs = Annotated[int, Bounds(f"at least 1, up to {MOST_EPOCHS}", low=1, high=MOST_EPOCHS)]
Period = Annotated[int, Bounds("at least 1", low=1, high=LONGEST)]  # steps
Natural = Annotated[int, Bounds("a number from 0 up", low=0)]
NonNegative = Annotated[float, Bounds("a number from 0 up", low=0)]
Positive = Annotated[float, Bounds("a positive number", above=0)]
Factor = Annotated[float, Bounds("at least 1", low=1)]
Rate = Annotated[float, Bounds(f"a positive number up to {LARGEST:g}", above=0, high=LARGEST)]
Decay = Annotated[float, Bounds(f"a number from 0 to {LARGEST:g}", low=0, high=LARGEST)]
Momentum = Annotated[float, Bounds("from 0 up and below 1", low=0, below=1)]
Share = Annotated[float, Bounds("a share, from 0 to 1", low=0, high=1)]
InnerShare = Annotated[float, Bounds("a share, above 0 and below 1", above=0, below=1)]
SECONDS = f"a positive number of seconds up to {LONGEST:g}"
Timeout = Annotated[float, Bounds(SECONDS, above=0, high=LONGEST)]


@functools.cache
def _resolve_bounds(cls: type) -> dict[str, Bounds]:
    """The bounds in the annotation of each field that has some."""
    hints = _resolve_hints(cls)
    found = {x.name: _find_bounds(hints.get(x.name)) for x in dataclasses.fields(cls)}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def _resolve_hints(cls: type) -> dict[str, Any]:
    """The annotations of a class. Where a user's class has annotations that are imported for type
    checkers only, those of its base."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:
        return _resolve_hints(cls.__mro__[1])


def _find_bounds(hint: Any) -> Bounds | None:
    """The bounds in an annotation, at any depth: ``tuple[Count, ...]``, ``Count | None``."""
    if isinstance(hint, Bounds):
        return hint
    return next(filter(None, map(_find_bounds, typing.get_args(hint))), None)


def _list_numbers(name: str, value: Any) -> Iterator[tuple[str, Any, float]]:
    """(field, value to show, number) of a number, or of all numbers in a list or a table."""
    if isinstance(value, Mapping):
        yield from ((f"{name}.{key}", number, number) for key, number in value.items())
    elif isinstance(value, list | tuple):
        yield from ((name, list(value), number) for number in value)
    elif value is not None and not isinstance(value, str):  # a word in place of a number
        yield name, value, value
