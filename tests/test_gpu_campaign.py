"""The campaign for a lent GPU, rehearsed on the CPU without the packages that it must not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LACKING = """
import runpy, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tyro", "tomli_w", "submitit", "pyhessian"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Lacking())
sys.argv = ["benchmarks.gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def campaign(out: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of one call that has ended well."""
    done = subprocess.run(
        [sys.executable, "-c", LACKING, "--out", str(out), *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(x) for x in (out / "lines.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_cut_of_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    words = ("--parts", "correct", "--only", "decisions")
    rows = campaign(tmp_path, *words)
    assert [(row["name"], row["ok"]) for row in rows] == [("decisions", True)]
    with (tmp_path / "lines.jsonl").open("a") as lines:
        lines.write('{"part": "correct", "name": "torn')
    again = campaign_lines(tmp_path, *words, "--slice", "1")
    assert again == rows  # not measured again


def campaign_lines(out: Path, *words: str) -> list[dict[str, Any]]:
    subprocess.run([sys.executable, "-c", LACKING, "--out", str(out), *words], cwd=ROOT, check=True)
    lines = (out / "lines.jsonl").read_text().splitlines()
    return [json.loads(x) for x in lines if x.endswith("}")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    rows = campaign(tmp_path)
    assert {row["part"] for row in rows} == {"correct", "speed", "tuning", "study"}
    bad = [row for row in rows if not row["ok"] and "ompile" not in row["name"]]
    assert not [row for row in bad if "not installed" not in row["detail"]], bad
    arms = {row["name"].rpartition("/")[0] for row in rows if row["part"] == "study"}
    assert len(arms) == 12
