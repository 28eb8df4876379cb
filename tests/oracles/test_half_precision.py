"""Parameters in bfloat16 and float16 in the trainer (oracles: a bare loop over copies of the model;
the same updates in float64, within the rounding of float32; two processes)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from configs import gpt, smoke
from forked import train
from runs import resumed_alike, rows, weights
from torch import Tensor
from torch.nn import functional as F

import regimes
from regimes.base.config import RunConfig, override
from regimes.base.errors import ConfigError
from regimes.cli import html_report as report
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.exchange import Exchange
from regimes.compression.powersgd import PowerState
from regimes.compression.reducer import Reducer
from regimes.cost.cases import make_cases
from regimes.training import build

HALVES = ["bfloat16", "float16"]


def config(dtype: str, *settings: str, epochs: int = 2) -> RunConfig:
    return smoke(f"dtype={dtype}", "optimizer.decay_epochs=[1]", *settings, epochs=epochs)


@pytest.mark.parametrize("dtype", HALVES)
def test_dense_is_the_mean_in_float32_of_each_workers_gradient(dtype: str, tmp_path: Path) -> None:
    c = config(dtype, "policy=static", "policy.level=dense", "optimizer.nesterov=false")
    regimes.run(c, tmp_path / "run")
    parts = build.prepare_run(c)
    half = getattr(torch, dtype)
    model = parts.task.build(c).to(half)
    options = {"momentum": 0.9, "weight_decay": 1e-4, "foreach": True}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, **options)
    for epoch, row in enumerate(rows(tmp_path / "run")):
        sgd.param_groups[0]["lr"] = row["lr"]
        for x, y in parts.batches.epoch(epoch, range(c.workers)):
            gradients: list[list[Tensor]] = []
            for worker in range(c.workers):
                own = model if worker == 0 else copy.deepcopy(model)  # statistics: worker 0's
                own.zero_grad()
                F.cross_entropy(own(x[worker]).float(), y[worker]).backward()
                gradients.append([p.grad.float() for p in own.parameters() if p.grad is not None])
            for p, *each in zip(model.parameters(), *gradients, strict=True):
                p.grad = torch.stack(each).mean(0).to(half)
            sgd.step()
    ours = weights(tmp_path / "run")
    for name, theirs in model.state_dict().items():
        assert ours[name].dtype == theirs.dtype
        assert torch.equal(ours[name], theirs), name


def one_width(name: str, layers: list[Layer]) -> int:
    return next(layer.matrix[1] for layer in layers if layer.name == name)


@pytest.mark.parametrize("name", ["powersgd", "topk", "sign"])
def test_compression_is_in_float32(name: str) -> None:
    """Updates and residuals of three steps of the same gradients, against float64: what float32
    rounds is 1e-5 of them; half precision would round 4e-3."""
    level = {"powersgd": 2, "topk": 10, "sign": 1}[name]
    table = f"compressor={{name='{name}'}}", f"levels={{low={level}, high={level}}}"
    parts = build.prepare_run(config("bfloat16", "policy=static", "policy.level=low", *table))
    gradients, half = parts.gradients, parts.reducer
    assert not gradients.union
    exact = Reducer(parts.plug_ins.compressor, parts.layers, World(4), parts.config.seed)
    exact.world.meter.dtype = torch.float64
    levels = [level if layer.compressed else "dense" for layer in parts.layers]
    for step, (x, y) in zip(range(3), parts.batches.epoch(0, range(4)), strict=False):
        losses = gradients.compute_gradients(x, y, 0, step)
        assert (gradients.stack.dtype, losses.dtype) == (torch.float32, torch.float32)
        wide = [layer.double() for layer in gradients.layers]
        if step == 0 and name == "powersgd":  # random numbers of either type differ
            for one, other in zip(half.states, exact.states, strict=True):
                if isinstance(one, PowerState):
                    one.q = torch.eye(level, one_width(one.key[1], parts.layers))
                    other.q = one.q.double()
        ours, _ = Exchange(half).exchange_step(gradients.layers, levels, losses, gradients.stack)
        theirs, _ = Exchange(exact).exchange_step(
            wide, levels, losses.double(), gradients.stack.double()
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
        for one, other in zip(half.residuals(), exact.residuals(), strict=True):
            if one is not None:
                torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_two_processes_are_the_simulation(tmp_path: Path) -> None:
    c = config("bfloat16", "workers=2", "compressor=topk", "levels={low=50,high=5}")
    regimes.run(c, tmp_path / "one")
    train(c, tmp_path / "two", 2)
    for mine, theirs in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert mine["layers"]["level"] == theirs["layers"]["level"]
        assert (mine["floats"], mine["bytes"]) == (theirs["floats"], theirs["bytes"])
    other = weights(tmp_path / "two")
    for key, tensor in weights(tmp_path / "one").items():
        assert torch.equal(tensor, other[key]), key


def test_a_run_in_half_precision_resumes_in_the_same_bits(tmp_path: Path) -> None:
    adamw = "optimizer={name='adamw', lr=0.003, decay_epochs=[2], warmup_epochs=1}"
    resumed_alike(config("bfloat16", adamw, epochs=3), tmp_path, 1)


@pytest.mark.slow
def test_a_language_model_learns_and_counts_what_travels(tmp_path: Path) -> None:
    """Traffic is of float32, half of what float64 sends; the loss follows that of float32."""
    runs = {}
    for dtype in ("bfloat16", "float32"):
        c = override(gpt(), [f"dtype={dtype}", "policy=static", "policy.level=low"])
        runs[dtype] = regimes.run(c, tmp_path / dtype).epochs
    for column in ("floats", "bytes"):
        assert (runs["bfloat16"][column] == runs["float32"][column]).all()
    network = regimes.Network.parse("100Mbit/s,50us")
    dense = [make_cases([regimes.load(tmp_path / d)])[0].work.bytes for d in runs]
    assert dense[0] == dense[1]
    report.write_report(
        tmp_path / "bfloat16", str(network).replace(" µs", "us"), tmp_path / "page.html"
    )
    ours, theirs = (runs[d]["test_loss"].to_numpy() for d in ("bfloat16", "float32"))
    assert abs(ours / theirs - 1).max() < 0.05
    assert (ours != theirs).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_precision_within_float32_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match='"strict", as dtype'):
        build.prepare_run(override(config(dtype), ["precision=tf32"]))
