"""The README's numbers and commands (oracle: the committed records, recomputed)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from analysis import compare
from analysis.__main__ import commands
from regimes import presets
from regimes.records import load_all

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = ROOT / "data" / "reference"
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")


def region(name: str) -> str:
    """What stands between two comments."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", README, re.DOTALL)
    assert found, name
    return found[1]


def test_the_first_table_is_what_the_records_say() -> None:
    rows, _ = compare.table(load_all(REFERENCE / "small.tar.xz"))
    for row in rows.to_dict("records"):
        numbers = f"{row['accuracy']:.1f} ± {row['sd']:.1f} | {row['of_low']:.2f}"
        assert f"| `{row['schedule']}` | {numbers} |" in region("small")


@pytest.mark.parametrize(
    "module", sorted(set(re.findall(r"(?:-m analysis[. ]|regimes figure )(\w+)", README)))
)
def test_every_analysis_can_be_run(module: str) -> None:
    assert module in commands()


@pytest.mark.parametrize("line", [line for line in BLOCKS.splitlines() if "regimes " in line])
def test_every_preset_and_grid_of_a_command_is_there(line: str) -> None:
    words = shlex.split(line.partition("#")[0])
    for verb, known in (("run", presets.PRESETS), ("ablate", presets.GRIDS)):
        if verb in words and not words[words.index(verb) + 1].endswith(".toml"):
            assert words[words.index(verb) + 1] in known
