"""Committed records replayed: a policy decides today as it did when the run was trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from regimes import policies, records
from regimes.replay import replay

DATA = Path(__file__).parents[3] / "data"
ARCHIVES = sorted(DATA.glob("reference/*.tar.xz"))
MOST = 40_000_000  # bytes; every clone has them


@pytest.mark.slow
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_committed_runs_decide_as_they_did(archive: Path) -> None:
    for record in records.load_all(archive):
        rule = policies.policy(record.config["policy"])
        found = replay.replay(record, rule)
        names = [x["name"] for x in record.header["layers"] if x["compressed"]]
        trained = record.layers[record.layers["layer"].isin(names)]
        assert found["level"].tolist() == trained["level"].tolist(), record.folder
        assert found["why"].tolist() == trained["why"].tolist(), record.folder
        if (table := record.config.get("batch_policy")) is not None:
            batches = [row["batch"] for row in record.rows]
            again = replay.replay_batch(record, policies.policy(table, "batch_policy"))
            assert again["level"].tolist() == [batch["level"] for batch in batches]
            assert again["why"].tolist() == [batch["why"] for batch in batches]


def test_committed_data_stay_small() -> None:
    files = [path for name in ("reference", "published") for path in (DATA / name).rglob("*")]
    sizes = {path.relative_to(DATA).as_posix(): path.stat().st_size for path in files}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    assert sum(sizes.values()) < MOST, f"the largest are {', '.join(largest)}: see data/README.md"
