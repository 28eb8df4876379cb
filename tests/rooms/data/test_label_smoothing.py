"""Label smoothing: the loss of a formula, in training alone; refused where nothing would do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError
from regimes.data import load_task
from regimes.presets import get_preset

WORDS = ["data.train_size=80", "data.test_size=40", "epochs=1", "optimizer.decay_epochs=[]"]


def small(*words: str) -> RunConfig:
    return override(get_preset("smoke"), [*WORDS, "policy=static", *words])


def test_all_classes_have_a_share_of_the_target() -> None:
    task = load_task(small("label_smoothing=0.2"))
    model, x, y = nn.Linear(6, 10).double(), torch.randn(7, 6).double(), torch.arange(7)
    logs = model(x).log_softmax(1)
    expected = -0.8 * logs[torch.arange(7), y].mean() - 0.2 * logs.mean()
    torch.testing.assert_close(task.loss(model, x, y), expected, rtol=1e-12, atol=0)


def test_one_pass_serves_all_workers_and_evaluation_has_none(tmp_path: Path) -> None:
    """At a rate of nearly 0 the test loss is that of the start, whatever the training loss is."""
    still = ["optimizer.lr=1e-12", "optimizer.warmup_from=none", "label_smoothing=0.5"]
    runs = {
        name: regimes.run(small(*words), tmp_path / name)
        for name, words in {
            "one pass": still,
            "each worker": [*still, "union_pass=false"],
            "none": still[:2],
        }.items()
    }
    assert runs["one pass"].header["world"]["union_pass"]
    one, each, none = (record.epochs.iloc[-1] for record in runs.values())
    assert one["train_loss"] == pytest.approx(each["train_loss"], rel=1e-5)
    assert one["train_loss"] != pytest.approx(none["train_loss"], rel=1e-3)
    assert one["test_loss"] == pytest.approx(none["test_loss"], rel=1e-5)


def test_it_is_refused_for_texts_and_for_a_loss_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing = 0\.1: expected none, .* a text"):
        load_task(override(get_preset("lm-smoke"), ["label_smoothing=0.1"]))
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
    with pytest.raises(ConfigError, match=r"label_smoothing = 0\.1.*expected 0\.0"):
        regimes.simulate(
            nn.Linear(4, 2),
            data,
            data,
            out=tmp_path / "own",
            workers=2,
            batch_size=4,
            set={"label_smoothing": 0.1},
        )
