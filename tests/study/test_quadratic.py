"""Stable rates of compressed quadratics (oracles: closed forms, a naive training, the compressor of
the toolkit)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.rates.quadratic import at_share, energy, of_dense
from analysis.rates.quadratic_model import FILTERS, computed, limit, power_step, radius, simulated
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.powersgd import PowerSGD
from regimes.compression.reducer import Reducer

# -- closed forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_filter_that_sends_all_at_once_is_nesterov(name: str, momentum: float) -> None:
    assert computed(name, 1, momentum) == pytest.approx((2 + 2 * momentum) / (1 + 2 * momentum))


@pytest.mark.parametrize("late", [0, 1, 2, 3, 7])
def test_a_delay_has_its_known_limit(late: int) -> None:
    known = 2 * math.sin(math.pi / (2 * (2 * late + 1)))
    assert computed("delayed", late + 1, 0.0) == pytest.approx(known)


@pytest.mark.parametrize("period", [2, 3, 8])
def test_without_momentum_turns_multiply_the_rate_and_a_low_pass_divides_it(period: int) -> None:
    assert computed("in turns", period, 0.0) == pytest.approx(2 / period)
    assert computed("in turns, no feedback", period, 0.0) == pytest.approx(2)
    # heavy ball with momentum 1 - a and rate a lr: stable while a lr < 2 (1 + 1 - a)
    share = 1 / period
    assert computed("low-pass", period, 0.0) == pytest.approx(2 * (2 - share) / share)


# -- a naive training -----------------------------------------------------------------------


def run(name: str, period: int, momentum: float, rate: float, steps: int = 6000) -> float:
    """The size of the weight at the end of so many steps, as somebody would write them down."""
    x, m, owed, past = 1.0, 0.0, 0.0, [1.0] * period
    seen = []
    for step in range(steps):
        past = [*past[1:], x]
        if name == "delayed":
            sent = past[0]
        elif name == "low-pass":
            sent = (owed + x) / period
            owed = owed + x - sent
        else:
            owed = owed + x if name == "in turns" else x
            sent = owed if step % period == period - 1 else 0.0
            owed = 0.0 if sent else owed
        m = momentum * m + sent
        x -= rate * (sent + momentum * m)
        seen.append(abs(x))
        if abs(x) > 1e100:
            return math.inf
    return max(seen[-50:])


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("period", "momentum"), [(2, 0.9), (3, 0.5), (4, 0.9), (5, 0.0)])
def test_a_training_diverges_beyond_the_limit_and_not_below(
    name: str, period: int, momentum: float
) -> None:
    most = computed(name, period, momentum)
    assert run(name, period, momentum, 0.9 * most) < 1
    assert run(name, period, momentum, 1.1 * most) > 1e3


def test_a_radius_and_a_limit() -> None:
    assert radius(np.array([[0.0, -4.0], [1.0, 0.0]])) == pytest.approx(2)
    assert limit(lambda rate: rate > 0.3) == pytest.approx(0.3)
    assert limit(lambda rate: False) == math.inf


# -- the matrix ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3])
def test_a_step_of_the_matrix_is_that_of_the_compressor(rank: int) -> None:
    draw = torch.Generator().manual_seed(1)
    reducer = Reducer(PowerSGD(), [Layer("w", (6, 9))], World(1), seed=0)
    owed, q = np.zeros((6, 9)), None
    for _ in range(8):
        gradient = torch.randn(1, 6, 9, generator=draw, dtype=torch.float64)
        theirs = reducer.reduce([0], [gradient], [rank], None)[0].numpy()
        whole = owed + gradient[0].numpy()
        mine = theirs if q is None else power_step(whole, q)[0]  # its first factor is drawn
        np.testing.assert_allclose(mine, theirs, atol=1e-12)
        owed, q = whole - theirs, reducer.states[0].shared_state()["q"].numpy().copy()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_matrix_without_compression_has_the_limit_of_its_largest_curvature(
    momentum: float,
) -> None:
    most, share = simulated("dense", momentum)
    assert most == pytest.approx((2 + 2 * momentum) / (1 + 2 * momentum), rel=0.03)
    assert share == 1


def test_feedback_narrows_what_is_stable_on_a_matrix() -> None:
    (owed, sent), (forgotten, _) = simulated(1, 0.0), simulated(1, 0.0, feedback=False)
    assert 0 < sent < 0.5
    assert owed < 0.5 < 2 < forgotten


# -- the table -------------------------------------------------------------------------------


def test_shares_and_limits_of_dense() -> None:
    assert [energy(name, 2) for name in FILTERS] == [0.5, 0.75, 0.5, 0.5]
    rows = pd.DataFrame(
        {
            "how": ["a", "a", "b", "a"],
            "momentum": [0.0, 0.0, 0.0, 0.9],
            "share": [1.0, 0.25, 1.0, 1.0],
            "limit": [2.0, 0.5, 4.0, 1.0],
        }
    )
    rows = rows.assign(of_dense=of_dense(rows))
    assert rows["of_dense"].to_list() == [1.0, 0.25, 1.0, 1.0]
    assert at_share(rows, "a", 0.0, 0.5) == pytest.approx(0.5)
    assert math.isnan(at_share(rows, "a", 0.0, 0.1))
