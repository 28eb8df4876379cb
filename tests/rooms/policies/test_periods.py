"""Policies for the period of local steps: against their formulas, and the spread by hand."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
import torch
from decided import levels
from hypothesis import given
from hypothesis import strategies as st

from regimes import RunConfig, override
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.instruments.base import MeasurementContext
from regimes.instruments.noise import Spread
from regimes.job.attached import no_data
from regimes.policies import PostLocal, make_policy
from regimes.policies.schedules import LONGEST, QSR, period_of
from regimes.training.plug_ins import PlugIns


def test_post_local_sgd_changes_once() -> None:
    """At the first decay; a second one, and a rate that rises again, change nothing."""
    rates = [0.1, 0.4, 0.4, 0.04, 0.04, 0.004, 0.04]
    assert levels(PostLocal(), rates) == ["low"] * 3 + ["high"] * 5
    assert levels(PostLocal("2", "16"), [0.1] * 3) == ["2"] * 4


@given(
    st.lists(st.floats(1e-6, 10), min_size=1, max_size=12), st.floats(1e-4, 10), st.integers(1, 64)
)
def test_qsr_is_its_formula(rates: list[float], alpha: float, base: int) -> None:
    found = levels(QSR(alpha, base), rates)
    assert found[0] == str(base)
    for before, lr, level in zip(rates, [*rates[1:], rates[-1]], found[1:], strict=True):
        square = 0.0 if lr > before else (alpha / lr) ** 2
        rounded = (math.floor(x) for x in (square, square * (1 + 1e-9)))
        assert int(level) in {min(LONGEST, max(base, steps)) for steps in rounded}


@pytest.mark.parametrize("lr", ["0.1", "0.3", "0.05", "0.007", "0.0004", "0.6"])
def test_rounding_of_decimal_rates_takes_no_step_from_qsr(lr: str) -> None:
    """(0.3 / 0.1) squared is 8.999... in floats; the numbers are exact as decimals."""
    found = {k: levels(QSR(float(k * Decimal(lr)), 1), [float(lr)])[-1] for k in range(1, 200)}
    assert found == {k: str(k * k) for k in found}


def test_qsr_by_hand() -> None:
    """4 at the peak of 0.008, where the formula says 4.8; 0.0175 / 0.002 squared is 76.6."""
    assert levels(QSR(0.0175, 4), [0.008, 0.008, 0.002]) == ["4", "4", "76", "76"]
    assert levels(QSR(0.0175, 4), [0.008, 0.0])[-1] == "1000000000"  # no end
    assert levels(QSR(0.1, 2), [0.01, 0.02, 0.04]) == ["2", "2", "2", "6"]  # while it rises


@pytest.mark.parametrize(
    "table",
    [
        {"name": "qsr", "alpha": 0.0},
        {"name": "qsr", "alpha": 1.0, "base": 0},
        {"name": "qsr"},
        {"name": "qsr", "alpha": 1.0, "needs": []},
        {"name": "post-local", "needs": []},
    ],
)
def test_what_makes_no_sense_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_policy(table, "sync_policy")


@pytest.mark.parametrize("level", ["mid", "0", "-3", "1.5", ""])
def test_a_level_is_a_word_or_a_number_of_steps(level: str) -> None:
    with pytest.raises(ConfigError, match=r"one of low \(sync_levels\), or a number of steps"):
        period_of(level, {"low": 1})


# -- the spread of the workers' models -------------------------------------------------------


def context(is_local: bool | None) -> MeasurementContext:
    layers = [Layer("a", (2,)), Layer("b", (1, 1))]
    return MeasurementContext(
        torch.nn.Linear(1, 1),
        no_data,
        World(4),
        layers,
        0,
        False,
        no_data,
        no_data,
        is_local=None if is_local is None else lambda: is_local,
    )


def test_the_spread_by_hand() -> None:
    """Four workers at (1, 0), (-1, 0), (0, 1), (0, -1) are 1 from their mean; at 0, 0, 0, 4 the
    root of 3."""
    gauge = Spread().start(context(True))
    stack = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 4]])
    gauge.step(stack, [])
    gauge.step(100 * stack, [])  # the first of a unit counts
    reading = gauge.read(0)
    assert reading.layers["spread"] == pytest.approx([1.0, math.sqrt(3)])
    assert reading.model["spread"] == pytest.approx(2.0)
    gauge.step(2 * stack, [])
    assert gauge.read(1).model["spread"] == pytest.approx(4.0)


def test_workers_that_share_a_step_have_no_spread() -> None:
    gauge = Spread().start(context(False))
    gauge.step(torch.arange(12.0).view(4, 3), [])  # their gradients, say: they differ
    assert gauge.read(0).layers["spread"] == [0.0, 0.0]
    with pytest.raises(ConfigError, match="have one model: set sync_policy"):
        PlugIns.from_config(override(RunConfig(), ["instruments.spread={}"]))
