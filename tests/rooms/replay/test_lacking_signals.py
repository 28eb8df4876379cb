"""Which run an error blames where runs lack signals (oracle: the statistics of their rows)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from regimes.base.errors import RecordError
from regimes.policies.replay import detect
from regimes.records import Record, load

KINDS = ((), ("norm",), ("eigenvalue",), ("norm", "eigenvalue"))


def with_signals(run: Record, kept: tuple[str, ...], name: str) -> Record:
    """The run with no other of both signals in its rows, as of that name."""
    rows = []
    for row in run.rows:
        statistics = {k: v for k, v in row["statistics"].items() if "norm" in kept}
        rows.append(row | {"statistics": statistics, "model": {}})
        if "eigenvalue" in kept:
            rows[-1]["model"] = {"eigenvalue": 1.0 + row["epoch"]}
    header = run.header | {"config": run.config | {"name": name}}
    return replace(run, rows=rows, folder=Path(name), header=header)


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=3)])
def test_a_run_without_a_signal_is_named(kinds: tuple[tuple[str, ...], ...], run: Record) -> None:
    runs = [with_signals(run, kind, f"run-{i}") for i, kind in enumerate(kinds)]
    shared = set.intersection(*map(set, kinds))
    if shared:
        texts = detect.default_rules(runs)
        assert any("norm" in text for text in texts) == ("norm" in shared)
        assert ("eigenvalue-change" in texts) == ("eigenvalue" in shared)
        return
    with pytest.raises(RecordError) as error:
        detect.default_rules(runs)
    said = str(error.value)
    without = [i for i, kind in enumerate(kinds) if not kind]
    if not without:
        assert "no detector's signal is in all runs" in said
        assert sum(f"run-{i} " in said for i in range(3)) == 2
        return
    assert said.startswith(f"run-{without[0]} recorded no signal")
    if len(without) < 3:
        usable = next(i for i, kind in enumerate(kinds) if kind)
        assert said.endswith(f"name the runs that have one, e.g. run-{usable}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return load(synthetic.make(tmp_path_factory.mktemp("runs"), "low", 0))
