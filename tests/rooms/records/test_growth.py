"""Work that grows with the units of a run, counted (oracle: twice the units, at most twice the
work)."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from configs import smoke
from rich.console import Console

import regimes
from regimes.cli import monitor as watch
from regimes.records import lines, load
from regimes.records.writer import RecordWriter

SHORT, LONG = 24, 48


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of two epochs, whose last row stands for many."""
    folder = tmp_path_factory.mktemp("growth") / "run"
    regimes.run(smoke("device=cpu", "epochs=2", "optimizer.decay_epochs=[]"), folder)
    return folder


class Counter:
    """Calls of the function that parses a line, and the bytes that it was given."""

    def __init__(self) -> None:
        self.calls, self.bytes, self.parse = 0, 0, lines.parse_line

    def __call__(self, text: bytes) -> Any:
        self.calls, self.bytes = self.calls + 1, self.bytes + len(text)
        return self.parse(text)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(lines, "parse_line", counter)
    return counter


def header_of(example: Path, units: int) -> dict[str, Any]:
    header = json.loads((example / "run.json").read_text())
    header["config"]["epochs"] = units
    return {name: value for name, value in header.items() if name != "schema"}


def written(example: Path, folder: Path, units: int, each: Any = None) -> Path:
    """A record of so many units, by the writer; ``each`` is called after every row."""
    row = json.loads((example / "epochs.jsonl").read_text().splitlines()[-1])
    writer = RecordWriter.create(folder, header_of(example, units))
    for unit in range(units):
        place = {"first": unit * row["steps"], "stop": (unit + 1) * row["steps"]}
        writer.epoch({**row, "epoch": unit, "unit": place}, {"compute": 1.0})
        if each is not None:
            each(folder)
    writer.event("end")
    writer.close()
    return folder


def test_a_load_parses_each_line_once(example: Path, tmp_path: Path, counted: Counter) -> None:
    folder = written(example, tmp_path / "run", LONG)
    counted.calls = counted.bytes = 0
    assert len(load(folder).rows) == LONG
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert counted.bytes < 1.5 * size


def test_a_refresh_reads_what_is_new(example: Path, tmp_path: Path, counted: Counter) -> None:
    work, silent = [], Console(file=io.StringIO(), width=100)

    def refresh(folder: Path) -> None:
        silent.print(watch._one(folder)[0])

    for units in (SHORT, LONG):
        counted.bytes = 0
        written(example, tmp_path / str(units), units, refresh)
        work.append(counted.bytes)
    assert work[1] < 2.2 * work[0]


def test_a_row_is_written_without_reading_the_rows_before(
    example: Path, tmp_path: Path, counted: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sizes = [], []
    for units in (SHORT, LONG):
        counted.calls = 0
        folder = written(example, tmp_path / str(units), units)
        calls.append(counted.calls)
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
    assert calls[0] == calls[1]
    assert sizes[1] < 2.2 * sizes[0]
