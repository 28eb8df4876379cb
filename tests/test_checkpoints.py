"""When a checkpoint is written: by units, by time, at the end; every process as process 0 says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_train import config

import regimes
from regimes.config import RunConfig, override, to_dict
from regimes.errors import ConfigError
from regimes.training import loop
from regimes.training.build import Run, prepare
from regimes.training.termination import GracefulShutdown


@pytest.mark.parametrize(
    ("settings", "saved"),
    [([], [1, 2, 3, 4, 5, 6, 7]), (["checkpoint_seconds=20"], [2, 4, 6, 7]),
     (["checkpoint_seconds=25"], [3, 6, 7]), (["checkpoint_seconds=1e9"], [7]),
     (["checkpoint_every=2", "checkpoint_seconds=25"], [4, 7]),
     (["checkpoint_every=3", "checkpoint_seconds=0"], [3, 6, 7])],
)  # fmt: skip
def test_checkpoints_by_units_and_by_time(
    settings: list[str], saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unit takes ten seconds."""
    now, found, unit = [0.0], [], loop._unit

    def slow(run: Run, number: int, *rest: Any) -> Any:
        if number == 0:
            run.saved = 0.0  # it has started just now
        now[0] += 10.0
        return unit(run, number, *rest)

    monkeypatch.setattr(loop, "_unit", slow)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(loop, "save", lambda run, out: found.append(len(run.rows)))
    c = override(config(epochs=7), ["unit_steps=none", "policy=static", *settings])
    regimes.run(c, tmp_path / "run")
    assert found == saved


@pytest.mark.parametrize("due", [True, False])
def test_all_processes_save_when_process_0_does(due: bool) -> None:
    run = prepare(config())
    run.header["config"] = to_dict(run.config)
    run.world.gather_object = lambda mine: [(False, due, 5), (True, not due, 5)]
    assert loop._met(run, 0, GracefulShutdown()) == (True, due)


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_seconds = .*: expected a number"):
        regimes.run(override(RunConfig(), [f"checkpoint_seconds={seconds}"]), "never")
