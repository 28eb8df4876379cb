"""Runs, branches and searches from Python."""

from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import regimes


class Squares(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(number)]), torch.tensor(number**2)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(1, 10))


def simulate(out: Path) -> regimes.Record:
    record = regimes.simulate(
        make_model,
        Squares(),
        (np.zeros((10, 1)), np.zeros(10, dtype=int)),
        out=out,
        workers=4,
        policy=regimes.Windows(
            ((0, 2),), inside=regimes.TopK(percent=99), outside=regimes.TopK(percent=10)
        ),
        optimizer={"name": "adamw", "lr": 0.001},
        loss=nn.CrossEntropyLoss(),
        metric=lambda output, target: (output.argmax(-1) == target).float().mean(),
        set={"unit_steps": 50},
    )
    assert_type(record, regimes.Record)
    pair = torch.zeros(10, 1), torch.zeros(10)
    return regimes.simulate(nn.Linear(1, 1), pair, pair, out=out / "tensors", policy="static")


def configure(out: str) -> None:
    config = regimes.override(regimes.get_preset("smoke"), ["seed=1"])
    assert_type(config, regimes.RunConfig)
    record = regimes.run(config, out, resume="auto")
    branch = regimes.branch(record, at=3, out=f"{out}-branch", set={"policy.level": "high"})
    assert_type(branch, regimes.Record)


def search(data: Squares) -> None:
    harm = regimes.harm("smoke", minutes=2.0, show=lambda line, share: print(line, share))
    assert_type(harm, regimes.Harm)
    regimes.harm(make_model, data, data, epochs=4, optimizer={"name": "sgd", "lr": 0.1})
    regimes.harm(lambda pulse, seed: float(seed), units=8, metric="accuracy")
    plan = regimes.plan(make_model, data, data, link="100Mbit/s,50us", probe=make_model, workers=2)
    assert_type(plan, regimes.Plan)
    regimes.plan("smoke", link=regimes.Network(1e8, 5e-5), probe={"model.width": 32})
