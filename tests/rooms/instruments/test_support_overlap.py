"""Support overlap: against known supports, numpy's argsort and chance; the same on any number of
processes and workers; no trace on the run."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import smoke
from contexts import with_gradients as context
from torch import Tensor, nn

import regimes
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives.world import World
from regimes.instruments import support_overlap
from regimes.instruments.hessian.probe import preserve_model
from regimes.instruments.support_overlap import (
    Overlap,
    batch_gradient,
    pair_overlaps,
    support,
    train_on_batch_statistics,
)
from regimes.training import build

torch.set_num_threads(1)
INSTRUMENT = "instruments={overlap={batches=[8, 30, 60], every=2}}"


def config(*settings: str) -> RunConfig:
    """The smoke preset, cut short, in float64."""
    return smoke("optimizer.decay_epochs=[2]", *settings, epochs=3)


# -- closed form -----------------------------------------------------------------------------

KNOWN = [  # layers of 4 and 4; top 50 %: of the whole 4 coordinates, of each layer 2
    [9.0, -8.0, 1.0, 0.0, 7.0, -6.0, 0.5, 0.0],  # whole {0 1 4 5}; layers {0 1}, {4 5}
    [-9.0, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, -0.4],  # whole {0 1 2 3}; layers {0 1}, {6 7}
    [0.0, 0.0, 5.0, -5.0, 0.0, 0.0, 5.0, 5.0],  # whole {2 3 6 7}; layers {2 3}, {6 7}
]
WHOLE, FIRST, SECOND = [2 / 4, 0 / 4, 2 / 4], [2 / 2, 0.0, 0.0], [0.0, 0.0, 2 / 2]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_known_supports(workers: int) -> None:
    gauge = Overlap(percent=50, batches=(2,), count=3).start(context(KNOWN, 4, World(workers)))
    reading = gauge.read(0)
    assert reading.model == {"overlap:b2": pytest.approx(np.mean(WHOLE))}
    assert reading.layers == {"overlap:b2": pytest.approx([np.mean(FIRST), np.mean(SECOND)])}
    found = reading.detail["sizes"]["2"]
    assert found["draws"] == found["pairs"] == 3
    assert found["sd"] == pytest.approx(np.std(WHOLE, ddof=1))
    assert (found["min"], found["max"]) == (0.0, 0.5)
    assert reading.detail["chance"] == 0.5


@pytest.mark.parametrize("workers", [2, 3])
def test_draws_that_the_workers_cannot_share_evenly(workers: int) -> None:
    """The fourth draw is the first worker's second (of 3), and the others have none."""
    place = context([*KNOWN, [-x for x in KNOWN[0]]], 4, World(workers))
    reading = Overlap(percent=50, batches=(2,), count=4).start(place).read(0)
    pairs = [*WHOLE, 4 / 4, WHOLE[0], WHOLE[1]]  # the fourth has the support of the first
    assert reading.model == {"overlap:b2": pytest.approx(np.mean(pairs))}


def test_equal_gradients_overlap_fully_and_layers_can_be_left_out() -> None:
    gauge = Overlap(batches=(1, 2), layers=False).start(context([KNOWN[0]] * 9, 4, World(2)))
    reading = gauge.read(0)
    assert reading.model == {"overlap:b1": 1.0, "overlap:b2": 1.0}
    assert reading.layers == {}
    assert reading.detail["sizes"]["1"]["pairs"] == 28
    assert reading.detail["chance_layers"] is None


def test_fewer_batches_than_asked_for_are_all_taken() -> None:
    gauge = Overlap(count=8, batches=(4,)).start(context(KNOWN[:2], 4, World(1)))
    found = gauge.read(0).detail["sizes"]["4"]
    assert (found["draws"], found["pairs"], found["sd"]) == (2, 1, None)


# -- another library, chance -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_support_against_numpys_stable_argsort(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n, percent = int(draw.integers(1, 200)), float(draw.uniform(0.1, 100))
    values = draw.integers(-5, 6, n).astype(np.float64)  # many ties
    k = max(1, round(percent / 100 * n))
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    mask = support(torch.from_numpy(values), percent)
    assert mask.nonzero().flatten().tolist() == expected.tolist()


def test_pairs_against_sets() -> None:
    draw = np.random.default_rng(3)
    masks = torch.stack([support(torch.from_numpy(draw.normal(size=60)), 20) for _ in range(5)])
    sets = [set(m.nonzero().flatten().tolist()) for m in masks]
    expected = [len(a & b) / 12 for a, b in itertools.combinations(sets, 2)]
    assert pair_overlaps(masks, 12).tolist() == expected


