"""Reporters by name, for the trainer and for the hook: what they are told, and what is refused.

Oracles: the record of the same run; wandb's own interface, in a stand-in.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ddp_scripts import group, recorded

import regimes
from regimes.base.config import override
from regimes.base.errors import ConfigError
from regimes.records import check_reporters, make_reporters, read_lines

SHORT = ["epochs=2", "data.train_size=100", "optimizer.decay_epochs=[]"]
SOURCE = """
from pathlib import Path

class Lines:
    def __init__(self, folder):
        self.file = Path(folder, "lines.txt")
    def start(self, header, rows):
        self.say("start", header["config"]["name"], len(rows))
    def step(self, epoch, done, steps): ...
    def epoch(self, row, seconds):
        self.say("epoch", row["epoch"], sorted(seconds) != [])
    def stop(self, message):
        self.say("stop", message)
    def say(self, *words):
        with self.file.open("a") as file:
            print(*words, file=file)

class Falls(Lines):
    def epoch(self, row, seconds):
        raise ValueError("no disk")

class Needs:
    def __init__(self, folder):
        from regimes.base.errors import ConfigError
        raise ConfigError("needs the package lines: install lines")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with reporters."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "offering_lines.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ['PYTHONPATH']}")
    importlib.invalidate_caches()


@pytest.mark.usefixtures("package")
def test_a_packages_reporter_is_known_by_its_class(tmp_path: Path, command: Callable) -> None:
    (lines,) = make_reporters(["offering_lines:Lines"], tmp_path)
    assert type(lines).__name__ == "Lines"
    settings = (*SHORT, 'reporters=["offering_lines:Lines"]')
    words = [word for setting in settings for word in ("--set", setting)]
    for name, quiet in (("loud", []), ("quiet", ["--quiet"])):
        done = command("run", "smoke", *words, "--out", name, *quiet)
        assert done.returncode == 0, done.stderr
        said = (tmp_path / name / "lines.txt").read_text()
        assert said == "start accordion 0\nepoch 0 True\nepoch 1 True\nstop \n"
        assert bool(done.stdout) == (not quiet)


def test_unknown_names_are_refused_before_any_work(tmp_path: Path, command: Callable) -> None:
    done = command("run", "smoke", "--set", 'reporters=["wandbb"]', "--out", "run")
    assert done.returncode == 2
    assert "unknown reporter 'wandbb': did you mean 'wandb'?" in done.stderr
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        regimes.RecordOptions(tmp_path, reporters=("tensorbord",))
    with pytest.raises(ConfigError, match="cannot import the reporter 'nowhere:Lines'"):
        check_reporters(["nowhere:Lines"])


# -- the hook --------------------------------------------------------------------------------


@pytest.mark.usefixtures("package")
def test_a_hooks_reporter_is_told_what_is_recorded(tmp_path: Path) -> None:
    group.run(recorded.reported, 2, tmp_path / "run", ["offering_lines:Lines"])
    assert len(read_lines(tmp_path / "run/epochs.jsonl")) == 3
    said = (tmp_path / "run/lines.txt").read_text().splitlines()
    assert said == ["start accordion 0", "epoch 0 True", "epoch 1 True", "epoch 2 True", "stop "]


@pytest.mark.usefixtures("package")
def test_a_hooks_reporter_that_fails_is_left_out(tmp_path: Path) -> None:
    group.run(recorded.reported, 2, tmp_path / "run", ["offering_lines:Falls"])
    assert len(read_lines(tmp_path / "run/epochs.jsonl")) == 3
    events = read_lines(tmp_path / "run/events.jsonl")
    assert [e["event"] for e in events] == ["start", "reporter failed", "end"]
    assert (events[1]["reporter"], events[1]["why"]) == ("Falls", "ValueError no disk")


@pytest.mark.usefixtures("package")
def test_what_a_reporter_lacks_all_processes_hear(tmp_path: Path) -> None:
    for heard in group.run(recorded.refused_reporter, 2, tmp_path / "run", "offering_lines:Needs"):
        assert heard == "needs the package lines: install lines"


# -- wandb -----------------------------------------------------------------------------------


def test_wandb_is_offline_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, float]]] = []

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            logged.append((step, numbers))

        def finish(self, exit_code: int) -> None:
            asked["exit_code"] = exit_code

    def init(**given: Any) -> Run:
        asked.update(given)
        return Run()

    stand_in = types.SimpleNamespace(init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = override(regimes.get_preset("smoke"), [*SHORT, 'reporters=["wandb"]'])
    record = regimes.run(config, tmp_path / "run")
    assert asked["mode"] == "offline"
    assert (asked["name"], asked["dir"]) == ("accordion (0)", str(tmp_path / "run"))
    assert asked["config"]["workers"] == 4
    assert asked["exit_code"] == 0
    assert [step for step, _ in logged] == [0, 1]
    assert logged[1][1]["accuracy"] == record.epochs["metric"][1]
    assert logged[1][1]["traffic/floats"] == record.epochs["total_floats"][1]


def test_a_resumed_run_is_the_same_one_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One curve, whose id no other folder has."""
    asked: list[dict[str, Any]] = []
    stand_in = types.SimpleNamespace(Settings=dict)
    stand_in.init = lambda **given: asked.append(given)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    header: Any = {"config": {"name": "low", "seed": 0}}
    started: list[tuple[str, Any]] = [("run", []), ("run", [{"floats": 1.0}]), ("other", [])]
    for folder, rows in started:
        (reporter,) = make_reporters(["wandb"], tmp_path / folder)
        reporter.start(header, rows)
    first, resumed, other = (given["id"] for given in asked)
    assert first == resumed != other
    assert {given["resume"] for given in asked} == {"allow"}


@pytest.mark.parametrize(
    ("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_package_that_is_missing_is_named(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        make_reporters([name], tmp_path)


@pytest.mark.integrations
def test_wandb_itself(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb: make integrations")
    config = override(regimes.get_preset("smoke"), SHORT)
    out = tmp_path / "run"
    regimes.run(config, out, reporters=make_reporters(["wandb", "tensorboard"], out))
    assert not [e for e in read_lines(out / "events.jsonl") if e["event"] == "reporter failed"]
    (file,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    until = time.monotonic() + 30  # its own process writes when it comes to it
    while file.stat().st_size < 1000 and time.monotonic() < until:
        time.sleep(0.1)
    assert file.stat().st_size > 1000
    assert len(list((out / "tensorboard").iterdir())) == 1
