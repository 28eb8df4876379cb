"""Wrong values at any place of plain data, such as a line of a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_ODD = (None, True, "7", "", -1, 1.5, -1e300, 10**400, [], [[]], {}, {"a": 1}, [1, 2], ["x", -1])
odd = st.sampled_from(_ODD)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain data, as the keys that lead to it."""
    yield at
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, key))


def with_odd(value: Any, at: tuple[Any, ...], other: Any) -> Any:
    """A copy with another value at a place."""
    if not at:
        return other
    copy = value.copy()
    copy[at[0]] = with_odd(value[at[0]], at[1:], other)
    return copy
