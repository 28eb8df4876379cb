"""Mean and variance of the stochastic gradient: against numpy, planted Gaussians, plain autograd;
the same on two processes; no trace on the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import smoke
from contexts import without_data as context
from numpy.typing import NDArray
from runs import weights
from scipy.stats import norm
from torch import nn

import regimes
from analysis.plugins.moments import Moments, density, top_share
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.instruments.base import Reading
from regimes.training import build

torch.set_num_threads(1)
PATH = "analysis.plugins.moments:Moments"
FROZEN = "analysis.plugins.moments:FrozenMoments"
BOTH: dict[str, dict[str, Any]] = {PATH: {}, FROZEN: {"count": 6}}
Array = NDArray[np.float64]


def config(*settings: str, instruments: dict[str, dict[str, Any]] = BOTH) -> RunConfig:
    """The smoke preset, cut short and narrow, in float64."""
    narrow = ("policy=static", "optimizer.decay_epochs=[]", "model.width=4")
    c = smoke(*narrow, *settings, epochs=2)
    return replace(c, instruments=instruments)


def path(steps: Sequence[Array], sizes: list[int], union: bool = False, stride: int = 1) -> Reading:
    """The reading after steps of gradients, each [workers, N]."""
    gauge = Moments(stride).start(context(4 if union else len(steps[0]), sizes, union=union))
    for stack in steps:
        gauge.step(torch.from_numpy(stack), [])
    return gauge.read(0)


def expected(mean: Array, variance: Array, n: int) -> dict[str, float]:
    """The statistics of one vector, once more."""
    k, energy, noise = max(1, round(mean.size / 10)), (mean**2).sum(), variance.sum()
    top = np.argsort(-np.abs(mean))[:k]
    return {
        "mean-top10": (mean[top] ** 2).sum() / energy,
        "mean-density": np.abs(mean).sum() ** 2 / (mean.size * energy),
        "noise-density": noise**2 / (mean.size * (variance**2).sum()),
        "noise-in-top10": variance[top].sum() / noise,
        "resolved": 1 - noise / n / energy,
        "noise-to-mean": noise / (energy - noise / n),
    }


# -- closed form -----------------------------------------------------------------------------


@pytest.mark.parametrize("union", [False, True])
def test_moments_against_numpy(union: bool) -> None:
    rng = np.random.default_rng(0)
    steps = list(rng.normal(rng.normal(1, 2, 50), 1, size=(7, 1 if union else 3, 50)))
    reading = path(steps, [20, 30], union)
    every = np.concatenate(steps)
    variance = every.var(0, ddof=1) if union else np.mean([s.var(0, ddof=1) for s in steps], 0)
    for part, found in ((slice(0, 20), 0), (slice(20, 50), 1), (slice(0, 50), None)):
        values = expected(every.mean(0)[part], variance[part], len(every))
        for name, value in values.items():
            ours = reading.model if found is None else reading.layers
            one = ours[f"moments:{name}"]
            assert (one if found is None else one[found]) == pytest.approx(value), name  # type: ignore[index]
    single = [np.sort(row**2)[-5:].sum() / (row**2).sum() for row in steps[-1]]
    assert reading.model["moments:single-top10"] == pytest.approx(np.mean(single))
    assert reading.detail["gradients"] == len(every)
    assert reading.detail["gradient"].startswith("union" if union else "worker")


def test_concentration_of_known_vectors() -> None:
    sparse = torch.zeros(100, dtype=torch.float64)
    sparse[[3, 50, 51, 99]] = torch.tensor([2.0, -2, 2, -2], dtype=torch.float64)
    assert density(sparse) == pytest.approx(4 / 100)
    assert top_share(sparse, 1) == pytest.approx(1 / 4)
    assert top_share(sparse, 10) == 1
    assert density(torch.full((7,), -3.0)) == pytest.approx(1)
    normal = torch.from_numpy(np.random.default_rng(0).normal(size=200_000))
    for percent in (1, 10):  # E z^2 beyond the quantile c: 2 (c phi(c) + Phi(-c))
        c = norm.isf(percent / 200)
        assert top_share(normal, percent) == pytest.approx(2 * (c * norm.pdf(c) + norm.sf(c)), 0.01)
    assert density(normal) == pytest.approx(2 / math.pi, 0.01)


def test_what_cannot_be_formed_is_nan() -> None:
    one = path([np.ones((1, 5))], [5], union=True)  # a single step has no variance over steps
    assert math.isnan(one.model["moments:resolved"])
    assert one.model["moments:mean-top10"] == pytest.approx(1 / 5)
    zero = path([np.zeros((2, 5))] * 2, [5])
    assert all(math.isnan(value) for value in zero.model.values())
    opposite = path([np.array([[1.0, 1.0], [-1.0, -1.0]])], [2])
    assert math.isnan(opposite.model["moments:noise-to-mean"])


def test_reading_starts_the_next_epoch_and_stride_skips() -> None:
    steps = list(np.random.default_rng(0).normal(1, 1, size=(5, 2, 40)))
    gauge = Moments().start(context(2, [40]))
    for stack in (*steps[::-1], None, *steps):
        if stack is None:
            gauge.read(0)
        else:
            gauge.step(torch.from_numpy(stack), [])
    assert gauge.read(0) == path(steps, [40])
    assert path(steps, [40], stride=2) == path(steps[::2], [40])


def test_the_gradients_are_left_as_they_are() -> None:
    """The loop's buffer is reused: nothing may refer to it."""
    stack = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 9)))
    gauge = Moments().start(context(4, [9], union=True))
    for _ in range(3):
        before = stack.clone()
        gauge.step(stack, [])
        assert torch.equal(stack, before)
        stack += 1
    found = gauge.read(0).model["moments:single-top10"]
    assert found == pytest.approx(top_share(before[0], 10))


