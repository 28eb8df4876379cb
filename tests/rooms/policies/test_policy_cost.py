"""What a policy costs, by the benchmark (oracles: bytes counted by hand, a policy that sleeps)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from configs import smoke as config

import regimes
from benchmarks.cases.policies import decision, rows, told
from regimes.policies import Static


def run(tmp_path: Path, **changes: Any) -> Any:
    return regimes.run(replace(config("model.width=2", epochs=2), **changes), tmp_path / "run")


@pytest.mark.parametrize("stride", [1, 2])
def test_statistics_send_what_they_send(stride: int, tmp_path: Path) -> None:
    """One process simulates four workers: each measured step asks for one mean of the gradient."""
    record = run(tmp_path, instruments={"error": {"stride": stride}})
    steps = record.rows[0]["steps"]
    assert told(record) == pytest.approx(-(-steps // stride) / steps)


def test_a_norm_is_told_for_nothing(tmp_path: Path) -> None:
    assert told(run(tmp_path)) == 0


@dataclass(frozen=True)
class Slow(Static):
    """As slow as the history is long, in units of a tenth of a millisecond."""

    def decide(self, history: Any, layers: Any) -> Any:
        end = time.process_time() + 1e-4 * len(history)
        while time.process_time() < end:
            pass
        return super().decide(history, layers)


def test_a_decision_is_timed_late_in_a_run(tmp_path: Path) -> None:
    record = run(tmp_path)
    assert 0.01 <= decision(Slow(), record, 100, 3) < decision(Slow(), record, 400, 3)


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
