"""Searches of ``tune`` and ``harm`` decide what they decided when they were stored (oracles: the
stored decisions, which ``python tests/shared/searches.py`` writes anew; the committed ones)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import searches
from configs import smoke

from regimes.search import tune

STORED = json.loads(searches.STORED.read_text())


@pytest.mark.parametrize("name", searches.SEARCHES)
def test_a_search_decides_as_before(name: str, tmp_path: Path) -> None:
    assert searches.decisions(name, tmp_path / "search") == STORED[name]


def test_the_stored_searches_are_these() -> None:
    assert STORED.keys() == searches.SEARCHES.keys()


COMMITTED = sorted((Path(__file__).parents[3] / "data/reference").glob("*-tune.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_trials_give_the_values_that_were_chosen(path: Path) -> None:
    stored, config = json.loads(path.read_text()), smoke()
    trials: dict[str, list[tune.Trial]] = {}
    for row in stored["trials"]:
        known = tuple(row["scores"]), row["share"], row["failed"]
        trials.setdefault(row["schedule"], []).append(tune.Trial(row["values"], config, *known))
    chosen = tune.Tuned(stored["metric"], trials, tuple(stored["seeds"])).chosen
    assert {cell: trial.label for cell, trial in chosen.items()} == stored["chosen"]
