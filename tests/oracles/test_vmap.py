"""Gradients of all workers in one pass of ``torch.func.vmap`` (oracle: worker by worker)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from configs import smoke
from runs import resumed_alike, same_run, weights
from torch import nn

import regimes
from regimes.config import RunConfig, override
from regimes.errors import ConfigError
from regimes.training import build

TOPK = ("compressor=topk", "levels={low=30, high=5}", "vmap=true")
CASES: dict[str, tuple[str, ...]] = {
    "batchnorm": (),
    "accumulation": (
        "batch_policy={name='windows',windows=[[1,2]],inside='large',outside='small'}",
        "batch_levels={small=8,large=24}",
    ),
    "clip": ("optimizer.clip=0.1",),
    "residual blocks": ("model.name=resnet8",),
    "channels last": ("channels_last=true",),
    "a mean over batches": ("signal=local-mean",),
}


def text(*changes: str) -> RunConfig:
    short = ["dtype=float64", "policy.interval=2"]
    return override(regimes.get_preset("lm-smoke"), [*short, *TOPK, *changes])


@pytest.mark.parametrize("case", CASES)
def test_vmap_equals_worker_by_worker(case: str, tmp_path: Path) -> None:
    c = smoke(*TOPK, *CASES[case])
    assert build.prepare(c).gradients.vmapped
    regimes.run(c, tmp_path / "one pass")
    regimes.run(replace(c, vmap=False), tmp_path / "apart")
    same_run(tmp_path / "one pass", tmp_path / "apart", tolerance=1e-10)


def test_a_language_model(tmp_path: Path) -> None:
    regimes.run(text(), tmp_path / "one pass")
    regimes.run(text("vmap=false"), tmp_path / "apart")
    same_run(tmp_path / "one pass", tmp_path / "apart", tolerance=1e-9)


def test_processes_and_a_stop_have_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = smoke(*TOPK)
    forked.train(c, tmp_path / "one", 1)
    forked.train(c, tmp_path / "two", 2)
    same_run(tmp_path / "one", tmp_path / "two", tolerance=1e-10)
    resumed_alike(c, tmp_path / "stopped", 2, monkeypatch)


def test_running_statistics_follow_the_first_worker(tmp_path: Path) -> None:
    c = smoke(*TOPK, "epochs=1", "policy.interval=1")
    for name, given in (("one pass", c), ("apart", replace(c, vmap=False))):
        regimes.run(given, tmp_path / name)
    one, other = weights(tmp_path / "one pass"), weights(tmp_path / "apart")
    names = [name for name in one if "running" in name or "num_batches" in name]
    assert names
    for name in names:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-12)


class Branches(nn.Module):
    """Looks at its numbers, which ``vmap`` does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if float(y.detach().sum()) > 0 else -y


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("compile=true",), "because of compile"),
        (("precision=bfloat16", "dtype=float32"), "because of precision"),
        (("sync_policy={name='static',level='4'}",), "because of local steps"),
    ],
)
def test_what_has_no_pass_for_all_is_one_sentence(changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build.prepare(smoke(*TOPK, *changes))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Branches(), r"expected a model that torch.func.vmap takes"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)), "draws random numbers"),
    ],
)
def test_a_model_that_cannot_is_refused(model: nn.Module, said: str, tmp_path: Path) -> None:
    x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
    options = {"compressor": "topk", "levels": {"low": 30, "high": 5}, "set": {"vmap": True}}
    policy = {"name": "static", "level": "low"}
    with pytest.raises(ConfigError, match=said):
        regimes.simulate(
            model, (x, y), (x, y), out=tmp_path, workers=2, batch_size=4, policy=policy, **options
        )
