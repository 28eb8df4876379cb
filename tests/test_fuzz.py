"""A few examples of `fuzz.py`, the same each time."""

from __future__ import annotations

import fuzz
import pytest


@pytest.mark.parametrize(("name", "examples"), [("configurations", 40), ("records", 60)])
def test_whatever_a_stranger_writes_is_one_sentence(name: str, examples: int) -> None:
    before = fuzz.seen.copy()
    fuzz.tried(name, examples, 0)
    grown = fuzz.seen - before
    assert grown[f"{name} fine"] > 0
    assert grown[f"{name} refused"] > examples / 4
