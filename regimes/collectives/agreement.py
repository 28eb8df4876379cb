"""Compares facts that must be the same on all processes, and names those that differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAMED = 3  # differences in a sentence; the others are counted
LONGEST = 60  # letters of a value in a sentence


def digest(facts: Any) -> str:
    """SHA-256 of nested plain types."""
    return hashlib.sha256(_text(facts).encode()).hexdigest()


def difference(everyone: Sequence[Any]) -> str | None:
    """How the first process that differs from process 0 does; None if all are the same.

    Args:
        everyone: nested plain types, by rank.

    >>> difference([{"seed": 0, "levels": {"low": 4}}, {"seed": 1, "levels": {"low": 4}}])
    'process 1 has seed = 1, process 0 has seed = 0'
    """
    first = dict(_leaves(everyone[0]))
    for rank, facts in enumerate(everyone):
        other = dict(_leaves(facts))
        names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        if names:
            more = len(names) - NAMED
            verb = "s" if more == 1 else ""
            rest = f"; and {more} other{'s' * (more > 1)} differ{verb}" if more > 0 else ""
            return (
                f"process {rank} has {_words(other, names[:NAMED])}, "
                f"process 0 has {_words(first, names[:NAMED])}{rest}"
            )
    return None


def _words(leaves: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(_word(name, leaves.get(name)) for name in names)


def _word(name: str, value: str | None) -> str:
    if value is None:
        return f"no {name}"
    text = repr(json.loads(value))
    return f"{name} = {text if len(text) <= LONGEST else f'{text[:LONGEST]}...'}"


def _leaves(facts: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every single value as JSON (in which NaN is equal to itself), by its place."""
    if isinstance(facts, Mapping) and facts:
        pairs = [(str(key), value) for key, value in facts.items()]
    elif isinstance(facts, list | tuple) and facts:
        pairs = [(str(i), value) for i, value in enumerate(facts)]
    else:
        yield name, _text(facts)
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else key)


def _text(facts: Any) -> str:
    return json.dumps(facts, sort_keys=True)