# -- planted Gaussians -----------------------------------------------------------------------


def test_a_planted_sparse_mean_with_dense_noise_is_found() -> None:
    """20 of 1,000 coordinates at 2, deviation 0.5, 200 gradients; what the conjecture describes."""
    rng = np.random.default_rng(0)
    mean = np.zeros(1000)
    mean[rng.choice(1000, 20, replace=False)] = 2 * rng.choice([-1, 1], 20)
    found = path([mean + 0.5 * rng.normal(size=(4, 1000)) for _ in range(50)], [1000]).model
    get = {name.removeprefix("moments:"): value for name, value in found.items()}
    assert get["mean-top10"] > 0.98
    assert get["single-top10"] < 0.6
    assert get["null-top10"] == pytest.approx(0.44, abs=0.04)
    assert get["noise-density"] == pytest.approx(1 / (1 + 2 / 150), abs=0.01)
    assert get["noise-in-top10"] == pytest.approx(0.1, abs=0.01)
    assert get["resolved"] == pytest.approx(1 - (250 / 200) / (80 + 250 / 200), abs=0.005)
    assert get["noise-to-mean"] == pytest.approx(250 / 80, rel=0.03)


def test_pure_sparse_noise_looks_like_noise_and_not_like_a_mean() -> None:
    """Variance in 5 % of the coordinates: the mean is as concentrated, and not resolved."""
    rng = np.random.default_rng(1)
    deviation = np.where(np.arange(2000) < 100, 1.0, 0.01)
    draws = [
        path([deviation * rng.normal(size=(4, 2000)) for _ in range(10)], [2000]).model
        for _ in range(20)
    ]
    found = {
        name: [one[f"moments:{name}"] for one in draws]
        for name in ("mean-top10", "null-top10", "noise-density", "resolved")
    }
    assert min(found["mean-top10"]) > 0.99
    assert min(found["null-top10"]) > 0.99
    assert np.mean(found["noise-density"]) == pytest.approx(0.05 / (1 + 2 / 30), rel=0.02)
    error = np.std(found["resolved"]) / 20**0.5
    assert np.mean(found["resolved"]) == pytest.approx(0, abs=4 * error)
    assert error < 0.05


def test_drift_is_no_noise_where_workers_are_compared() -> None:
    """Equal workers whose common gradient moves: no variance; in a union pass it counts as one."""
    steps = [np.full((3, 4), float(t)) for t in range(5)]
    assert path(steps, [4]).model["moments:resolved"] == 1
    assert path([s[:1] for s in steps], [4], union=True).model["moments:resolved"] == pytest.approx(
        1 - (2.5 / 5) / 4
    )


# -- in a run --------------------------------------------------------------------------------


def test_frozen_against_gradients_recomputed_by_hand(tmp_path: Path) -> None:
    """At the final weights, plain autograd in train mode, numpy."""
    c = config(instruments={FROZEN: {"count": 5, "batch": 16}})
    record = regimes.run(c, tmp_path / "run")
    parts = build.prepare_run(c)
    model = parts.task.build(c).double()
    model.load_state_dict(weights(tmp_path / "run"))
    own = []
    for x, y in parts.context.samples(1, 5, 16):
        loss = nn.functional.cross_entropy(model.train()(x), y)
        each = torch.autograd.grad(loss, [*model.parameters()])
        own.append(torch.cat([g.flatten() for g in each]))
    every = torch.stack(own).numpy()
    row = record.epochs.iloc[-1]
    for name, value in expected(every.mean(0), every.var(0, ddof=1), 5).items():
        known = value if value > 0 or name == "resolved" else math.nan
        ours = float(row[f"moments-frozen:{name}"] or math.nan)
        assert ours == pytest.approx(known, rel=1e-7, nan_ok=True), name
    single = [top_share(g, 1) for g in own]
    assert row["moments-frozen:single-top1"] == pytest.approx(np.mean(single))
    assert record.details[-1]["gradient"] == "batch of 16 at the end of an epoch"


def test_too_few_batches_are_one_sentence(tmp_path: Path) -> None:
    words = "batches of 8 images: the training data hold 15, expected at least 16"
    with pytest.raises(ConfigError, match=words):
        regimes.run(config(instruments={FROZEN: {"count": 16}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
