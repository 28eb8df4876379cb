"""Noise scale, diversity and MSDR: against closed forms, known Gaussians and plain autograd; the
same on two processes; no trace on the run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import smoke
from contexts import without_data as context
from torch import nn

import regimes
from regimes.base.config import RunConfig
from regimes.instruments.base import Reading
from regimes.instruments.noise import Msdr, MsdrGauge, Noise, NoiseGauge
from regimes.training import build

torch.set_num_threads(1)
BOTH = "instruments={noise={}, msdr={}}"


def config(*settings: str) -> RunConfig:
    """The smoke preset, cut short, in float64."""
    static = ("policy=static", "optimizer.decay_epochs=[]", "union_pass=false")
    return smoke(*static, *settings, epochs=2)


def noise(steps: list[np.ndarray], sizes: list[int], stride: int = 1) -> Reading:
    """The reading after steps of gradients, each [workers, N]."""
    gauge = Noise(stride).start(context(len(steps[0]), sizes))
    for stack in steps:
        gauge.step(torch.from_numpy(stack), [])
    return gauge.read(0)


def msdr(updates: np.ndarray, sizes: list[int]) -> Reading:
    """The reading after updates [steps, N]."""
    gauge = Msdr().start(context(1, sizes, union=True))
    for update in torch.from_numpy(updates):
        gauge.step(update[None], list(update.split(sizes)))
    return gauge.read(0)


# -- closed form -----------------------------------------------------------------------------


def test_two_workers_around_a_mean() -> None:
    """g = G + a and G - a: s = |G|^2 + |a|^2, m = |G|^2; unbiased |G|^2 = |G|^2 - |a|^2."""
    mean, apart = np.array([3.0, 0.0, 4.0]), np.array([1.0, 1.0, 0.0])
    reading = noise([np.stack([mean + apart, mean - apart])], [1, 2])
    assert reading.detail["signal"] == pytest.approx([9 - 1, 16 - 1, 25 - 2])
    assert reading.detail["trace"] == pytest.approx([2, 2, 4])
    assert reading.layers["noise_scale"] == pytest.approx([2 / 8, 2 / 15])
    assert reading.model["noise_scale"] == pytest.approx(4 / 23)
    assert reading.model["diversity"] == pytest.approx(27 / (2 * 25))


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_diversity_of_equal_and_of_orthogonal_gradients(workers: int) -> None:
    equal = noise([np.tile([1.0, -2.0, 0.5], (workers, 1))], [3])
    assert equal.model["diversity"] == pytest.approx(1 / workers)
    assert equal.model["noise_scale"] == pytest.approx(0, abs=1e-12)
    orthogonal = noise([np.eye(workers)], [workers])
    assert orthogonal.model["diversity"] == pytest.approx(1)
    assert orthogonal.detail["signal"][-1] == pytest.approx(0, abs=1e-12)


def test_opposite_gradients_have_no_resolved_signal() -> None:
    reading = noise([np.array([[1.0], [-1.0]])], [1])
    assert math.isnan(reading.model["noise_scale"])
    assert math.isnan(reading.model["diversity"])


def test_mccandlish_in_samples() -> None:
    """Appendix A.1 as printed, for b = 32 and W b = 128, gives batch_size times our number."""
    stack = np.random.default_rng(0).normal(0.5, 1, size=(4, 50))
    small, large, b = (stack**2).sum(1).mean(), (stack.mean(0) ** 2).sum(), 32
    squared = (4 * b * large - b * small) / (4 * b - b)
    trace = (small - large) / (1 / b - 1 / (4 * b))
    assert b * noise([stack], [50]).model["noise_scale"] == pytest.approx(trace / squared)


def test_msdr_against_numpy() -> None:
    updates = np.random.default_rng(1).normal(0.3, 1, size=(7, 10))
    reading = msdr(updates, [4, 6])

    def expected(u: np.ndarray) -> float:
        return float(np.linalg.norm(u.mean(0)) / np.sqrt(u.var(0, ddof=1).sum()))

    layers = [expected(updates[:, :4]), expected(updates[:, 4:])]
    assert reading.layers["msdr"] == pytest.approx(layers, rel=1e-10)
    assert reading.model["msdr"] == pytest.approx(expected(updates), rel=1e-10)
    assert reading.detail == {"steps": 7}


def test_msdr_is_free_of_scale_and_of_signs() -> None:
    updates = np.random.default_rng(2).normal(0.3, 1, size=(9, 8))
    flips = np.array([1, -1] * 4)
    ours = msdr(updates, [8]).model["msdr"]
    assert msdr(-1e3 * updates * flips, [8]).model["msdr"] == pytest.approx(ours, rel=1e-9)


EQUAL = [np.tile(np.random.default_rng(seed).normal(size=(1, 3)), (7, 1)) for seed in range(6)]


@pytest.mark.parametrize("updates", [np.ones((1, 3)), np.zeros((4, 3)), *EQUAL])
def test_msdr_without_spread_is_nan(updates: np.ndarray) -> None:
    assert math.isnan(msdr(updates, [3]).model["msdr"])


def test_reading_starts_the_next_epoch() -> None:
    draw = np.random.default_rng(3)
    gauge, other = (NoiseGauge(1, context(2, [5])) for _ in range(2))
    ratio, fresh = MsdrGauge(), MsdrGauge()
    for epoch in range(2):
        for _ in range(3):
            stack = torch.from_numpy(draw.normal(1, 1, size=(2, 5)))
            for g in (gauge, ratio, *([other, fresh] if epoch else [])):
                g.step(stack, [stack.mean(0)])
        first, second = gauge.read(epoch), ratio.read(epoch)
    assert first == other.read(1)
    assert second == fresh.read(1)


def test_stride_measures_every_so_many_steps() -> None:
    steps = [np.random.default_rng(i).normal(1, 1, size=(3, 4)) for i in range(5)]
    assert noise(steps, [4], stride=2) == noise(steps[::2], [4])


# -- known Gaussians -------------------------------------------------------------------------


def test_gaussian_gradients_of_known_covariance() -> None:
    """g_w ~ N(G, C / b): noise scale tr(C) / b / |G|^2, diversity (|G|^2 + t) / (W |G|^2 + t)."""
    draw = np.random.default_rng(0)
    mean, deviation = draw.normal(0, 2, size=40), draw.uniform(0.5, 4, size=40)
    steps = [mean + deviation * draw.normal(size=(4, 40)) for _ in range(4000)]
    reading = noise(steps, [10, 30])
    for found, part in [
        (reading.layers["noise_scale"][0], slice(0, 10)),
        (reading.layers["noise_scale"][1], slice(10, 40)),
        (reading.model["noise_scale"], slice(0, 40)),
    ]:
        exact = (deviation[part] ** 2).sum() / (mean[part] ** 2).sum()
        assert found == pytest.approx(exact, rel=0.05)
    trace, signal = (deviation**2).sum(), (mean**2).sum()
    expected = (signal + trace) / (4 * signal + trace)
    assert reading.model["diversity"] == pytest.approx(expected, rel=0.02)


def test_both_estimators_are_unbiased() -> None:
    """2,000 epochs of one step: the ingredients' means are exact to 4 standard errors."""
    draw = np.random.default_rng(1)
    mean = np.full(6, 0.7)
    stacks = [mean + 1.5 * draw.normal(size=(3, 6)) for _ in range(2000)]
    details = [noise([s], [6]).detail for s in stacks]
    for name, exact in (("signal", 6 * 0.49), ("trace", 6 * 2.25)):
        values = np.array([d[name][-1] for d in details])
        assert values.mean() == pytest.approx(exact, abs=4 * values.std() / math.sqrt(2000)), name


