"""A folder with a ``rich.py`` in it: commands that read run none of it; plug-ins still work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from plain import record as make

from regimes.records import read_header

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "data/reference/smoke-overlap.tar.xz"
# what a command imports; what Python has before; what others try to import and do without
TRAPS = (
    "rich",
    "jinja2",
    "json",
    "pandas",
    "tyro",
    "typing",
    "__future__",
    "dataclasses",
    "tomllib",
    "numexpr",
    "bottleneck",
    "IPython",
)
SCRIPT = shutil.which("regimes", path=str(Path(sys.executable).parent))
STARTS = {"module": [sys.executable, "-m", "regimes"], "script": [str(SCRIPT)]}
SOME = ["module", pytest.param("script", marks=pytest.mark.slow)]
READING = {
    "watch": ["watch", "run", "--once"],
    "report": ["report", str(ARCHIVE)],
    "detect": ["detect", "records"],
    "cost": ["cost", str(ARCHIVE)],
}
MINE = """
import dataclasses
from regimes.policies import Static

@dataclasses.dataclass(frozen=True)
class Policy(Static):
    pass
"""


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with a run, and modules that leave a mark when they are imported."""
    make(tmp_path / "run", epochs=0)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "records", filter="data")
    for name in TRAPS:
        text = f"open({str(tmp_path / 'marks')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def started(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env, check=False)


@pytest.mark.parametrize("start", SOME)
@pytest.mark.parametrize(
    "what",
    ["watch", "cost", *(pytest.param(x, marks=pytest.mark.slow) for x in ("report", "detect"))],
)
def test_reading_commands_run_nothing_of_the_current_folder(
    what: str, start: str, trapped: Path
) -> None:
    if start == "script" and SCRIPT is None:
        pytest.skip("the script is not installed here")
    done = started([*STARTS[start], *READING[what]], trapped)
    assert not (trapped / "marks").exists(), (trapped / "marks").read_text()
    if what == "watch":  # the run is a stub, read far enough to say so
        assert done.returncode != 9
    else:
        assert done.returncode == 0, done.stderr


TRAINING = {
    "run": ["run", "smoke"],
    "ablate": ["ablate", "lm-demo"],
    "tune": ["tune", "lm-demo"],
    "harm": ["harm", "smoke"],
    "plan": ["plan", "smoke", "--link", "1Gbit/s"],
    "cost": ["cost", "smoke"],
}


@pytest.mark.parametrize("words", TRAINING.values(), ids=TRAINING)
def test_a_command_that_trains_takes_a_plug_in_of_the_current_folder(
    words: list[str], tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as a script, which puts its own folder on the path, and not the current one."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "mine.py").write_text(
        "import pathlib\npathlib.Path('mark').touch()\nraise ImportError('not yet')\n"
    )
    assert command(*words, "--set", "compressor=mine:Mine").returncode
    assert (tmp_path / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("start", SOME)
def test_a_plug_in_beside_the_user_comes_after_all_that_is_installed(
    start: str, tmp_path: Path
) -> None:
    if start == "script" and SCRIPT is None:
        pytest.skip("the script is not installed here")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rich.py").write_text("raise SystemExit(9)\n")
    short = ["--set", "epochs=1", "--set", "data.train_size=40", "--set", "model.width=2"]
    words = ["run", "smoke", *short, "--set", "policy=mine:Policy", "--out", "run"]
    done = started([*STARTS[start], *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_header(tmp_path / "run")["config"]["policy"]["name"] == "mine:Policy"


def test_a_checkout_runs_where_it_lies(tmp_path: Path) -> None:
    """Not installed, found through the current folder that ``python -m`` puts on the path."""
    (tmp_path / "regimes").symlink_to(ROOT / "regimes")
    code = "import os, sys; others = [p for p in sys.path if not os.path.isdir(p + '/regimes')]; "
    code += (
        "sys.path = ['', *(p for p in others if p)]; sys.argv = ['regimes', 'presets', 'smoke']; "
    )
    code += "import runpy; runpy.run_module('regimes', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "epochs" in done.stdout
