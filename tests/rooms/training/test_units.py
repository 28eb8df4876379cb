"""Units of N steps against whole epochs: the same training, measured and decided more often."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import lstm as text_config
from configs import smoke as config
from corpora import random_walk
from runs import weights

import regimes
from regimes.base.errors import ConfigError
from regimes.policies import make_policy
from regimes.policies.detectors import NormChange
from regimes.policies.replay.detect import default_rules, make_rule
from regimes.policies.replay.replay import replay_rule
from regimes.records import read_lines, unit_name
from regimes.training import loop
from regimes.training.build import prepare_run
from regimes.training.units import Units

torch.set_num_threads(1)
STATIC = ("policy=static", "policy.level=high")  # 120 images, 4 x 8: 3 steps per epoch


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_walk(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(
    ("per_epoch", "size", "total"),
    [(12, 5, 288), (7, 7, 20), (3, 10, 31), (5, None, 22), (4, 1, 4)],
)
def test_units_cover_each_step_once(per_epoch: int, size: int | None, total: int) -> None:
    units = Units(per_epoch, size, total)
    parts = [part for unit in range(len(units)) for part in units.epoch_spans(unit)]
    steps = [e * per_epoch + s for e, first, stop in parts for s in range(first, stop)]
    assert steps == list(range(total))
    assert len(units) == math.ceil(total / (size or per_epoch))


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 100))])
def test_the_unit_does_not_change_the_training(size: int, tmp_path: Path) -> None:
    """A static level, a rate per step: the weights are those of whole epochs, bit for bit."""
    rate = ("optimizer.per=step", "optimizer.schedule=cosine")
    regimes.run(config(*STATIC, *rate), tmp_path / "epochs")
    record = regimes.run(config(*STATIC, *rate, f"unit_steps={size}"), tmp_path / "units")
    for name, tensor in weights(tmp_path / "epochs").items():
        assert torch.equal(tensor, weights(tmp_path / "units")[name])
    assert len(record.rows) == math.ceil(12 / size) == record.header["units"]
    assert [row["unit"]["stop"] for row in record.rows][-1] == 12
    assert record.epochs["floats"].sum() == sum(
        row["floats"] for row in read_lines(tmp_path / "epochs" / "epochs.jsonl")
    )
    assert unit_name(record.config) == f"unit of {size} steps"
    assert record.finished


@pytest.mark.parametrize("size", [4, 5])
def test_the_last_step_of_a_run_is_the_last(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There workers that train by themselves synchronise for good."""
    made, original = [], loop.Minibatch

    def make(*values: Any) -> loop.Minibatch:
        made.append(original(*values))
        return made[-1]

    monkeypatch.setattr(loop, "Minibatch", make)
    regimes.run(config(*STATIC, f"unit_steps={size}", f"steps={2 * size}"), tmp_path)
    assert [batch.last for batch in made] == [False] * (2 * size - 1) + [True]


def test_a_hidden_state_runs_on_from_unit_to_unit(text: Path, tmp_path: Path) -> None:
    for model in ("model.dropout=0.0", "model.dropout=0.2"):  # a union pass; worker by worker
        c = (model, *STATIC)
        regimes.run(text_config(text, *c), tmp_path / model / "epochs")
        regimes.run(text_config(text, *c, "unit_steps=4"), tmp_path / model / "units")
        for name, tensor in weights(tmp_path / model / "epochs").items():
            assert torch.equal(tensor, weights(tmp_path / model / "units")[name])


def test_a_policy_decides_per_unit_and_replays(tmp_path: Path) -> None:
    c = config("unit_steps=2")
    record = regimes.run(c, tmp_path / "run")
    found = replay_rule(record, make_policy(c.policy))
    live = record.layers.loc[record.layers["layer"].isin(found["layer"])]
    assert found["level"].tolist() == live["level"].tolist()
    assert found["epoch"].nunique() == 6


def test_baselines_are_as_long_as_the_detector_in_units(tmp_path: Path) -> None:
    """The run's length in units, not in epochs: of twelve units half are six."""
    record = regimes.run(config("unit_steps=1"), tmp_path / "run")
    for words in ("first-share:share=0.5", "random-windows:share=0.5"):
        found = replay_rule(record, make_rule(words, record))
        assert found.groupby("epoch")["critical"].first().sum() == 6
    assert make_rule(default_rules([record])[0], record) == NormChange(interval=1)


def test_a_batch_policy_within_units(tmp_path: Path) -> None:
    """Twice the batch takes half the steps of a unit, at the same place of the data."""
    batch = (
        "batch_levels={low=8,high=16}",
        'batch_policy={name="static",level="high"}',
        "data.train_size=320",
        "unit_steps=2",
        *STATIC,
    )
    record = regimes.run(config(*batch), tmp_path / "run")
    assert [row["steps"] for row in record.rows] == [1] * 20
    whole = regimes.run(config(*batch[:3], *STATIC), tmp_path / "epochs")
    assert [row["steps"] for row in whole.rows] == [5] * 4
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(tensor, weights(tmp_path / "epochs")[name])


def test_units_that_do_not_fit_the_batches_are_refused() -> None:
    batch = ("batch_levels={low=8,high=16}", 'batch_policy={name="static",level="high"}')
    with pytest.raises(ConfigError, match="unit_steps = 3: expected a multiple of 2"):
        prepare_run(config(*batch, "unit_steps=3"))


def test_a_window_after_the_run_is_refused() -> None:
    """It counts units: the run has six."""
    late = ("policy=windows", "policy.windows=[[0,2],[6,8]]")
    assert len(prepare_run(config(*late, "unit_steps=1")).units) == 12
    with pytest.raises(ConfigError, match=r"policy\.windows = 6: expected a window"):
        prepare_run(config(*late, "unit_steps=2"))


# -- a dense start ---------------------------------------------------------------------------


def test_a_dense_start_is_counted(tmp_path: Path) -> None:
    """Four steps dense, then rank 1: the floats are the sum of the two tables."""
    record = regimes.run(config(*STATIC, "start_compressing_after=4"), tmp_path / "run")
    dense, high = (record.header["per_step"][level]["floats"] for level in ("dense", "high"))
    assert record.epochs["floats"].tolist() == [3 * dense, dense + 2 * high, 3 * high, 3 * high]


def test_a_start_as_long_as_the_run_is_a_dense_run(tmp_path: Path) -> None:
    regimes.run(config(*STATIC, "start_compressing_after=99"), tmp_path / "late")
    regimes.run(config("policy=static", "policy.level=dense"), tmp_path / "dense")
    for name, tensor in weights(tmp_path / "late").items():
        assert torch.equal(tensor, weights(tmp_path / "dense")[name])
