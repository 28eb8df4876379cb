"""Who watches a training cannot end it: closed pipes, full disks, odd letters, bad reporters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regimes
from regimes.base.config import RunConfig, override, to_toml
from regimes.job.termination import Terminated
from regimes.plotting.reporters import PlainLines
from regimes.records import read_lines

SHORT = ["epochs=3", "data.train_size=40", "data.test_size=20", "model.width=2"]
WORDS = [word for text in SHORT for word in ("--set", text)]


def config(**changes: Any) -> RunConfig:
    import dataclasses

    return dataclasses.replace(override(regimes.get_preset("smoke"), SHORT), **changes)


def failures(out: Path) -> list[dict[str, Any]]:
    return [e for e in read_lines(out / "events.jsonl") if e["event"] == "reporter failed"]


class Reporter:
    """Fails in the calls that it is told to fail in."""

    def __init__(self, error: BaseException | None = None, *during: str) -> None:
        self.error, self.during, self.calls = error, during, []  # type: ignore[var-annotated]

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what in self.during and self.error:
            raise self.error

    def start(self, header: Any, rows: Any) -> None:
        self._call("start")

    def step(self, epoch: int, done: int, steps: int) -> None:
        self._call("step")

    def epoch(self, row: Any, seconds: Any) -> None:
        self._call("epoch")

    def stop(self, message: str) -> None:
        self._call("stop")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole")
    regimes.run(config(), out)
    return (out / "epochs.jsonl").read_bytes()


def test_a_reporter_that_raises_is_told_about_once_and_left_out(
    whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [
        Reporter(KeyError("x"), "start"),
        Reporter(ZeroDivisionError("y"), "step", "stop"),
        Reporter(OSError(28, "No space left"), "epoch"),
        Reporter(ValueError("z"), "stop"),
    ]
    good = Reporter()
    regimes.run(config(), tmp_path, reporters=[*bad, good])
    assert (tmp_path / "epochs.jsonl").read_bytes() == whole
    assert [(e["during"], e["why"]) for e in failures(tmp_path)] == [
        ("start", "KeyError 'x'"),
        ("step", "ZeroDivisionError y"),
        ("epoch", "OSError [Errno 28] No space left"),
        ("stop", "ValueError z"),
    ]
    assert {e["reporter"] for e in failures(tmp_path)} == {"Reporter"}
    assert bad[0].calls == ["start"]
    assert bad[1].calls == ["start", "step", "stop"]  # it may hold a terminal
    assert good.calls.count("epoch") == 3
    said = [r for r in caplog.records if "is left out" in r.getMessage()]
    assert len(said) == 4
    kinds = [e["event"] for e in read_lines(tmp_path / "events.jsonl")]
    assert "end" in kinds
    assert "stopped" not in kinds


@pytest.mark.parametrize("during", ["step", "epoch"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated("asked")], ids=["^C", "TERM"])
def test_who_asks_for_the_end_gets_it(error: BaseException, during: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        regimes.run(config(), tmp_path, reporters=[Reporter(error, during)])
    assert not failures(tmp_path)
    assert read_lines(tmp_path / "events.jsonl")[-1]["event"] == "stopped"


def test_a_letter_that_the_stream_lacks(whole: bytes, tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    regimes.run(config(name="é☃"), tmp_path, reporters=[PlainLines(stream)])
    assert (tmp_path / "epochs.jsonl").read_bytes() == whole
    (failed,) = failures(tmp_path)
    assert failed["reporter"] == "PlainLines"
    assert "UnicodeEncodeError" in failed["why"]


# -- the command -----------------------------------------------------------------------------


def shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of bash; "regimes" in it is the command, its exit code is written to ``code``."""
    started = f"{sys.executable} -m regimes"
    return subprocess.run(
        ["bash", "-c", line.replace("REGIMES", started)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )


def run_line(tmp_path: Path, rest: str, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "c.toml").write_text(to_toml(config(name="é☃")), encoding="utf-8")
    return shell(f"(REGIMES run c.toml --out run; echo $? >code) {rest}", tmp_path, **env)


PLACES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], bool]]] = {
    "closed pipe": ("| true", lambda failed: len(failed) == 1),
    "full disk": (">/dev/full", lambda failed: len(failed) == 1),
    "closed": (">&-", lambda failed: not failed),  # nothing to say it to, nothing that fails
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    PLACES,
)
def test_standard_output_does_not_end_a_training(place: str, whole: bytes, tmp_path: Path) -> None:
    rest, right = PLACES[place]
    done = run_line(tmp_path, rest)
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert (tmp_path / "run/epochs.jsonl").read_bytes() == whole
    assert right(failures(tmp_path / "run"))
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("PlainLines failed and is left out") == len(failures(tmp_path / "run"))


@pytest.mark.slow
def test_an_ascii_output_spells_the_letter_out(whole: bytes, tmp_path: Path) -> None:
    done = run_line(tmp_path, "", PYTHONIOENCODING="ascii")
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert r"\xe9\u2603 (seed 0)" in done.stdout
    assert not failures(tmp_path / "run")
    assert (tmp_path / "run/epochs.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("start", "unbuffered"), [("REGIMES presets", ""), ("REGIMES --help", "1")]
)
def test_commands_that_only_print_end_quietly(start: str, unbuffered: str, tmp_path: Path) -> None:
    done = shell(f"({start}; echo $? >code) | true", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == ""
    assert (tmp_path / "code").read_text() == "141\n"  # 128 + SIGPIPE
    done = shell(f"{start} >/dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.slow
def test_an_ablation_goes_on_without_its_output(tmp_path: Path) -> None:
    words = " ".join([*WORDS, "--seeds", "2", "--schedules", "low", "--out", "runs"])
    done = shell(f"(REGIMES ablate smoke {words}; echo $? >code) | true", tmp_path)
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert done.stderr.count("standard output cannot be written") == 1
    assert "Traceback" not in done.stderr
    assert {r.finished for r in regimes.load_all(tmp_path / "runs")} == {True}
