"""Models whose modules keep tensors that a pass has computed, which torch does not copy: old
weight_norm, spectral_norm and prune, kept activations (oracle: a bare loop of torch)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune, spectral_norm

import regimes
from regimes.base.errors import ConfigError
from regimes.training.simulate import own_training

SETTINGS: dict[str, Any] = {
    "workers": 1,
    "batch_size": 8,
    "epochs": 2,
    "policy": {"name": "static", "level": "dense"},
    "optimizer": {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
    "set": {"dtype": "float64", "device": "cpu"},
}


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 6, generator=generator).double()
    return x, x[:, :3].argmax(1)


class Keeps(nn.Module):
    """Keeps what a pass has computed, as ``keep`` puts it."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.keep, self.kept = nn.Linear(6, 8), keep, None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.kept = self.keep(x)
        return x


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises the parametrization
        return nn.utils.weight_norm(nn.Linear(6, 8))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": normed,
    "spectral_norm": lambda: spectral_norm(nn.Linear(6, 8)),
    "prune": lambda: prune.l1_unstructured(nn.Linear(6, 8), "weight", 0.5),
    "an activation": lambda: Keeps(lambda x: x),
    "several": lambda: Keeps(lambda x: [{"a": (x, x.square())}]),
    "in an object": lambda: Keeps(lambda x: SimpleNamespace(first=x)),
}


def network(kind: str) -> nn.Module:
    """After a pass of the user's own."""
    torch.manual_seed(5)
    model = nn.Sequential(KINDS[kind](), nn.Tanh(), nn.Linear(8, 3)).double()
    model(points()[0][:4])
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_trains_as_the_model_does(kind: str, tmp_path: Path) -> None:
    regimes.simulate(network(kind), points(), points(), out=tmp_path, **SETTINGS)
    config, task = own_training(network(kind), points(), points(), **SETTINGS)
    batches = task.batches(config, torch.device("cpu"), torch.float64)
    model = network(kind)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for epoch in range(2):
        model.train()
        for x, y in batches.epoch(epoch, [0]):
            sgd.zero_grad()
            F.cross_entropy(model(x[0]), y[0]).backward()
            sgd.step()
        model.eval()
    found = weights(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


class Once(nn.Module):
    """Reads what it has computed before."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.scaled = self.inner.weight * 2 if value is None else value

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.scaled, Tensor):
            return F.linear(x, self.scaled.to(x.dtype))
        return self.inner(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Once, "'0.scaled' keeps a tensor that an earlier pass has computed.*compute it in"),
        (
            lambda: Once(threading.Lock()),
            r"'0.scaled', of lock, cannot be copied.*remove it before",
        ),
    ],
)
def test_what_no_copy_can_have_is_named(
    model: Callable[[], nn.Module], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        regimes.simulate(
            nn.Sequential(model()), points(), points(), out=tmp_path / "run", **SETTINGS
        )
    assert not (tmp_path / "run" / "run.json").exists()
