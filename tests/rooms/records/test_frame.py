"""All runs in one table (oracle: the runs' own tables, joined by hand)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plain import record as make

import regimes
from analysis.findings.sources import REFERENCE
from regimes.base.errors import ConfigError, RecordError
from regimes.cli.read import frame
from regimes.records.frame import write_frame

ARCHIVE = REFERENCE / "lm-demo.tar.xz"


def test_a_table_has_the_rows_of_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, runs = regimes.frame(ARCHIVE), regimes.load_all(ARCHIVE)
    assert [*table.columns[:2]] == ["schedule", "seed"]
    for run in runs:
        own = table[(table["schedule"] == run.name) & (table["seed"] == run.seed)]
        pd.testing.assert_frame_equal(own[run.epochs.columns].reset_index(drop=True), run.epochs)
    assert len(table) == sum(len(run.rows) for run in runs)
    some = regimes.frame(ARCHIVE, where=["name=low"], layers=True)
    assert {*some["schedule"]} == {"low"}
    assert len(some) == sum(len(run.layers) for run in runs if run.name == "low")
    frame((ARCHIVE,), tmp_path / "all.csv")
    assert f"{len(table)} rows" in capsys.readouterr().out
    read = pd.read_csv(tmp_path / "all.csv")
    close = {"rtol": 1e-15}  # an older pandas reads the last bit otherwise
    np.testing.assert_allclose(read["test_loss"], table["test_loss"], **close)


def test_a_run_that_has_just_begun_changes_no_type_of_a_column(tmp_path: Path) -> None:
    make(tmp_path / "runs/a")
    alone = regimes.frame(tmp_path / "runs")
    header = make(tmp_path / "runs/b", epochs=0) / "run.json"
    header.write_text(header.read_text().replace('"seed": 3', '"seed": 4'))
    pd.testing.assert_frame_equal(regimes.frame(tmp_path / "runs"), alone)
    assert alone["bytes"].dtype == int
    assert [*regimes.frame(tmp_path / "runs/b")] == ["schedule", "seed"]


def test_what_was_logged_as_seed_is_no_seed(tmp_path: Path) -> None:
    file = make(tmp_path / "run") / "epochs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    logged = [r | {"logged": {"seed": 0.5, "schedule": r["epoch"]}} for r in rows]
    file.write_text("".join(json.dumps(r) + "\n" for r in logged))
    table = regimes.frame(tmp_path)
    assert {*table["seed"]} == {3}
    assert {*table["logged_seed"]} == {0.5}
    assert table["logged_schedule"].tolist() == table["epoch"].tolist()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"where": 3}, "where = 3: expected a list, each a text"),
        ({"where": [3]}, r"where = \[3\]: expected a list, each a text"),
        ({"layers": "no"}, "layers = 'no': expected True or False"),
        ({"folder": 3}, "folders = 3: expected a text or a path"),
    ],
)
def test_an_argument_of_a_wrong_type_is_one_sentence(given: dict[str, Any], says: str) -> None:
    """Its result is annotated by a name that is imported for type checkers only."""
    with pytest.raises(RecordError, match=says):
        regimes.frame(given.pop("folder", ARCHIVE), **given)


@pytest.mark.parametrize(("name", "says"), [("all.xls", ".csv or .parquet"), ("a.parquet", "pip")])
def test_what_cannot_be_written_is_refused(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=says):
        write_frame(pd.DataFrame({"a": [1]}), tmp_path / name)
    assert not [*tmp_path.iterdir()]
