"""No table of a command cuts a number, on terminals of any width (oracle: the cells of the table,
which stand in what is printed)."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regimes import cli
from regimes.base.console import tables
from regimes.base.console.tables import FoldingTable, Table
from regimes.records import unpack_records

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "data" / "reference"
WIDTHS = (60, 100)
SMALL = ("--dimension", "30", "--nonzero", "3", "--train", "200", "--draws", "3", "--trials", "50")
COMMANDS = {
    "detect": ["detect", str(REFERENCE / "small-signals.tar.xz")],
    "cost of runs": ["cost", str(REFERENCE / "smoke-start.tar.xz")],
    "cost of a model": ["cost", "--model", "resnet50", "--step", "30ms"],
    "watch": ["watch", "unpacked", "--once"],
    "figures": ["figure"],
    "presets": ["presets"],
    "doctor": ["doctor"],
    "figure 3": ["figure", "3", str(REFERENCE / "small-signals.tar.xz")],
    "figure 2": ["figure", "2", str(REFERENCE / "lstm-small.tar.xz")],
    "collapse": ["figure", "collapse", str(REFERENCE / "smoke-quirks-topk.tar.xz")],
    "lasso": ["figure", "lasso", *SMALL],
    "published": ["figure", "published"],
}
SLOW = ("figure 2", "collapse", "lasso", "published", "presets")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """The tables that are printed."""
    found: list[Table] = []
    original = FoldingTable.__rich_console__

    def keep(self: FoldingTable, *given: Any) -> Iterator[Any]:
        found.append(self.table)
        return original(self, *given)

    monkeypatch.setattr(FoldingTable, "__rich_console__", keep)
    return found


def check(text: str, table: Table, width: int) -> None:
    """Each number stands in the text, and no line of the table is longer than the terminal."""
    for i, is_text in enumerate(table.words):
        cells = [str(row[i]) for row in table.rows if isinstance(row[i], str) and row[i].strip()]
        for cell in cells if not is_text else []:
            assert re.search(rf"(?<!\S){re.escape(cell.strip())}(?!\S)", text), (cell, width)
    assert "…" not in text


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in COMMANDS]
)
def test_every_number_is_printed_whole(
    name: str,
    command: Callable[..., subprocess.CompletedProcess[str]],
    drawn: list[Table],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "watch":
        with unpack_records(REFERENCE / "lstm-small.tar.xz") as folder:
            shutil.copytree(folder, tmp_path / "unpacked")
    # what takes long is shown at the width that folds most
    for width in (60,) if name == "doctor" or name.startswith("figure ") else WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        drawn.clear()
        done = command(*COMMANDS[name])
        assert done.returncode == 0, done.stderr
        assert drawn
        for table in drawn:
            check(done.stdout, table, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_is_printed_at_the_width_of_the_terminal(
    width: int, drawn: list[Table], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = [["quantised-all-reduce:4", *["+0.123 [-0.100, +0.345]"] * 3, "1,234,567"]] * 2
    table = Table(["method", "loss", "a step", "steps", "MB sent"], rows)

    class Found:
        as_table, sentence, save = (lambda _: table), (lambda _: "It is."), (lambda _: [])

    monkeypatch.setenv("COLUMNS", str(width))
    module = importlib.import_module("regimes.search.plans.plan")
    monkeypatch.setattr(module, "plan", lambda *given, **more: Found())
    cli.plan("smoke", link="1Gbit/s", seconds="2")
    printed = capsys.readouterr().out
    check(printed, table, width)
    assert max(map(len, printed.splitlines())) <= width


def test_no_module_prints_a_table_of_its_own() -> None:
    """All are `Table`: rich cuts what does not fit, and pandas prints lines of any length. (A bar
    beside a time is a grid of `watch`. A notebook shows HTML, whose cells wrap.)"""
    rich = r"rich\.table import Table(?! as Grid)"
    pandas = r"\.to_string\(|\.to_markdown\(|display\.width|display\.max_col"
    own = re.compile(f"{rich}|{pandas}")
    rooms = [path for room in ("regimes", "analysis") for path in (ROOT / room).rglob("*.py")]
    files = [path for path in rooms if path != ROOT / "analysis" / "notebook" / "outputs.py"]
    found = [path for path in files if own.search(path.read_text(encoding="utf-8"))]
    assert found == [Path(tables.__file__)]
