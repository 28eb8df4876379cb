"""``compile``: the same training as without, within float32's rounding; what cannot be compiled.

In processes of their own: the tests' checks of shapes cannot be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regimes.records import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DENSE = ("steps=4", "unit_steps=1", "policy=static", "policy.level=dense", "data.train_size=160")


def run(out: Path, *settings: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = [w for s in (*DENSE, *settings) for w in ("--set", s)]
    command = [sys.executable, "-m", "regimes", "run", "smoke", "--quiet", "--out", str(out)]
    return subprocess.run(
        [*command, *words], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("passes", ["true", "false"])
def test_a_compiled_run_is_the_run(passes: str, tmp_path: Path) -> None:
    losses = []
    for compiled in ("true", "false"):
        done = run(tmp_path / compiled, f"union_pass={passes}", f"compile={compiled}")
        assert done.returncode == 0, done.stderr
        rows = read_lines(tmp_path / compiled / "epochs.jsonl")
        losses.append([row[k] for row in rows for k in ("train_loss", "test_loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != losses[1]  # the setting does something


def test_what_cannot_be_compiled_is_said_before_any_record(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done = run(
        tmp_path / "run", "compile=true", CXX="/no-such-compiler", TORCHINDUCTOR_CACHE_DIR=cache
    )
    assert done.returncode == 2, done.stderr
    (said,) = done.stderr.strip().splitlines()
    assert "compile = True: expected a model that torch can compile" in said
    assert "/no-such-compiler" in said
    assert not (tmp_path / "run").exists()
