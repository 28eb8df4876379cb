"""The gaps between workers' models (oracles: numpy's singular value decomposition; `spread`)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import smoke

import regimes
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.instruments.base import MeasurementContext
from regimes.instruments.disagreement import Disagreement, DisagreementGauge
from regimes.job.attached import no_data
from regimes.policies.detectors.statistics import Statistic
from regimes.records import read_lines

LAYERS = [Layer("a", (3,)), Layer("b", (2, 5))]


def gauge(workers: int, is_local: bool = True) -> DisagreementGauge:
    world, model = World(workers), torch.nn.Linear(1, 1)
    context = MeasurementContext(
        model, no_data, world, LAYERS, 0, False, no_data, no_data, is_local=lambda: is_local
    )
    return Disagreement().start(context)


def movements(workers: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(workers)
    return torch.randn(workers, 13, generator=generator, dtype=torch.float64) + 0.3


@pytest.mark.parametrize("workers", [2, 4, 16])  # of the last there are more than numbers
def test_it_is_the_singular_value_decomposition_of_the_gaps(workers: int) -> None:
    found, stack = gauge(workers), movements(workers)
    found.step(stack, [])
    found.step(100 * stack, [])  # the first of a unit counts
    reading = found.read(0)
    rows = stack.numpy()
    gaps, mean = rows - rows.mean(0), rows.mean(0)
    for part, size, top in (
        (gaps[:, :3], reading.layers["disagreement"][0], reading.layers["disagreement:top"][0]),
        (gaps[:, 3:], reading.layers["disagreement"][1], reading.layers["disagreement:top"][1]),
        (gaps, reading.model["disagreement"], reading.model["disagreement:top"]),
    ):
        values = np.linalg.svd(part, compute_uv=False)
        assert size == pytest.approx(math.sqrt((part**2).sum() / workers), rel=1e-12)
        assert top == pytest.approx(values[0] ** 2 / (values**2).sum(), rel=1e-12)
    _, values, ways = np.linalg.svd(gaps, full_matrices=False)
    count = min(workers - 1, 13)
    near = {"rel": 1e-10, "abs": 1e-6}  # the root of rounding, where a value is zero
    assert reading.detail["singular"][:count] == pytest.approx(values[:count].tolist(), **near)
    inside = ways[:count] @ mean
    assert reading.detail["mean_share"] == pytest.approx((inside**2).sum() / (mean**2).sum())
    if workers == 2:
        assert reading.model["disagreement:top"] == pytest.approx(1)


def test_a_unit_under_way_goes_on_from_a_state() -> None:
    first, second, stack = gauge(4), gauge(4), movements(4)
    first.step(stack, [])
    second.load_state_dict(first.state_dict())
    second.step(7 * stack, [])
    assert second.read(0) == first.read(0)


def test_workers_that_share_a_step_do_not_disagree() -> None:
    shared = gauge(4, is_local=False)
    shared.step(movements(4), [])
    reading = shared.read(0)
    assert reading.model["disagreement"] == 0
    assert math.isnan(reading.model["disagreement:top"])
    assert reading.detail["mean_share"] is None


def test_a_run_records_the_spread_and_keeps_its_bits(tmp_path: Path) -> None:
    """Also a policy may read it."""
    assert Statistic.parse("disagreement:top").instrument == "disagreement"
    local = ("sync_levels={high=4}", "sync_policy={name='static',level='high'}", "policy=static")
    both = "instruments={spread={}, disagreement={}}"
    with_it = regimes.run(smoke(*local, both, epochs=1), tmp_path / "a")
    without = regimes.run(smoke(*local, epochs=1), tmp_path / "b")
    row, other = with_it.rows[0], without.rows[0]
    assert row["train_loss"] == other["train_loss"]
    assert row["model"]["disagreement"] == pytest.approx(row["model"]["spread"], rel=1e-10)
    spread = row["statistics"]["spread"]
    assert row["statistics"]["disagreement"] == pytest.approx(spread, rel=1e-10)
    assert 1 / 3 < row["model"]["disagreement:top"] < 1
    (detail,) = read_lines(tmp_path / "a" / "instruments.jsonl")
    squares = sum(value**2 for value in detail["singular"])
    assert squares == pytest.approx(4 * row["model"]["spread"] ** 2, rel=1e-10)
