"""What a policy costs, by the benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs import smoke as config

from benchmarks.cases.policies import rows


def test_a_row_adds_up(tmp_path: Path) -> None:
    cell = replace(config("model.width=2", epochs=2), name="mine")
    whole, *late = rows("smoke", cell, tmp_path / "run", 3)
    assert whole.setting == "smoke, mine: norm"
    assert whole.ours > whole.theirs > 0
    assert "decides in" in whole.note
    assert [one.setting for one in late] == [
        f"smoke, mine: a decision after {units} units" for units in ("1,000", "20,000")
    ]
    assert all(one.ours > 0 and one.theirs == late[0].theirs > 0 for one in late)
