"""Cases of ``regimes.simulate``: a user's own module, data, loss and optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import regimes
from benchmarks.same_bits.case import Case, Place
from benchmarks.same_bits.trainer import Run, Watch


class Pairs(Dataset):
    """Samples that are drawn anew each time, from torch's random numbers."""

    def __init__(self, first: int, count: int) -> None:
        generator = torch.Generator().manual_seed(first)
        self.x = torch.randn(count, 12, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.x[i] + 0.1 * torch.randn(12)
        return x, self.x[i, :3].argmax()


def tensors(first: int, count: int) -> tuple[Tensor, Tensor]:
    """The same samples without noise."""
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(first))
    return x, x[:, :3].argmax(1)


def network() -> nn.Module:
    """A perceptron."""
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def plain_network() -> nn.Module:
    """A perceptron without random numbers."""
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def over_first(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the samples of class 0 or 1."""
    counts = target < 2
    each = nn.functional.cross_entropy(output, target, reduction="none")
    return (each * counts).sum() / counts.sum()


def first_ones(target: Tensor) -> Tensor:
    """What ``over_first`` divides by."""
    return (target < 2).sum()


@dataclass(frozen=True, kw_only=True)
class Simulated(Run):
    """One call of ``simulate``.

    Attributes:
        data: makes training and test data from a seed and a number of samples.
        options: further arguments.
    """

    model: Callable[[], nn.Module] = network
    data: Callable[[int, int], Any] = tensors
    options: dict[str, Any] = field(default_factory=dict)

    def _run(self, at: Place, watch: Watch) -> None:
        options: dict[str, Any] = {"workers": 4, "batch_size": 8, "epochs": 3, **self.options}
        # the base has a pass for each worker unless it is told otherwise
        options["set"] = {"union_pass": False, **options.get("set", {})}
        regimes.simulate(
            self.model,
            self.data(0, 112),
            self.data(1, 40),
            out=at.folder / "run",
            reporters=[watch],
            **options,
        )


ADAMW = {"name": "adamw", "lr": 0.01}
SWITCHES = {"name": "accordion", "interval": 1}
CASES: list[Case] = [
    Simulated(name="simulate", model=plain_network, options={"policy": SWITCHES}, quick=True),
    Simulated(name="simulate-dropout", options={"policy": SWITCHES}),
    Simulated(
        name="simulate-dataset",
        data=Pairs,
        options={"compressor": "topk", "optimizer": ADAMW, "policy": {"name": "static"}},
    ),
    Simulated(name="simulate-union", model=plain_network, options={"set": {"union_pass": True}}),
    Simulated(
        name="simulate-loss",
        options={"loss": over_first, "loss_weight": first_ones, "optimizer": ADAMW},
    ),
    Simulated(
        name="simulate-local",
        options={
            "policy": {"name": "static"},
            "set": {
                "sync_policy": {"name": "static", "level": "2"},
                "outer.lr": 0.7,
                "outer.momentum": 0.9,
            },
        },
        counted=(1, 2),
    ),
    Simulated(name="simulate-resumed", data=Pairs, counts=(1, 1)),
    Simulated(name="simulate-two-processes", counts=(2,), options={"compressor": "topk"}),
]
