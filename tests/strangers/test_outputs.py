"""Files that a user asks for: whole or not at all, and nothing but a regular file is replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from plain import record as make

from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.records import RecordWriter, pack_records, write_atomically, write_output, write_table

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "data/reference/smoke-overlap.tar.xz"


def to_a_device(path: Path) -> None:
    path.symlink_to("/dev/full")


def to_a_file(path: Path) -> None:
    path.with_name("elsewhere").write_text("theirs")
    path.symlink_to("elsewhere")


def to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def as_socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)  # the whole path may be too long for a socket's
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "it is a pipe"),
    "folder": (os.mkdir, "it is a folder"),
    "link to a device": (to_a_device, "it is a symbolic link"),
    "link to a file": (to_a_file, "it is a symbolic link"),
    "dangling link": (to_nothing, "it is a symbolic link"),
    "socket": (as_socket, "it is a pipe, socket or device"),
}


@pytest.mark.parametrize("kind", ODD)
def test_nothing_but_a_regular_file_is_replaced(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "run" / "out.csv"
    make(tmp_path / "run")
    plant, sentence = ODD[kind]
    plant(place)
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    for write in (
        lambda: write_output(place, "x"),
        lambda: write_table(place, pd.DataFrame({"a": [1]})),
        lambda: pack_records(tmp_path / "run", place),
        lambda: style.save(Figure(), place.with_suffix(""), pd.DataFrame({"a": [1]})),
    ):
        with pytest.raises(RecordError, match=f"cannot write .*out.csv: {sentence}"):
            write()
    for kind in ("png", "svg"):
        place.with_suffix(f".{kind}").unlink()  # these two were in nobody's way
    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert before.keys() == after.keys()
    assert all(before[p].st_ino == after[p].st_ino for p in before)
    if kind == "link to a file":
        assert place.read_text() == "theirs"


@pytest.mark.parametrize("name", ["run.json", "epochs.jsonl", "more.jsonl"])
def test_no_file_of_a_record_is_replaced(name: str, tmp_path: Path) -> None:
    """As ``regimes pack RUN RUN/run.json``."""
    folder = make(tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for write in (
        lambda: write_output(folder / name, "x"),
        lambda: pack_records(folder, folder / name),
    ):
        with pytest.raises(RecordError, match=f"cannot write .*{name}: it is a file of the record"):
            write()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [pytest.param(["report", "--out"], marks=pytest.mark.slow), ["cost", "--csv"]],
    ids=lambda x: x[0],
)
def test_commands_say_so_in_one_sentence(
    words: list[str], tmp_path: Path, command: Callable
) -> None:
    place = tmp_path / "full"
    place.symlink_to("/dev/full")
    done = command(words[0], str(ARCHIVE), words[1], str(place))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: cannot write {place}: it is a symbolic link, expected a regular file or none\n"
    )
    assert place.is_symlink()


@pytest.mark.parametrize(
    "words",
    [
        ["watch", "--once"],
        ["detect"],
        ["cost"],
        ["report"],
        ["doctor"],
        ["pack"],
        ["run"],
        ["ablate", "smoke", "--out"],
        ["report", str(ARCHIVE), "--out"],
    ],
    ids=" ".join,
)
def test_a_place_that_there_cannot_be_is_one_sentence(words: list[str], command: Callable) -> None:
    """As one in a folder that nobody may look into, by who is not root."""
    name = "x" * 300 + ".toml" * (words[0] == "run")
    done = command(*words, name, *["packed.tar.xz"] * (words[0] == "pack"))
    assert done.returncode == 2
    assert "File name too long" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"1")
        (tmp_path / "b").write_bytes(b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    write_atomically(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2"
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


def test_a_planted_temporary_file_is_neither_written_nor_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names cannot be guessed; were one, a link of that name is not opened."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / f".out.{os.getpid()}.tmp").symlink_to(theirs)
    write_atomically(tmp_path / "out", b"ours")
    monkeypatch.setattr("secrets.token_hex", lambda n: "guessed")
    (tmp_path / ".out.guessed.tmp").symlink_to(theirs)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "out", b"again")
    assert (theirs.read_text(), (tmp_path / "out").read_text()) == ("theirs", "ours")


@pytest.mark.parametrize("name", [".lock", "events.jsonl", "epochs.jsonl"])
def test_a_foreign_record_with_links_is_not_written_through(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    theirs = tmp_path / "theirs"
    (folder / name).rename(theirs)
    content = theirs.read_bytes() + b'{"event":'  # torn: a writer would cut it
    theirs.write_bytes(content)
    (folder / name).symlink_to(theirs)
    with pytest.raises(RecordError, match="it is a symbolic link"):
        RecordWriter.resume(folder, 1)
    assert theirs.read_bytes() == content


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["detect", str(ARCHIVE), "--out", "F"], ["F/detectors.csv", "F/pairs.csv"]),
        (["figure", "tables", "--out", "F"], ["F/tables.csv", "F/tables.md"]),
        (["figure", "curves", str(ARCHIVE), "--out", "F", "--name", "c"], ["F/c.png", "F/c.csv"]),
        (["cost", str(ARCHIVE), "--csv", "F.csv"], ["F.csv"]),
        (["cost", "--model", "gpt2-124m", "--items", "8192", "--csv", "F.csv"], ["F.csv"]),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words[0], str) else "",
)
def test_files_are_written_whoever_reads_the_table(
    words: list[str],
    files: list[str],
    tmp_path: Path,
    command: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Standard output is a pipe that nothing reads any more, as of ``| head``."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        done = command(*words)
    assert (done.returncode, done.stderr) == (141, "")  # 128 + SIGPIPE
    for name in files:
        assert (tmp_path / name).stat().st_size, name
