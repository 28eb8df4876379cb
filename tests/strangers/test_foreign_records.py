"""A record is a stranger's file: what the schema does not allow is one sentence, for every reader,
and what was edited is told from what is whole."""

from __future__ import annotations

import fcntl
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain
import pytest
from plain import record as make

from regimes import policies
from regimes.base.errors import ConfigError, RecordError
from regimes.cli.machine import check_records, judge_record
from regimes.cli.monitor import watch_runs
from regimes.cost.network import Network
from regimes.cost.predict import main as cost
from regimes.data.tree import unpack_images
from regimes.policies.replay import detect
from regimes.records import (
    RecordWriter,
    archive,
    find_edit,
    load,
    load_all,
    pack_records,
    read_lines,
)
from regimes.records.files import in_use

Change = Callable[[dict[str, Any]], object]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def put(*path: str | int, value: Any) -> Change:
    """A change of one value, named by its path."""

    def change(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return change


LAYER = {"name": "a", "shape": [], "compressed": True}
DAMAGED: list[tuple[str, Change, str]] = [  # the kinds of values: `test_any_record`
    (
        "run.json",
        put("config", "epochs", value=10**9),
        "config.epochs is 1000000000, exp",
    ),
    ("run.json", put("units", value=1e9), "units is 1000000000.0"),
    ("run.json", put("config", "workers", value=0), "config.workers is 0, expected a whole number"),
    (
        "run.json",
        put("config", "name", value="a\nb"),
        "config.name is 'a\\\\nb', expected a",
    ),
    (
        "run.json",
        put("config", "name", value="x" * 1001),
        "config.name is .*, expected a text",
    ),
    ("run.json", put("config", "compressor", "deep", value=deep(20)), "compressor.deep is .*, exp"),
    ("run.json", put("config", "dtype", value="int8"), "config.dtype is 'int8', expected float32"),
    ("run.json", put("world", "processes", value=3), "4 workers are not shared by 3 processes"),
    ("run.json", put("layers", 0, "shape", value=[2, -2]), "layers.0.shape.1 is -2"),
    ("run.json", put("layers", value=[LAYER] * 2), "have one name"),
    ("run.json", put("per_step", "low", "layers", value=[1, 2]), "no cost for each of 1 layers"),
    *(
        ("epochs.jsonl", change, f"line 2 is damaged: .*{said}")
        for change, said in (
            (put("floats", value=-1), "floats is -1, expected a number from 0 to 1e.100"),
            (put("floats", value=1.7e308), "floats is 1.7e.308, expected a number from 0 to"),
            (put("floats", value=None), "floats is None"),
            (put("layers", "bytes", value=[1e200]), "layers.bytes is .1e.200., expected a list"),
            (put("layers", "floats", value=[None]), "layers.floats is .None., expected a list"),
            (put("steps", value=-1), "steps is -1, expected a whole number from 0 up"),
            (put("steps", value=10**30), "steps is 1000000000000000000000000000000, expected"),
            (put("layers", "level", value=["low", "low"]), "layers.level has no 1 layers"),
            (put("layers", "more", value=[1, 2]), "layers.more has no 1 layers"),
            (put("statistics", "norm:update", value=[1.0, 2.0]), "norm:update has no 1 layers"),
            (put("further", value=deep(20)), "further is .*, expected at most 16 tables deep"),
        )
    ),
]


def edit_header(folder: Path, change: Change) -> None:
    header = json.loads((folder / "run.json").read_text())
    change(header)
    (folder / "run.json").write_text(json.dumps(header))


def edit_row(folder: Path, change: Change, name: str = "epochs.jsonl", at: int = 1) -> None:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    change(rows[at])
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("name", "change", "said"), DAMAGED)
def test_a_record_is_as_the_schema_has_it(
    name: str, change: Change, said: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run")
    edit_header(folder, change) if name == "run.json" else edit_row(folder, change)
    for read in (load, lambda place: watch_runs(place, once=True)):
        with pytest.raises(RecordError, match=rf"run/{name} .*{said}"):
            read(folder)
    assert judge_record(folder)[0] == "unreadable"


def test_a_wait_booked_below_zero_is_read(tmp_path: Path) -> None:
    """As runs of version 0.2 and before have left them now and then."""
    folder = make(tmp_path / "run")
    edit_row(folder, put("compute", value=-0.0075), "seconds.jsonl", at=0)
    assert load(folder).epochs["seconds_compute"][0] == -0.0075


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seconds.jsonl", put("compute", value="long")),
        ("seconds.jsonl", put("compute", value=-1e300)),
        ("events.jsonl", lambda row: row.pop("time")),
        ("events.jsonl", put("why", value=7)),
        ("chain.jsonl", put("files", "run.json", value=7)),
    ],
)
def test_the_other_files_too(name: str, change: Change, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    edit_row(folder, change, name, at=0)
    with pytest.raises(RecordError, match=rf"{name} line 1 is damaged: .*(expected|missing)"):
        read_lines(folder / name)


def test_what_only_json_could_break(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    path = folder / "epochs.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    for line in ("[" * 100_000, '{"epoch":1,"x":"\\ud800"}', '{"epoch":' + "1" * 5000 + "}"):
        path.write_text(first + line + "\n" + others[1])
        with pytest.raises(RecordError, match=r"epochs\.jsonl line 2 is damaged: no line of a rec"):
            load(folder)
    path.write_text(first + others[0].replace('"metric":0.6', '"metric":1e400') + others[1])
    with pytest.raises(RecordError, match="line 2 is damaged: metric is inf, expected a finite"):
        load(folder)
    path.write_text(first + others[0].replace('"metric":0.6', '"metric":NaN') + others[1])
    assert load(folder).rows[1]["metric"] is None
    (folder / "run.json").write_text('{"a":' * 100_000)
    with pytest.raises(RecordError, match=r"run\.json is damaged: not a run's header"):
        load(folder)


def test_no_file_is_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "run")
    pack_records(tmp_path, tmp_path / "a.tar.xz")
    whole = sum(path.stat().st_size for path in [folder / "run.json", *folder.glob("*.jsonl")])
    monkeypatch.setattr(archive, "LARGEST_ARCHIVE", whole)
    assert len(load_all(tmp_path / "a.tar.xz")) == 1
    with (folder / "epochs.jsonl").open("ab") as file:
        file.truncate(2**40)  # takes no place on the disk
    with pytest.raises(RecordError, match=r"epochs\.jsonl is too large: 1099511627776 bytes"):
        load(folder)
    monkeypatch.setattr(archive, "LARGEST_ARCHIVE", 1000)
    with pytest.raises(RecordError, match=r"a\.tar\.xz is too large: more than 1000 bytes"):
        load_all(tmp_path / "a.tar.xz")


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    edit_header(folder, put("config", "epochs", value=9))
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    assert not in_use(folder)
    watch_runs(folder, once=True)


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (os.mkfifo, "it is a pipe"),
        (os.mkdir, "it is a folder"),
        (lambda path: path.symlink_to("/nowhere"), "it is a symbolic link"),
        (lambda path: path.symlink_to(__file__), "it is a symbolic link"),
    ],
    ids=["pipe", "folder", "dangling link", "link to a file of somebody's"],
)
def test_only_regular_files_of_the_record_are_packed(
    plant: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    """A link out of a stranger's record would put a file of the user's into the archive."""
    folder = make(tmp_path / "run")
    plant(folder / "more.jsonl")
    with pytest.raises(RecordError, match=rf"cannot pack .*more\.jsonl: {sentence}"):
        pack_records(folder, tmp_path / "a.tar.xz")
    assert not (tmp_path / "a.tar.xz").exists()


def named(name: str, size: int, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("read", [load_all, lambda place: unpack_images(place).__enter__()])
def test_a_name_is_not_larger_than_memory(
    read: Callable[[Path], object], kind: bytes, tmp_path: Path
) -> None:
    """Before a member may stand pages of text about it, which are read whole."""
    content = named("x", 2**32, kind).tobuf() + b"0" * 1024
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(
        (RecordError, tarfile.TarError), match=r"header of a member has 4294967296 bytes"
    ):
        read(tmp_path / "a.tar")


def test_no_text_of_a_stranger_moves_the_cursor(tmp_path: Path, command: Callable) -> None:
    evil = "\x1b[2J\x1b]0;x\x07\x9b1m"
    folder = make(tmp_path / "runs" / f"a{evil}")
    edit_header(folder, put("config", "epochs", value=9))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": "now", "event": "stopped", "why": f"so{evil}"}) + "\n")
    broken = make(tmp_path / "runs" / f"b{evil}")
    (broken / "run.json").write_text("{}")
    for words in (
        ["watch", "--once", "runs"],
        ["watch", "--once", str(folder)],
        ["doctor", "runs"],
        ["watch", "--once", str(broken)],
        ["detect", str(broken)],
    ):
        done = command(*words)
        said = done.stdout + done.stderr
        assert not set(said) & {"\x1b", "\x07", "\x9b"}, words
    assert "a\\x1b[2J" in command("doctor", "runs").stdout


def test_a_writer_writes_what_can_be_read(tmp_path: Path) -> None:
    for config in ({"epochs": 10**8}, {"name": "a\x1bb"}, {"policy": {"name": "x", "eta": 1e999}}):
        with pytest.raises(RecordError, match=r"cannot write .*run\.json: "):
            RecordWriter.create(tmp_path / "run", plain.header(config))
        assert not (tmp_path / "run" / "run.json").exists()
    with pytest.raises(ConfigError, match=r"policy.eta = inf: expected a finite number"):
        policies.REGISTRY.make({"name": "accordion", "eta": float("inf")})
    writer = RecordWriter.create(tmp_path / "run", plain.header())
    for epoch in range(3):
        writer.epoch(plain.row(epoch, test_loss=float("inf"), metric=float("nan")), {"compute": 1})
    writer.close()
    run = load(tmp_path / "run")
    assert b"null" in (tmp_path / "run/epochs.jsonl").read_bytes()
    assert run.epochs["test_loss"].isna().all()
    watch_runs(tmp_path / "run", once=True)


def test_a_record_without_an_epoch_does_not_occupy_its_folder(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path, plain.header({"name": "first"}))
    writer.event("stopped", why="the policy needs what nobody measures")
    writer.close()
    (tmp_path / "seconds.jsonl").write_text('{"epoch":0,"compute":1.0}\n')  # a crash before its row
    folder = make(tmp_path)
    assert load(folder).name == "low"
    assert find_edit(folder) is None
    with pytest.raises(RecordError, match="already holds a run"):
        make(tmp_path)


# -- the chain -------------------------------------------------------------------------------


def flip(text: str) -> str:
    return text.replace("0.5", "0.9", 1)


EDITS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "a value": ("epochs.jsonl", lambda x: x.replace('"metric":0.6', '"metric":0.9'), "line 2 diff"),
    "a clock": ("seconds.jsonl", lambda x: flip(x), "line 1 differs from what was written"),
    "the diary": ("events.jsonl", lambda x: x.replace("start", "begin"), "line 1 differs"),
    "the last line": ("epochs.jsonl", lambda x: x[: x[:-1].rfind("\n") + 1], "ends before line 3"),
    "one more": ("events.jsonl", lambda x: x + x, "has a line 4 that was not written by the run"),
    "a torn one": ("events.jsonl", lambda x: x + '{"ev', "has a line 4 that was not written by"),
    "the header": ("run.json", lambda x: x.replace('"seed": 3', '"seed": 4'), "is not as it was"),
    "a space": ("run.json", lambda x: x + " ", "is not as it was written"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_record_is_told_from_a_whole_one(edit: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    writer = RecordWriter.resume(folder, 3)
    writer.event("end")
    writer.close()
    assert judge_record(folder) == ("whole", "")
    name, change, sentence = EDITS[edit]
    text = (folder / name).read_text()
    assert change(text) != text
    (folder / name).write_text(change(text))
    what, why = judge_record(folder)
    assert (what, why.startswith(f"{name} {sentence}")) == ("edited", True)


@pytest.mark.parametrize("edit", EDITS)
def test_an_archive_has_the_last_states_of_a_chain_and_its_edits_are_seen(
    edit: str, tmp_path: Path
) -> None:
    """In the archive and after it was unpacked; the digests are those of the whole chain."""
    folder = make(tmp_path / "runs" / "run")
    writer = RecordWriter.resume(folder, 3)
    writer.event("end")
    writer.close()
    packed, there = tmp_path / "packed.tar.xz", tmp_path / "there"
    pack_records(folder.parent, packed)
    with tarfile.open(packed) as tar:
        tar.extractall(there, filter="data")
    last: dict[str, object] = {}
    for row in read_lines(folder / "chain.jsonl"):
        last |= {name: state for name, state in row["files"].items() if state["lines"]}
    assert read_lines(there / "run" / "chain.jsonl") == [{"files": last}, {"files": {}}]
    assert find_edit(there / "run") is None
    name, change, _ = EDITS[edit]
    path = there / "run" / name
    path.write_text(change(path.read_text()))
    assert (find_edit(there / "run") or "").startswith(name)


def test_an_archive_does_not_whitewash(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "run")
    path = folder / "epochs.jsonl"
    path.write_text(path.read_text().replace('"metric":0.6', '"metric":0.9'))
    RecordWriter.resume(folder, 3).close()  # its last states are those of the edited lines
    said = find_edit(folder)
    pack_records(folder.parent, tmp_path / "packed.tar.xz")
    with tarfile.open(tmp_path / "packed.tar.xz") as tar:
        tar.extractall(tmp_path / "there", filter="data")
    assert said
    assert find_edit(tmp_path / "there" / "run") == said


def test_a_resume_does_not_whitewash(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    path = folder / "epochs.jsonl"
    path.write_text(path.read_text().replace('"metric":0.6', '"metric":0.9'))
    for epochs in (3, 2, 1):  # the edited line is kept, is the last one, is set aside
        RecordWriter.resume(folder, epochs).close()
        assert "epochs.jsonl" in (find_edit(folder) or "")


def test_an_old_record_gets_its_chain_with_the_resume(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", epochs=2)
    (folder / "chain.jsonl").unlink()
    assert judge_record(folder)[0] == "no chain"
    writer = RecordWriter.resume(folder, 2)
    writer.epoch(plain.row(2), {"compute": 1.0})
    writer.event("end")
    writer.close()
    assert judge_record(folder) == ("whole", "")
    path = folder / "epochs.jsonl"
    path.write_text(path.read_text().replace('"metric":0.6', '"metric":0.9'))
    assert judge_record(folder)[1] == "epochs.jsonl lines 1 to 2 differs from what was written"


def test_doctor_says_one_line_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        name: make(tmp_path / name, epochs=2 + (name == "whole"))
        for name in ("whole", "broken", "running", "odd", "changed")
    }
    whole = RecordWriter.resume(runs["whole"], 3)
    whole.event("end")
    whole.close()
    (runs["odd"] / "run.json").write_text("{")
    edit_row(runs["changed"], put("metric", value=0.99))
    with (runs["running"] / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not check_records([tmp_path])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].partition(";")[0] for line in said] == [
        "broken off",
        "edited",
        "unreadable",
        "running",
        "whole",
    ]
    assert said[1].startswith(f"{tmp_path}/changed: edited; epochs.jsonl line")
    packed = tmp_path / "packed.tar.xz"
    pack_records(runs["whole"].parent / "whole", packed)
    with tarfile.open(packed) as tar:
        assert "chain.jsonl" in tar.getnames()
    assert check_records([packed, runs["broken"]])
    with pytest.raises(RecordError, match="no run in or under"):
        check_records([tmp_path / "nowhere"])


# -- what readers make of it -----------------------------------------------------------------


def test_controls_are_as_long_as_what_was_trained(tmp_path: Path) -> None:
    """A budget ends a run before its epochs, and a stranger's run may claim any number of them."""
    folder = make(tmp_path / "run")
    edit_header(folder, put("config", "epochs", value=10_000_000))
    edit_header(folder, put("budget", value=30))
    run = load(folder)
    assert detect.make_rule("first-share:share=0.5", run).epochs == 3
    result = detect.bench_detectors([run], ["first-share:share=0.67", "random-windows:share=0.34"])
    assert [round(x, 2) for x in result.detectors["critical"]] == [0.67, 0.33]


def test_a_low_that_sends_nothing_is_no_measure(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    edit_header(folder, put("per_step", "low", "floats", value=0))
    assert detect.bench_detectors([load(folder)], ["first-share"]).detectors["of_low"].isna().all()


def test_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("[/nope]", "[bold]x"):
        folder = make(tmp_path / name.replace("/", ""))
        edit_header(folder, put("config", "name", value=name))
        for at in range(3):
            edit_row(folder, put("compress", value=0.1), "seconds.jsonl", at)
        detect.main([folder], ["first-share:share=0.5"], None)
        cost([str(folder)], None, Network.parse("1Gbit/s,50us"), None)
        watch_runs(folder, once=True)
        assert capsys.readouterr().out.count(name) >= 3


def test_no_workers_are_no_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers = 0: expected at least 1"):
        cost([str(make(tmp_path / "run"))], None, Network.parse("1Gbit/s,50us"), 0)
    for given in ({"workers": 10**30}, {"workers": 4, "buckets": 10**30}):
        with pytest.raises(ConfigError, match=r"--(workers|buckets) = 10*: expected at least 1"):
            cost([str(tmp_path / "run")], None, Network.parse("1Gbit/s,50us"), **given)


# -- what every command makes of a record that says less, or other things --------------------

LESS = {
    "no number of samples": put("data", "train", value=None),
    "a metric that looks like a formula": put("metric", value="$\\frac{$"),
    "an optimizer without fields": put("config", "optimizer", value={}),
}


def model_epoch(row: Any) -> None:
    row["model"] = {"epoch": 7.0, "sharp": 1.0}


@pytest.mark.parametrize("kind", [*LESS, "no samples at all", "a statistic called epoch"])
def test_figures_and_report_of_a_record_that_says_less(
    kind: str, tmp_path: Path, command: Any
) -> None:
    for seed in (3, 4):
        for name in ("low", "high"):
            folder = make(tmp_path / f"runs/{name}/{seed}")
            edit_header(folder, put("config", "seed", value=seed))
            edit_header(folder, put("config", "name", value=name))
            if kind in LESS:
                edit_header(folder, LESS[kind])
            elif kind == "no samples at all":
                edit_header(folder, put("data", value={"digest": "d"}))
            else:
                edit_row(folder, model_epoch)
    for words in (
        "figure curves runs --out figures",
        "report runs --out page.html",
        "figure tournament runs --out figures",
        "detect runs",
    ):
        done = command(*words.split())
        assert done.returncode == 0 or done.stderr.count("\n") == 1, done.stderr
        if words.startswith(("figure curves", "report")):
            assert done.returncode == 0, done.stderr
    if kind == "a statistic called epoch":
        found = load(tmp_path / "runs/low/3").epochs
        assert found["epoch"].tolist() == [0, 1, 2]
        assert "model_epoch" in found


def test_curves_over_nothing_are_one_sentence(tmp_path: Path, command: Any) -> None:
    make(tmp_path / "run")
    done = command("figure", "curves", "run", "--x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--x = (): expected epoch, floats or seconds, one or several" in done.stderr
