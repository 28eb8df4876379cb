"""No output of a command replaces what it has read. Oracle: the inputs' bytes, before and after."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plain import record as make

import regimes
from regimes.base import inputs
from regimes.base.config import to_toml
from regimes.base.errors import RecordError
from regimes.cli import html_report as report
from regimes.records import check_output, load_all, pack_records

ARCHIVE = Path(__file__).parents[2] / "data/reference/smoke-overlap.tar.xz"
Command = Callable[..., subprocess.CompletedProcess[str]]


def small(tmp_path: Path) -> None:
    """One run, as an archive and a configuration."""
    make(tmp_path / "runs/low")
    (tmp_path / "recorded").write_bytes(ARCHIVE.read_bytes())
    pack_records(tmp_path / "runs", tmp_path / "packed")
    (tmp_path / "mine.toml").write_text(to_toml(regimes.get_preset("smoke")))
    chosen = tmp_path / "tuned/chosen"
    chosen.mkdir(parents=True)
    shutil.copy(tmp_path / "mine.toml", chosen / "mine.toml")


COMMANDS = {
    "report": "report packed --out packed",
    "by another way": "report packed --out runs/../packed",
    "cost": "cost recorded --csv recorded",
    "cost of a file": "cost mine.toml --set epochs=1 --csv mine.toml",
    "detect": "detect detectors.csv --out .",
    "figure": "figure curves curves.csv --out .",
    "tune": "tune tuned/chosen --set data.validation_size=9 --values optimizer.lr=1 --out tuned",
    "checkpoint": "report runs/low --out runs/low/checkpoints/epoch-0001/process-0.pt",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_does_not_replace_an_input(name: str, tmp_path: Path, command: Command) -> None:
    small(tmp_path)
    for table in ("detectors.csv", "curves.csv"):  # an archive by any name
        shutil.copy(ARCHIVE if name == "detect" else tmp_path / "packed", tmp_path / table)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    done = command(*COMMANDS[name].split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: cannot write ")
    assert {p: p.read_bytes() for p in before} == before


def test_the_same_command_may_be_given_again(tmp_path: Path, command: Command) -> None:
    small(tmp_path)
    for _ in range(2):
        for words in ("pack runs again.tar.xz", "report packed --out page.html"):
            assert command(*words.split()).returncode == 0


def test_from_python(tmp_path: Path) -> None:
    """A page is not written over its archive; an archive that was read may be packed anew."""
    small(tmp_path)
    with pytest.raises(RecordError, match="the command has read it"):
        report.write_report(tmp_path / "packed", "10Gbit/s,50us", tmp_path / "packed")
    load_all(tmp_path / "packed")
    pack_records(tmp_path / "runs", tmp_path / "packed")


def test_what_is_read_within_a_command_counts_for_all_of_it(tmp_path: Path) -> None:
    small(tmp_path)
    with inputs.track_inputs():
        with inputs.track_inputs():
            load_all(tmp_path / "packed")
        with pytest.raises(RecordError, match="the command has read it"):
            check_output(tmp_path / "packed")
    check_output(tmp_path / "packed")
