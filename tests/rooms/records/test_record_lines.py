"""Row i is epoch i, once, or one sentence names file and line; so it is after a kill anywhere."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from plain import HEADER
from plain import record as make
from plain import rising as row

import regimes
from regimes.base.config import override, to_dict
from regimes.base.errors import RecordError
from regimes.cli.monitor import watch_runs
from regimes.records import RecordWriter, find_edit, kinds, lines, load, load_all, read_lines
from regimes.records.files import append_synced
from regimes.search import sweep
from regimes.training.quirks import resolve_quirks

Lines = list[bytes]
DETAILS = {"curvature": {"top": [1.0]}, "noise": {"scale": 2.0}}
DAMAGE: dict[str, tuple[Callable[[Lines], Lines], int]] = {
    "doubled": (lambda x: [x[0], x[1], x[1], x[2]], 3),
    "the last one doubled": (lambda x: [*x, x[2]], 4),
    "missing": (lambda x: [x[0], x[2]], 2),
    "the first one missing": (lambda x: x[1:], 1),
    "reversed": (lambda x: x[::-1], 1),
    "no whole number": (lambda x: [x[0], x[1].replace(b'"epoch":1', b'"epoch":1.0'), x[2]], 2),
    "a truth value": (lambda x: [x[0], x[1].replace(b'"epoch":1', b'"epoch":true'), x[2]], 2),
    "another file's": (lambda x: [x[0], b'{"event":"start"}', x[2]], 2),
    "no object": (lambda x: [x[0], b"[1,2]", x[2]], 2),
    "no JSON": (lambda x: [x[0], b"{broken", x[2]], 2),
}


def edit(path: Path, change: Callable[[Lines], Lines]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().splitlines())))


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """Also where its last line is still as it was, and where it was."""
    path, other = tmp_path / "some.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"a":1}\n{"b":1}\n')
    growing = lines.Growing(path)
    assert growing.read() == [{"a": 1}, {"b": 1}]
    other.write_text('{"a":2}\n{"b":1}\n{"c":1}\n')
    other.replace(path)
    assert growing.read() == read_lines(path) == [{"a": 2}, {"b": 1}, {"c": 1}]


@pytest.mark.parametrize("name", ["epochs.jsonl", "seconds.jsonl"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_reader_refuses_what_is_doubled_missing_or_out_of_order(
    name: str, damage: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    change, line = DAMAGE[damage]
    edit(folder / name, change)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    why = rf"(it has epoch .*, expected {line - 1}; lines are|no line of a record)"
    sentence = rf"{name} line {line} is damaged: {why}"
    for read in (
        lambda: read_lines(folder / name),
        lambda: load(folder),
        lambda: load_all(tmp_path),
        lambda: RecordWriter.resume(folder, 0),
        lambda: RecordWriter.resume(folder, 1),
        lambda: RecordWriter.resume(folder, 3),
    ):
        with pytest.raises(RecordError, match=sentence):
            read()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    edit(folder / name, lambda _: [])
    RecordWriter.resume(folder, 0).close()  # those that refused hold no lock


def test_instruments_come_in_the_order_of_epochs(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path, HEADER)
    for epoch in range(3):
        writer.epoch(row(epoch), {"compute": 1.0}, DETAILS if epoch != 1 else {})
    writer.close()
    path = tmp_path / "instruments.jsonl"
    assert [d["epoch"] for d in load(tmp_path).details] == [0, 0, 2, 2]
    whole = path.read_bytes()
    for change, line in ((DAMAGE["reversed"][0], 3), (DAMAGE["doubled"][0], 3)):
        edit(path, change)
        with pytest.raises(RecordError, match=rf"instruments\.jsonl line {line} is damaged"):
            load(tmp_path)
        with pytest.raises(RecordError, match=rf"instruments\.jsonl line {line} is damaged"):
            RecordWriter.resume(tmp_path, 3)
        path.write_bytes(whole)


def test_watch_and_ablate_read_by_the_same_rule(tmp_path: Path) -> None:
    short = ["epochs=2", "data.train_size=40", "data.test_size=20", "model.width=2"]
    config = override(regimes.get_preset("smoke"), short)
    regimes.run(config, tmp_path / "run")
    assert sweep.is_finished(tmp_path / "run", config)
    edit(tmp_path / "run/epochs.jsonl", lambda x: [x[0], x[0], x[1]])
    assert "run.json" in {p.name for p in (tmp_path / "run").iterdir()}
    for read in (
        lambda: sweep.is_finished(tmp_path / "run", config),
        lambda: watch_runs(tmp_path / "run", once=True),
        lambda: regimes.run(config, tmp_path / "run", resume=True),
    ):
        with pytest.raises(RecordError, match=r"epochs\.jsonl line 2 is damaged"):
            read()
    assert (
        to_dict(resolve_quirks(config))
        == json.loads((tmp_path / "run/run.json").read_text())["config"]
    )


def test_a_resume_needs_all_that_its_checkpoint_has(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for name in ("epochs.jsonl", "seconds.jsonl"):
        whole = (folder / name).read_bytes()
        edit(folder / name, lambda x: x[:1])
        with pytest.raises(RecordError, match=f"{name} ends before epoch 1, the checkpoint before"):
            RecordWriter.resume(folder, 2)
        (folder / name).write_bytes(whole)
    edit(folder / "seconds.jsonl", lambda x: x[:2])
    with pytest.raises(RecordError, match=r"seconds\.jsonl ends after 2 of 3 epochs"):
        load(folder)


def test_seconds_and_instruments_may_be_one_epoch_ahead(tmp_path: Path) -> None:
    """What a crash before the append to epochs.jsonl leaves; a resume cuts it."""
    writer = RecordWriter.create(tmp_path, HEADER)
    for epoch in range(3):
        writer.epoch(row(epoch), {"compute": 1.0}, DETAILS)
    writer.close()
    edit(tmp_path / "epochs.jsonl", lambda x: x[:2])
    assert load(tmp_path).epochs["seconds_compute"].tolist() == [1, 1]
    RecordWriter.resume(tmp_path, 2).close()
    for name, left in (("seconds.jsonl", [0, 1]), ("instruments.jsonl", [0, 0, 1, 1])):
        assert [r["epoch"] for r in read_lines(tmp_path / name)] == left
    aside = [(r["file"], r["epoch"]) for r in read_lines(tmp_path / "superseded.jsonl")]
    assert aside == [("seconds.jsonl", 2), *[("instruments.jsonl", 2)] * 2]


def test_a_whole_last_line_that_is_none_is_cut_before_the_next(tmp_path: Path) -> None:
    """Readers take it for torn, so the writer does; it must not end up in the middle."""
    folder = make(tmp_path / "run", epochs=2)
    with (folder / "epochs.jsonl").open("ab") as file:
        file.write(b"\0\0\0\0\n")
    assert len(load(folder).rows) == 2
    writer = RecordWriter.resume(folder, 2)
    writer.epoch(row(2), {"compute": 1.0})
    writer.close()
    assert [r["epoch"] for r in load(folder).rows] == [0, 1, 2]


@pytest.mark.parametrize("room", [0, 1, 10, 10_000])
def test_a_line_for_which_there_is_no_room_leaves_nothing(room: int, tmp_path: Path) -> None:
    """Closing a file tries to write once more what could not be written."""
    file, lines = tmp_path / "chain.jsonl", b'{"files":{}}\n' * 900
    append_synced(file, lines)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines) + room, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_synced(file, b"x" * 2 * max(room, 10) + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == lines


# -- killed at every point -------------------------------------------------------------------


class Killed(BaseException):
    """Nothing in the writer expects it, as nothing can expect SIGKILL."""


class Killer:
    """Stands in for the calls that write; ends the life at one of them, before or after it.

    A torn append has lost half of its line.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.at, self.torn = 0, -1, False
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: (self.count(), replace(a, b)))

    def arm(self, at: int, torn: bool) -> None:
        self.calls, self.at, self.torn = 0, at, torn

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Killed

    def fsync(self, file: int) -> None:
        if self.calls + 1 == self.at and self.torn:
            place = Path(f"/proc/self/fd/{file}").resolve()
            content = place.read_bytes()
            start = content[:-1].rfind(b"\n") + 1  # of the line
            os.truncate(place, (start + len(content)) // 2)
        self.count()


def live(folder: Path, saved: list[int]) -> None:
    """Four epochs, a checkpoint after every second one; goes on where ``saved`` says."""
    begun = (folder / "run.json").exists()
    writer = RecordWriter.resume(folder, saved[0]) if begun else RecordWriter.create(folder, HEADER)
    try:
        for epoch in range(saved[0], 4):
            writer.epoch(row(epoch), {"compute": 1.0}, DETAILS)
            saved[0] = epoch + 1 if epoch % 2 else saved[0]
    finally:
        writer.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tears files through /proc")
@pytest.mark.parametrize(
    "torn", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "torn"]
)
def test_killed_at_every_write_twice_it_reads_and_ends_in_the_same_bytes(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    live(tmp_path / "whole", [0])
    kills = 0
    for first in range(1, killer.calls + 1):
        for second in range(1 + first % 3, 26, 3):
            folder, saved = tmp_path / f"{first}-{second}", [0]
            for at in (first, second):
                killer.arm(at, torn)
                try:
                    live(folder, saved)
                except Killed:
                    kills += 1
                    assert find_edit(folder) is None
                if (folder / "run.json").exists():
                    rows = {path.name: read_lines(path) for path in folder.glob("*.jsonl")}
                    assert len(rows.get("epochs.jsonl", [])) >= saved[0]
            killer.arm(-1, torn)
            live(folder, saved)
            for name in ("epochs.jsonl", "seconds.jsonl", "instruments.jsonl"):
                assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
            assert find_edit(folder) is None
            aside = {json.dumps(r) for r in read_lines(folder / "superseded.jsonl")}
            assert all(json.loads(r)["epoch"] < 4 for r in aside)
    assert kills > 300


def test_a_record_of_odd_files_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for, a device read for ever."""
    folder = make(tmp_path / "run")
    for name in ("epochs.jsonl", "run.json"):
        whole = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(RecordError, match=f"{name}.*(no regular file|is damaged)"):
            load(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(whole)
    load(folder)


def test_a_line_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "run") / "epochs.jsonl"
    longest = max(map(len, path.read_bytes().splitlines()))
    monkeypatch.setattr(lines, "LONGEST_LINE", longest)
    assert len(read_lines(path)) == 3
    monkeypatch.setattr(lines, "LONGEST_LINE", longest - 1)
    with pytest.raises(RecordError, match=rf"line \d is too long: {longest} bytes"):
        read_lines(path)


@pytest.mark.parametrize("empty", [[], {}])
def test_free_tables_are_so_deep_at_most(empty: object) -> None:
    value = empty
    for _ in range(kinds.DEPTH):
        assert kinds.FREE.fits(value)
        value = {"within": value} if isinstance(empty, dict) else [value, 1]
    assert not kinds.FREE.fits(value)