@pytest.mark.parametrize("steps", [4, 25])
def test_msdr_of_pure_noise(steps: int) -> None:
    updates = np.random.default_rng(4).normal(size=(steps, 20000))
    assert msdr(updates, [20000]).model["msdr"] == pytest.approx(steps**-0.5, rel=0.02)


# -- in a run --------------------------------------------------------------------------------


def test_against_gradients_recomputed_by_hand(tmp_path: Path) -> None:
    """One step per epoch, plain autograd."""
    c = config("data.train_size=40", "batch_size=10", BOTH, "epochs=1")
    record = regimes.run(c, tmp_path / "run")
    parts = build.prepare_run(c)
    model = parts.task.build(c).double()
    x, y = next(iter(parts.batches.epoch(0, range(4))))
    own = []
    for worker in range(4):
        loss = nn.functional.cross_entropy(model(x[worker]), y[worker])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        own.append(torch.cat([g.flatten() for g in grads]))
    stack = torch.stack(own)
    small, large = stack.square().sum(1).mean().item(), stack.mean(0).square().sum().item()
    row = record.epochs.iloc[0]
    exact = (4 * (small - large) / 3) / ((4 * large - small) / 3)
    assert row["noise_scale"] == pytest.approx(exact, rel=1e-9)
    assert row["diversity"] == pytest.approx(small / (4 * large), rel=1e-9)
    assert math.isnan(row["msdr"])
    assert {"noise_scale", "diversity", "msdr"} <= set(record.layers)
