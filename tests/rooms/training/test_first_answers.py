"""What a user's first mistakes are answered with, and reporters that a configuration names."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smoke
from torch import Tensor, nn

import regimes
from regimes.base.errors import ConfigError, TrainingError
from regimes.job.recorder import record_options

STATIC = {"name": "static", "level": "low"}


def points(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def simulated(out: Path, model: Any = None, train: Any = None, **changes: Any) -> regimes.Record:
    torch.manual_seed(0)
    model = model or nn.Linear(6, 3)
    options = {"workers": 2, "batch_size": 8, "epochs": 2, "policy": STATIC, **changes}
    return regimes.simulate(model, train or points(), points(16), out=out, **options)


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["adamm", {"name": "adamm"}, {"name": "adamm", "lr": 0.1}])
def test_an_unknown_optimizer_is_named_before_its_rate_is_missed(
    given: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"unknown optimizer 'adamm'.*adamw"):
        simulated(tmp_path / "run", optimizer=given)
    with pytest.raises(ConfigError, match="'adamw': its learning rate is missing"):
        simulated(tmp_path / "run", optimizer="adamw")


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    adamw = {"name": "adamw", "lr": 0.01, "momentum": 0.5}
    with pytest.raises(ConfigError, match=r"optimizer.momentum = 0.5: it has no effect with adamw"):
        simulated(tmp_path / "run", optimizer=adamw)
    with pytest.raises(ConfigError, match="set: epochs is an argument of its own too"):
        simulated(tmp_path / "run", set={"epochs": 1})
    for given in ({"reporters": "tensorboard"}, {"reporters": ("wandb", "tensorboard")}):
        with pytest.raises(ConfigError, match=r"RecordOptions.reporters = .*: expected a folder"):
            record_options(regimes.RecordOptions(**given))


@pytest.mark.filterwarnings("ignore:policy. accordion chose")
def test_a_policy_that_compares_nothing_is_said(tmp_path: Path) -> None:
    """The defaults are such: ten epochs, and an interval of ten."""
    with pytest.warns(UserWarning, match="it has compared nothing"):
        simulated(tmp_path / "run", policy=None, epochs=10, compressor=regimes.PowerSGD())


class Pair(nn.Module):
    """Gives a tuple, as many models of others do."""

    def __init__(self, kind: type = tuple) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind([self.inner(x), x])


@pytest.mark.parametrize("kind", [tuple, list])
def test_an_output_of_several_parts_asks_for_a_loss(kind: type, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"the output is a {kind.__name__}: pass loss="):
        simulated(tmp_path / "run", Pair(kind))
    entropy = torch.nn.functional.cross_entropy
    record = simulated(
        tmp_path / "own", Pair(kind), loss=lambda output, target: entropy(output[0], target)
    )
    assert len(record.rows) == 2


@pytest.mark.parametrize(("value", "place"), [(torch.nan, 0), (torch.inf, 40), (torch.nan, 63)])
def test_data_that_are_not_finite_are_named_and_not_the_rate(
    place: int, value: float, tmp_path: Path
) -> None:
    """In the first step or a later one."""
    x, y = points()
    x[place, 2] = value
    with pytest.raises(TrainingError, match=r"the samples of worker \d in epoch 0, step \d have"):
        simulated(tmp_path / "run", train=(x, y))


def test_a_model_that_is_not_finite_is_told_from_its_data(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="before any update, and on finite data"):
        simulated(tmp_path / "run", model)


# -- reporters -------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders in which a stand-in for TensorBoard has written."""
    folders: list[str] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            folders.append(folder)

        def add_scalar(self, name: str, value: float, epoch: int) -> None: ...
        def flush(self) -> None: ...
        def close(self) -> None: ...

    stand_in = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    return folders


def test_reporters_of_a_configuration_report(tmp_path: Path, written: list[str]) -> None:
    """Beside those that are passed, and none."""
    seen: list[int] = []

    class Mine:
        def start(self, header: Any, rows: Any) -> None: ...
        def step(self, epoch: int, done: int, steps: int) -> None: ...
        def stop(self, message: str) -> None: ...
        def epoch(self, row: Any, seconds: Any) -> None:
            seen.append(row["epoch"])

    named = {"reporters": ["tensorboard"]}
    simulated(tmp_path / "a", set=named)
    simulated(tmp_path / "b", set=named, reporters=[Mine()])
    regimes.run(smoke("epochs=1", 'reporters=["tensorboard"]'), tmp_path / "c", reporters=[])
    assert written == [str(tmp_path / name / "tensorboard") for name in "abc"]
    assert seen == [0, 1]


def test_a_reporter_that_there_is_not_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown reporter 'tensorboardd'"):
        simulated(tmp_path / "run", set={"reporters": ["tensorboardd"]})
    with pytest.raises(ConfigError, match="unknown reporter 'tensorboardd'"):
        regimes.run(smoke("epochs=1", 'reporters=["tensorboardd"]'), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"reporters = .*expected a list, each a Reporter"):
        simulated(tmp_path / "run", reporters=["tensorboard"])
    assert not (tmp_path / "run").exists()
