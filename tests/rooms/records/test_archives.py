"""Archives of records: what errors call them, and what a killed reader leaves behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from plain import record as make

from regimes.base.errors import RecordError
from regimes.records import load_all, pack_records, unpack_records


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    make(tmp_path / "runs/low/seed-0")
    pack_records(tmp_path / "runs", tmp_path / "runs.tar.xz")
    return tmp_path / "runs.tar.xz"


def test_errors_name_the_archive(packed: Path, tmp_path: Path) -> None:
    (run,) = load_all(packed)
    assert run.folder == packed / "low/seed-0"
    (tmp_path / "runs/low/seed-0/epochs.jsonl").write_text('{"epoch": "x"}\n')
    pack_records(tmp_path / "runs", packed)
    with pytest.raises(RecordError, match=f"^{packed}/low/seed-0/epochs.jsonl line 1 is damaged"):
        load_all(packed)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_damaged_archive_is_one_sentence(kind: str, tmp_path: Path) -> None:
    """Each way of compression has an error of its own."""
    (tmp_path / "content").write_bytes(bytes(random.Random(0).choices(range(64), k=2**18)))
    with tarfile.open(tmp_path / "a.tar", f"w:{kind}") as tar:
        tar.add(tmp_path / "content", "run/run.json")
    whole = (tmp_path / "a.tar").read_bytes()
    said = set()
    for place in range(1000, len(whole) - 1000, len(whole) // 40):
        damaged = whole[:place] + bytes(8) + whole[place + 8 :]
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(RecordError) as error:
            load_all(tmp_path / "a.tar")
        said.add("is no archive of records" in str(error.value))
    assert True in said


@pytest.mark.parametrize("key", ["path", "linkpath"])
def test_a_name_that_no_file_can_have_is_one_sentence(key: str, tmp_path: Path) -> None:
    member = tarfile.TarInfo("run/run.json")
    member.type = tarfile.REGTYPE if key == "path" else tarfile.SYMTYPE
    member.pax_headers = {key: "run/a\0b"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(RecordError, match=r"is no archive of records: .* no name of a file"):
        load_all(tmp_path / "a.tar")


def test_what_a_killed_reader_leaves_goes_with_the_next(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    code = "import sys, time\nfrom regimes.records import unpack_records\n"
    code += "with unpack_records(sys.argv[1]):\n    time.sleep(100)"
    env = {**os.environ, "TMPDIR": str(place)}
    reader = subprocess.Popen([sys.executable, "-c", code, packed], env=env)
    while not list(place.rglob("run.json")):
        assert reader.poll() is None
        time.sleep(0.02)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with unpack_records(packed):
        assert len(list(place.iterdir())) == 2  # the other one is still reading
    assert len(list(place.iterdir())) == 1
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    with unpack_records(packed):
        assert len(list(place.iterdir())) == 1
    assert not list(place.iterdir())
