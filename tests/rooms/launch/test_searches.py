"""Searches of ``tune`` and ``harm`` decide what they decided when they were stored (oracle: the
stored decisions, which ``python tests/shared/searches.py`` writes anew)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import searches

STORED = json.loads(searches.STORED.read_text())


@pytest.mark.parametrize("name", searches.SEARCHES)
def test_a_search_decides_as_before(name: str, tmp_path: Path) -> None:
    assert searches.decisions(name, tmp_path / "search") == STORED[name]


def test_the_stored_searches_are_these() -> None:
    assert STORED.keys() == searches.SEARCHES.keys()