def test_chance_by_monte_carlo() -> None:
    """400 independent random gradients: the mean over pairs is K / N within 4 standard errors."""
    draw = np.random.default_rng(0)
    n, percent = 130, 10.0
    masks = torch.stack(
        [support(torch.from_numpy(draw.normal(size=n)), percent) for _ in range(400)]
    )
    apart = pair_overlaps(masks, 13).reshape(-1)
    k = 13
    variance = (k / n) * (1 - k / n) * (n - k) / (n - 1) / k  # hypergeometric, over K^2
    assert float(apart.mean()) == pytest.approx(k / n, abs=4 * (variance / len(apart)) ** 0.5)
    assert float(apart.var()) == pytest.approx(variance, rel=0.05)


# -- the loop's own gradient -----------------------------------------------------------------


def test_gradient_is_that_of_a_worker_with_that_batch() -> None:
    """Also after a union pass of 4 interleaved batches, which do not divide this one; nothing
    moves."""
    parts = build.prepare_run(config(INSTRUMENT))
    gauge = parts.panel.gauges["overlap"]
    x, y = next(iter(parts.batches.epoch(0, range(4))))
    parts.gradients.compute_gradients(x, y, 0, 0)
    (batch,) = parts.context.samples(0, 1, 30)
    plain = copy.deepcopy(parts.task.build(parts.config).double()).train()
    loss = nn.functional.cross_entropy(plain(batch[0]), batch[1])
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*plain.parameters()])])
    before = copy.deepcopy(parts.model.state_dict())
    grads = [p.grad for p in parts.model.parameters()]
    with preserve_model(parts.model):
        train_on_batch_statistics(parts.model)
        found = batch_gradient(parts.context, batch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    gauge.read(0)
    for name, tensor in parts.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is g for p, g in zip(parts.model.parameters(), grads, strict=True))
    assert all(module.training for module in parts.model.modules())


def test_dropout_draws_from_a_stream_of_its_own() -> None:
    place = context(KNOWN, 4, World(1))
    dropout = nn.Dropout(0.5)
    place.model.add_module("dropout", dropout)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(dropout(x))

    gauge = Overlap(batches=(2,)).start(replace(place, loss=loss))
    state = torch.get_rng_state()
    first = gauge.read(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert gauge.read(0) == first
    same = context([[1.0] * 200] * 3, 100, World(1))  # but for dropout, one gradient
    same.model.add_module("dropout", dropout)
    apart = Overlap(percent=50, batches=(1,)).start(replace(same, loss=loss)).read(0)
    assert 0.3 < apart.detail["sizes"]["1"]["max"] < 0.9  # each draw drops its own
    assert gauge.read(1) != first  # and each epoch


def test_each_draw_size_and_epoch_has_random_numbers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gauge = Overlap(batches=(2, 3)).start(context(KNOWN, 4, World(1)))
    seeds: list[int] = []
    monkeypatch.setattr(support_overlap, "seed_generators", lambda seed, _: seeds.append(seed))
    for epoch in range(2):
        gauge.read(epoch)
    assert len(seeds) == len(set(seeds)) == 2 * 2 * len(KNOWN)


# -- equivalence, no trace -------------------------------------------------------------------


def test_traffic_is_the_bits_of_the_supports() -> None:
    world = World(2)
    Overlap(batches=(1,), count=3).start(context(KNOWN, 4, world)).read(0)
    assert world.meter.sent["gather"] == 2 * (2 * 8 // 8)  # 2 draws x 2 kinds x 8 bits
    assert world.meter.layers[-1].floats == 0


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"percent": 0.0}, "overlap.percent = 0.0: expected a percentage in (0, 100]"),
        ({"percent": 100.5}, "expected a percentage in (0, 100]"),
        ({"batches": ()}, "overlap.batches = []"),
        ({"batches": (0, 8)}, "overlap.batches = [0, 8]"),
    ],
)
def test_bad_fields_are_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Overlap(**fields)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("batch", [61, 200])
def test_a_batch_of_more_than_half_the_training_set(batch: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has {batch}: the training set does not hold two"):
        regimes.run(config(f"instruments.overlap.batches=[{batch}]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite() -> None:
    gauge = Overlap(batches=(1,)).start(context([*KNOWN, [float("nan")] * 8], 4, World(2)))
    with pytest.raises(TrainingError, match=r"not finite in epoch 5, batch size 1"):
        gauge.read(5)
