"""What benchmarks count of runs (oracle: ends, lines and words that are made up)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import faults, faults_around, faults_bench, trees
from benchmarks.trainers import End


def made_up(ends: Sequence[End], lines: bytes = b"") -> type:
    """In place of `Training`: a run that leaves these lines and ends so."""

    class MadeUp:
        def __init__(self, configs: Sequence[Any], out: Path, **_: Any) -> None:
            (out / "epochs.jsonl").write_bytes(lines)

        def ends(self) -> Sequence[End]:
            return ends

    return MadeUp


@pytest.mark.parametrize(
    ("now", "lost"), [(b"a\nb\n", 0), (b"a\nb\nd\n", 0), (b"a\n", 1), (b"b\n", 2), (b"", 2)]
)
def test_lines_that_the_continued_run_no_longer_has_are_lost(
    now: bytes, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the undisturbed run has."""
    bench = object.__new__(faults_bench.Bench)
    bench.whole = {1: tmp_path}
    (tmp_path / "epochs.jsonl").write_bytes(b"a\nb\nc\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / "epochs.jsonl").write_bytes(b"a\nb\n")
    monkeypatch.setattr(faults_bench, "Training", made_up([End(1, "no")], now))
    assert bench.continued(out, 1, "killed") == ("killed, NOT resumed: no", lost)


@pytest.mark.parametrize("other", [End(0, ""), End(3, "no sign of process 0")])
def test_a_kill_counts_however_the_other_process_ends(
    other: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ("ended at once, resumed to the same bytes", 0)
    bench: Any = SimpleNamespace(config=None, draw=random.Random(0), folder=lambda: tmp_path)
    bench.continued = lambda *_: found
    monkeypatch.setattr(faults_around, "Training", made_up([End(-9, ""), other]))
    assert faults_around.killed_writing(bench) == found
    monkeypatch.setattr(faults_around, "Training", made_up([End(0, ""), End(0, "")]))
    assert faults_around.killed_writing(bench) is None


def test_rows_of_another_seed_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "faults.json"
    report.write_text(json.dumps({"seed": 1, "faults": {}}))
    words = ["faults", "--go-on", "--seed", "2", "--report", str(report)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(faults, "Bench", lambda *_: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        faults.main()
    assert "are of seed 1" in capsys.readouterr().err


def test_processes_that_do_not_end_are_killed() -> None:
    words = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    started = [subprocess.Popen(words, text=True) for _ in range(2)]
    with pytest.raises(subprocess.TimeoutExpired):
        trees.ends(started, 0.1)
    assert [process.returncode for process in started] == [-9, -9]
