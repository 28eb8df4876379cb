"""What a notebook's cell shows (oracle: the records' own numbers; the text of a cell)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import regimes
from analysis.findings.sources import records
from regimes.base.config import RunConfig, override_fields
from regimes.base.console import notebook
from regimes.base.errors import ConfigError, RecordError
from regimes.job.reporters import CellLine, default_reporters
from regimes.presets import get_preset
from regimes.records import load_all

TINY = override_fields(get_preset("smoke"), {"epochs": 2, "workers": 2})


def test_a_run_is_one_line_and_a_row() -> None:
    run = records("lm-demo")[0]
    assert len(repr(run)) < 200
    assert "\n" not in repr(run)
    cells = re.findall(r"<td>(.*?)</td>", run._repr_html_())
    assert cells[:2] == [run.name, str(run.seed)]
    assert f"{run.rows[-1]['metric']:.4g}" in cells
    assert f"{run.epochs['bytes'].sum() / 1e6:.4g}" in cells


def test_many_runs_are_a_row_for_each_schedule() -> None:
    from analysis.findings.sources import REFERENCE

    runs = load_all(REFERENCE / "lm-demo.tar.xz")
    assert isinstance(runs, list)
    page = runs._repr_html_()  # type: ignore[attr-defined]
    names = {run.name for run in runs}
    assert page.count("<tr") == 1 + len(names)
    seeds = {name: sum(run.name == name for run in runs) for name in names}
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)[1:] or re.findall(
        "<tr.*?</tr>", page
    ):
        cells = re.findall(r"<td>(.*?)</td>", row)
        assert not cells or int(cells[1]) == seeds[cells[0]]


def test_a_configuration_shows_what_is_not_the_default() -> None:
    changed = override_fields(RunConfig(), {"optimizer.lr": 0.125})
    assert re.findall(r"<td>(.*?)</td>", changed._repr_html_()) == ["optimizer.lr", "0.125"]


class Cell:
    """Displays of one cell, as IPython keeps them: the last text of each."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def display(self, shown: Any, display_id: bool) -> Cell:
        self.texts.append(shown.data)
        return self

    update = lambda self, shown: self.texts.append(shown.data)  # noqa: E731


def test_a_line_comes_soon_changes_four_times_a_second_and_says_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 5 units of 10 steps a training goes on with the third, at 4 s a step."""
    import IPython.display

    cell, clock = Cell(), [100.0]
    monkeypatch.setattr(IPython.display, "display", cell.display)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    line = notebook.Line()
    for clock[0] in (100.4, 100.6, 100.8, 100.9):
        line.show(f"{clock[0]}")
    assert re.findall(r">(\d.*?)<", "".join(cell.texts)) == ["100.6", "100.9"]
    reporter, clock[0], cell.texts = CellLine(), 0.0, []
    reporter.start({"config": {"name": "low", "seed": 3, "epochs": 5}, "metric": "accuracy"}, [])
    for step in range(1, 5):
        clock[0] = 4.0 * step
        reporter.step(2, step, 10)
    assert "low (3): epoch 3 of 5, step 4 of 10: 0:16, 1:44 left<" in cell.texts[-1]


def test_a_cell_shows_its_training_and_is_empty_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import IPython.display

    cell = Cell()
    assert default_reporters() == ()
    monkeypatch.setattr("regimes.job.reporters.in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", cell.display)
    monkeypatch.setattr(notebook, "SOON", 0.0)
    monkeypatch.setattr(notebook, "AGAIN", 0.0)
    assert [type(one) for one in default_reporters()] == [CellLine]
    record = regimes.run(TINY, tmp_path / "run", resume="auto")
    assert f">{TINY.name} ({TINY.seed}): epoch 1 of 2, step 1 of " in cell.texts[0]
    assert "epoch 2 of 2" in cell.texts[-2]
    assert f", accuracy {100 * record.rows[0]['metric']:.4g} %" in cell.texts[-2]
    assert f"{100 * record.rows[-1]['metric']:.4g}" in record._repr_html_()
    assert "accuracy %" in record._repr_html_()
    assert cell.texts[-1] == ""
    # once more, as when a cell is run again
    assert regimes.run(TINY, tmp_path / "run", resume="auto").rows == record.rows
    with pytest.raises(RecordError, match="resume=True"):
        regimes.run(TINY, tmp_path / "run")
    with pytest.raises(ConfigError, match="resume = 'no'"):
        regimes.run(TINY, tmp_path / "run", resume="no")  # type: ignore[arg-type]


class Stops:
    """A reporter whose user presses Stop in a unit's first step."""

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def step(self, epoch: int, done: int, steps: int) -> None:
        if epoch == self.unit:
            raise KeyboardInterrupt

    start = epoch = stop = lambda *_: None


def test_a_stop_ends_in_one_sentence_and_the_cell_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) as plain:
        regimes.run(TINY, out, reporters=[Stops(0)])
    assert type(plain.value) is KeyboardInterrupt  # of a script
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    with pytest.raises(notebook.Stopped, match="nothing is kept, since no epoch had ended"):
        regimes.run(TINY, out, resume="auto", reporters=[Stops(0)])
    with pytest.raises(notebook.Stopped) as stopped:
        regimes.run(TINY, out, resume="auto", reporters=[Stops(1)])
    said = f"Stopped: 1 of 2 epochs are kept in {out}; run the cell again to go on."
    assert stopped.value._render_traceback_() == [said]
    with pytest.raises(notebook.Stopped, match=r'run the cell again with resume="auto" to go on'):
        regimes.run(TINY, out, resume=True, reporters=[Stops(1)])
    assert len(regimes.run(TINY, out, resume="auto").rows) == 2

    def train(pulse: Any, seed: int) -> float:
        raise KeyboardInterrupt

    with pytest.raises(notebook.Stopped, match="the runs that had ended are kept in"):
        regimes.harm(train, units=4, runs=3, out=tmp_path / "harm")


TAB = """
import sys, regimes
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from regimes.base.console.notebook import Stopped
shell = InteractiveShell()
shell.user_ns["regimes"] = regimes
shell.Completer.jedi_compute_type_timeout = 0  # else types of as many names as 400 ms allow
with provisionalcompleter():
    found = {one.text for one in shell.Completer.completions("regimes.", 8)}
assert {*regimes.__all__} <= found, {*regimes.__all__} - found
assert "torch" not in sys.modules

def stop():
    raise Stopped("Stopped: 1 of 2 epochs are kept.") from None

shell.user_ns["stop"] = stop
shell.run_cell("stop()")
"""


def test_names_complete_without_torch_and_a_stop_has_no_traceback() -> None:
    """In a process of its own; oracle: IPython's completion and output."""
    done = subprocess.run([sys.executable, "-c", TAB], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Stopped: 1 of 2 epochs are kept."
