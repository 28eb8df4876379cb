"""Archives of records: what errors call them, and what a killed reader leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from plain import record as make

from regimes.errors import RecordError
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
