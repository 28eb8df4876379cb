"""What a policy costs, by the benchmark (oracles: bytes counted by hand, a policy that sleeps)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_train import config

import regimes
from benchmarks.cases.policies import PAST, decision, row, told
from regimes.policies import PastEpoch, Static


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
    def decide(self, history: Any, layers: Any) -> Any:
        assert len(history) == PAST
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return super().decide(history, layers)


def test_a_decision_is_timed_after_a_whole_run() -> None:
    past = [PastEpoch(0.1, 0.1, {}, ["low"])] * 2
    assert 0.01 <= decision(Slow(), past, ["layer"], 3) < 0.1


def test_a_row_adds_up(tmp_path: Path) -> None:
    cell = replace(config("model.width=2", epochs=2), name="mine")
    found = row("smoke", cell, tmp_path / "run", 3)
    assert found.setting == "smoke, mine: norm"
    assert found.ours > found.theirs > 0
    assert "decides in" in found.note
