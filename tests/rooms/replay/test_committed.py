"""Committed records replayed: a policy decides today as it did when the run was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regimes import policies, records
from regimes.policies.replay import replay

DATA = Path(__file__).parents[3] / "data"
ARCHIVES = sorted(DATA.glob("reference/*.tar.xz"))
MOST = 40_000_000  # bytes; every clone has them


@pytest.mark.slow
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_committed_runs_decide_as_they_did(archive: Path) -> None:
    with records.unpack_records(archive) as root:
        for folder in records.find_runs(root):
            record, parts = records.load(folder), records.list_phases(folder)
            stops = [*(first for first, _ in parts[1:]), len(record.rows)]
            for (first, config), stop in zip(parts, stops, strict=True):
                check_decisions(record, config, slice(first, stop))


def check_decisions(record: records.Record, config: Mapping[str, Any], units: slice) -> None:
    """The units of one configuration, a branch's or its trunk's, whose policy is replayed from the
    start as if it had decided everything."""
    found = replay.replay_rule(record, policies.make_policy(config["policy"]))
    names = [x["name"] for x in record.header["layers"] if x["compressed"]]
    trained = record.layers[record.layers["layer"].isin(names)]
    places = slice(units.start * len(names), units.stop * len(names))
    for column in ("level", "why"):
        same = found[column].tolist()[places] == trained[column].tolist()[places]
        assert same, (record.folder, units, column)
    if (table := config.get("batch_policy")) is not None:
        batches = [row["batch"] for row in record.rows[units]]
        again = replay.replay_batch(record, policies.make_policy(table, "batch_policy"))
        for column in ("level", "why"):
            assert again[column].tolist()[units] == [batch[column] for batch in batches]


def test_committed_data_stay_small() -> None:
    files = (DATA / "reference").rglob("*")
    sizes = {path.relative_to(DATA).as_posix(): path.stat().st_size for path in files}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    assert sum(sizes.values()) < MOST, f"the largest are {', '.join(largest)}: see data/README.md"
