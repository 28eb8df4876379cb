"""Numbers and commands of README and tutorial (oracle: the committed records, recomputed)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from analysis.__main__ import commands
from analysis.common import compare
from regimes import presets
from regimes.presets.language import DEMO_RATES
from regimes.records import load_all

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
REFERENCE = ROOT / "data" / "reference"
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")


def region(name: str) -> str:
    """What stands between two comments."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", TUTORIAL, re.DOTALL)
    assert found, name
    return found[1]


def test_the_table_of_the_demo_is_what_the_records_say() -> None:
    runs = load_all(REFERENCE / "lm-demo.tar.xz")
    rates = {run.name: run.config["optimizer"]["lr"] for run in runs}
    assert rates == DEMO_RATES
    rows, _ = compare.table(runs, ())
    assert {*rows["n"]} == {8}
    for row in rows.to_dict("records"):
        name = row["schedule"]
        numbers = f"{row['bits per byte']:.2f} ± {row['sd']:.2f} | {row['of_low']:.2f}"
        assert f"| `{name}` | {rates[name]:g} | {numbers} |" in region("lm-demo")


def test_the_demos_rates_are_those_that_the_trials_chose() -> None:
    trials = json.loads((REFERENCE / "lm-demo-tune.json").read_text())
    assert trials["chosen"] == {k: f"optimizer.lr={v:g}" for k, v in DEMO_RATES.items()}
    for name, rate in DEMO_RATES.items():
        means = {
            float(t["values"].split("=")[1]): fmean(t["scores"])
            for t in trials["trials"]
            if t["schedule"] == name
        }
        assert len(means) == 6
        assert min(means, key=lambda lr: means[lr]) == rate not in (min(means), max(means))


@pytest.mark.parametrize(
    "module", sorted(set(re.findall(r"(?:-m analysis[. ]|regimes figure )([\w-]+)", README)))
)
def test_every_analysis_can_be_run(module: str) -> None:
    assert module in commands()


@pytest.mark.parametrize("line", [line for line in BLOCKS.splitlines() if "regimes " in line])
def test_every_preset_and_grid_of_a_command_is_there(line: str) -> None:
    words = shlex.split(line.partition("#")[0])
    for verb, known in (("run", presets.PRESETS), ("ablate", presets.GRIDS)):
        if verb in words and not words[words.index(verb) + 1].endswith(".toml"):
            assert words[words.index(verb) + 1] in known


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_comparison_of_the_tutorial_shows_its_effect(tmp_path: Path) -> None:
    """With other seeds than the page's: low compression is shown to be better than high."""
    (line,) = re.findall(r"^regimes (ablate .* --out) runs/tutorial$", TUTORIAL, re.MULTILINE)
    words = [*shlex.split(line), str(tmp_path), "--first-seed", "40"]
    subprocess.run([sys.executable, "-m", "regimes", *words], check=True, capture_output=True)
    _, pairs = compare.table(load_all(tmp_path), ())
    row = pairs.set_index("comparison").loc["low - high"]
    assert row["ci_low"] > 0
