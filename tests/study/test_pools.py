"""Blocks of seeds pooled, or refused with a reason (oracles: scipy on the committed records, and
records that differ in one thing)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic import make

from analysis.findings import pools
from analysis.findings.effects import minus
from regimes.base.errors import RecordError
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def records(source: str, *names: str) -> list[Record]:
    found = load_all(REFERENCE / f"{source}.tar.xz")
    return [run for run in found if not names or run.name in names]


@pytest.mark.slow
def test_blocks_of_one_code_are_one() -> None:
    blocks = {name: records(name) for name in ("smoke-long", "smoke-long-controls")}
    runs = pools.pool(blocks, ("low", "accordion"))
    assert len(runs) == 2 * 16
    found = minus("accordion", "low")(runs)
    ends = stats.t.interval(0.95, 15, np.mean(found), stats.sem(found))
    assert [round(x, 1) for x in (np.mean(found), *ends)] == [-1.5, -2.7, -0.2]


def test_codes_are_equal_within_one_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = (frozenset(("a" * 12, "b" * 12)), frozenset(("c" * 12, "d" * 12)))
    monkeypatch.setattr(pools, "BIT_EQUAL", declared)
    assert pools.same_code(["a" * 64, "b" * 64])
    assert pools.same_code(["d" * 64, "c" * 64])
    assert pools.same_code(["e" * 64, "e" * 64])
    assert not pools.same_code(["a" * 64, "c" * 64])
    assert not pools.same_code(["a" * 64, "e" * 64])


@pytest.mark.slow
def test_a_block_of_unknown_code_is_refused() -> None:
    blocks = {name: records(name) for name in ("small", "small-controls")}
    why = r"low of seed \d+ was run by code 555ad41a92c8 and e8150785b942, which are not known"
    with pytest.raises(RecordError, match=f"small and small-controls cannot be pooled: {why}"):
        pools.pool(blocks, ("low",))


@pytest.mark.slow
def test_declared_codes_trained_the_same_in_the_records_too() -> None:
    """Two of them have runs of one configuration and seed: their epochs are equal, line by line."""
    ours, theirs = (
        {(run.name, run.seed): run for run in records(source, "low", "high")}
        for source in ("small-adaqs", "small-budget")
    )
    pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    codes = [[str(run.header["code"]["digest"]) for run in pair] for pair in pairs]
    assert sum(a != b for a, b in codes) > 0
    for (a, b), digests in zip(pairs, codes, strict=True):
        if pools.same_code(digests):
            assert [row["statistics"] for row in a.rows] == [row["statistics"] for row in b.rows]


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("config", "workers"), 3, "has another workers"),
        (("config", "optimizer", "lr"), 9.0, "has another optimizer"),
        (("data", "digest"), "x", "has another data.digest"),
        (("code", "digest"), "x" * 64, "which are not known to train the same"),
        (("config", "seed"), 0, "more than one has low of seed 0, which would count twice"),
    ],
    ids=str,
)
def test_what_is_another_experiment_is_refused(
    tmp_path: Path, place: tuple[str, ...], value: Any, why: str
) -> None:
    make(tmp_path / "a", "low", 0)
    folder = make(tmp_path / "b", "low", 1)
    for each in (tmp_path / "a").rglob("run.json"), [folder / "run.json"]:
        for path in each:
            header = json.loads(path.read_text())
            header |= {"code": {"digest": "y" * 64}, "data": {"digest": "z"}}
            path.write_text(json.dumps(header))
    blocks = {name: load_all(tmp_path / name) for name in "ab"}
    assert len(pools.pool(blocks, ("low",))) == 2
    header = json.loads((folder / "run.json").read_text())
    table = header
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    (folder / "run.json").write_text(json.dumps(header))
    with pytest.raises(RecordError, match=f"a and b cannot be pooled: .*{why}"):
        pools.pool({name: load_all(tmp_path / name) for name in "ab"}, ("low",))
