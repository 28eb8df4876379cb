"""Records: what was written is read, whatever happened in between."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plain import HEADER, header
from plain import record as make
from plain import rising as row

from regimes.base.errors import ConfigError, RecordError
from regimes.cli.machine import judge_record
from regimes.records import (
    RecordWriter,
    find_runs,
    is_complete,
    load,
    load_all,
    pack_records,
    provenance,
    read_lines,
    summary,
    unpack_records,
)
from regimes.records.reader import layers_table


def test_round_trip(tmp_path: Path) -> None:
    record = load(make(tmp_path / "run"))
    assert (record.name, record.seed, record.finished) == ("low", 3, True)
    assert record.epochs["total_floats"].tolist() == [10, 20, 30]
    assert record.epochs["seconds_compute"].tolist() == [1, 1, 1]
    assert record.layers[record.statistic].tolist() == [1.5, 2.5, 3.5]
    assert record.layers["why"].tolist()[0] == {"rule": "start"}


def test_who_was_present_is_read(tmp_path: Path) -> None:
    """Up to version 0.4 workers of a simulated run could be absent."""
    record = load(make(tmp_path / "run"))
    steps = record.rows[0]["steps"]
    rows = [{**row, "churn": {"present": 4, "worker_steps": 3 * steps}} for row in record.rows]
    path = tmp_path / "run/epochs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path / "run").epochs["present"].tolist() == [3.0] * 3


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_is_no_line(tmp_path: Path, cut: int) -> None:
    folder = make(tmp_path / "run")
    path = folder / "epochs.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    record = load(folder)
    assert len(record.epochs) == 2
    assert not record.finished
    writer = RecordWriter.resume(folder, 2)
    writer.epoch(row(2), {"compute": 1.0})
    writer.close()
    assert path.read_bytes() == whole


def test_a_crash_at_any_byte_leaves_a_readable_record(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    path = folder / "epochs.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert len(read_lines(path)) == whole[:length].count(b"\n")


def test_resume_sets_later_lines_aside_and_loses_none(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    RecordWriter.resume(folder, 1).close()
    assert [r["epoch"] for r in read_lines(folder / "epochs.jsonl")] == [0]
    aside = read_lines(folder / "superseded.jsonl")
    assert [r["epoch"] for r in aside if r["file"] == "epochs.jsonl"] == [1, 2]


def test_one_folder_one_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    with pytest.raises(RecordError, match="already holds a run: continue it with --resume"):
        RecordWriter.create(folder, HEADER)
    first = RecordWriter.resume(folder, 3)
    with pytest.raises(RecordError, match="another run is writing"):
        RecordWriter.resume(folder, 3)
    first.close()
    RecordWriter.resume(folder, 3).close()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write to"):
        RecordWriter.create(tmp_path / "file" / "run", HEADER)
    with pytest.raises(RecordError, match="holds no run to resume"):
        RecordWriter.resume(tmp_path, 0)
    with pytest.raises(RecordError, match="holds no run"):
        load(tmp_path)
    with pytest.raises(RecordError, match="no run in or under"):
        load_all(tmp_path)
    with pytest.raises(RecordError, match=r"under .*absent, which does not exist"):
        load_all(tmp_path / "absent")
    (tmp_path / "epochs.jsonl").mkdir()
    with pytest.raises(RecordError, match=r"cannot read .*epochs\.jsonl"):
        read_lines(tmp_path / "epochs.jsonl")
    with pytest.raises(RecordError, match="no run in or under"):
        pack_records(tmp_path, tmp_path / "a.tar.xz")
    make(tmp_path / "run")
    with pytest.raises(RecordError, match=r"cannot write .*: File exists"):
        pack_records(tmp_path, tmp_path / "run/run.json/a.tar.xz")


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**header, "schema": 99}))
    with pytest.raises(RecordError, match="schema 99"):
        load(folder)
    for text in ("{", '{"schema": "x"}', "[]", "3"):
        (folder / "run.json").write_text(text)
        with pytest.raises(RecordError, match="is damaged"):
            load(folder)


def test_an_archive_is_as_good_as_the_folder(tmp_path: Path) -> None:
    make(tmp_path / "runs/low/seed-3")
    (tmp_path / "runs/low/seed-3/checkpoints").mkdir()
    assert pack_records(tmp_path / "runs", tmp_path / "a.tar.xz") == 1
    assert pack_records(tmp_path / "runs", tmp_path / "b.tar.xz") == 1
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()
    packed, plain = load_all(tmp_path / "a.tar.xz"), load_all(tmp_path / "runs")
    assert packed[0].epochs.equals(plain[0].epochs)
    assert packed[0].header == plain[0].header
    (tmp_path / "a.tar.xz").write_bytes((tmp_path / "b.tar.xz").read_bytes()[:400])
    with pytest.raises(RecordError, match="is no archive of records"):
        load_all(tmp_path / "a.tar.xz")


@pytest.mark.parametrize(("budget", "done"), [(29.0, True), (30.0, True), (30.5, False)])
def test_a_budget_is_spent_when_it_is_reached(budget: float, done: bool) -> None:
    header = {"config": {"epochs": 9}, "budget": budget}
    assert is_complete(header, [row(epoch) for epoch in range(3)]) == done


def test_runs_behind_links_are_found_once(tmp_path: Path) -> None:
    """A link to a run elsewhere, two ways to one folder, and a link into a folder above."""
    make(tmp_path / "elsewhere" / "a")
    make(tmp_path / "here" / "b")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "here" / "again").symlink_to(tmp_path / "here" / "b")
    (tmp_path / "here" / "b" / "up").symlink_to(tmp_path / "here")
    for start in ("here", "here/b"):  # the second is reached again by its own link
        assert [path.name for path in find_runs(tmp_path / start)] == ["b", "link"]


def test_summary_needs_finished_runs(tmp_path: Path) -> None:
    make(tmp_path / "a")
    assert find_runs(tmp_path) == [tmp_path / "a"]
    table = summary(load_all(tmp_path))
    assert table["metric"].tolist() == [pytest.approx(0.6)]
    assert table["floats"].tolist() == [30]
    for last in (0, -1):
        with pytest.raises(ConfigError, match="expected a number of epochs from 1 up"):
            summary(load_all(tmp_path), last=last)
    make(tmp_path / "b", epochs=2)
    with pytest.raises(RecordError, match="epochs: finish it"):
        summary(load_all(tmp_path / "b"))


NAN = float("nan")


@pytest.mark.parametrize(
    ("every", "metrics", "mean"),
    [
        (1, [0.1, 0.2, 0.3, 0.4], 0.3),
        (1, [0.1, NAN, 0.3, 0.4], NAN),
        (1, [0.1, 0.2, 0.3, NAN], NAN),
        (1, [NAN, 0.2, 0.3, 0.4], 0.3),
        (2, [None, 0.2, None, 0.4, 0.6], 0.5),  # the last unit is always tested
        (2, [None, 0.2, None, 0.4], 0.3),
        (4, [None, None, None, 0.2, None, None, None, 0.4], 0.4),  # 0.2 is of another third
        (4, [None, None, None, NAN, None, None, None, 0.4], 0.4),
        (2, [None, 0.2, None, 0.4, NAN], NAN),
        (3, [None, None, 0.2, None], NAN),
    ],
)
def test_what_was_not_tested_is_left_out_and_what_was_not_finite_is_not(
    every: int, metrics: list[float | None], mean: float, tmp_path: Path
) -> None:
    """Both are null in the file. The oracle is the list of what was measured."""
    config = {"epochs": len(metrics), "evaluate_every": every}
    writer = RecordWriter.create(tmp_path, header(config))
    for epoch, metric in enumerate(metrics):
        writer.epoch(row(epoch) | {"metric": metric}, {"compute": 1.0})
    writer.close()
    assert summary(load_all(tmp_path))["metric"].item() == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("name", ["epochs.jsonl", "seconds.jsonl", "events.jsonl"])
def test_a_file_of_one_torn_line_can_be_continued(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run", epochs=1)
    (folder / name).write_bytes((folder / name).read_bytes()[:20])
    writer = RecordWriter.resume(folder, 0)
    writer.epoch(row(0), {"compute": 1.0})
    writer.close()
    assert len(load(folder).epochs) == 1
    assert read_lines(folder / "events.jsonl")[-1]["event"] == "resume"


@pytest.mark.parametrize("edit", [b"", b"\n", b'{"files":{}}\n'])
def test_a_chain_that_was_emptied_is_an_edit(edit: bytes, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert judge_record(folder)[0] == "broken off"  # without its last event
    (folder / "chain.jsonl").write_bytes(edit)
    assert judge_record(folder)[0] in ("edited", "unreadable")
    pack_records(tmp_path, tmp_path / "a.tar.xz")
    with unpack_records(tmp_path / "a.tar.xz") as root:
        assert judge_record(root / "run")[0] in ("edited", "unreadable")


@pytest.mark.parametrize("depth", [101, 3000])
def test_an_archive_of_deep_folders_is_one_sentence(depth: int, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "deep.tar.xz", "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("/".join(["d"] * depth) + "/run.json"), io.BytesIO())
    with pytest.raises(RecordError, match="folders in more than 100 others"):
        load_all(tmp_path / "deep.tar.xz")


def test_a_statistic_of_some_epochs_only_is_missing_in_the_others() -> None:
    rows = [
        {"epoch": 0, "layers": {"level": ["low", None]}, "statistics": {"norm": [1.0, None]}},
        {"epoch": 1, "layers": {"level": ["high", None]}, "statistics": {"trace": [2.0, 3.0]}},
    ]
    found = layers_table(["a", "b"], rows)
    assert list(found) == ["layer", "level", "norm", "epoch", "trace"]
    assert found["epoch"].to_list() == [0, 0, 1, 1]
    assert found["norm"].dtype == found["trace"].dtype == float
    assert found["norm"].fillna(-1).to_list() == [1, -1, -1, -1]
    assert found["trace"].fillna(-1).to_list() == [-1, -1, 2, 3]
    assert found["level"].isna().to_list() == [False, True, False, True]


def test_a_statistic_that_was_never_finite_is_a_column_of_nan(tmp_path: Path) -> None:
    """As one that was in some epochs; pandas would take null alone for objects."""
    nulls = {
        "model": {"noise": None},
        "validation": {"accuracy": None},
        "group_lr": [0.1, None],
        "logged": {"grad": None},
        "statistics": {"trace": [None]},
    }
    rows = [row(epoch) | nulls for epoch in range(2)]
    run = replace(load(make(tmp_path / "run")), rows=rows)
    for name in ("noise", "validation_accuracy", "lr_1", "grad"):
        found = run.column(name)
        assert found is not None
        assert np.isnan(found).tolist() == [True, True]
    trace = layers_table(["a"], rows)["trace"]
    assert np.isnan(trace.to_numpy()).tolist() == [True, True]


def test_bytes_of_a_command_line_that_are_no_letters_are_spelt_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/regimes", "run", "é", "caf\udce9"])
    assert provenance.describe_machine()["command"] == r"regimes run é caf\udce9"
