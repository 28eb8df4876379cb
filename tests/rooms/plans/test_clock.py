"""Clocks of short runs (oracles: a curve whose inverse is known, scipy's t, trainings of the
study)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from regimes.search.plans import clock
from regimes.search.plans.clock import DenseCurve

POINTS = {100: 4.0, 200: 3.5, 400: 3.2}


def test_a_curve_and_its_inverse_are_lines_over_the_logarithm() -> None:
    curve = DenseCurve.of(POINTS)
    assert curve.loss(100) == pytest.approx(4.0, abs=1e-12)
    assert curve.loss(100 * 2**0.5) == pytest.approx(3.75)
    assert curve.steps_to(3.35) == pytest.approx(200 * 2**0.5)
    assert math.isnan(curve.steps_to(4.1))
    assert math.isnan(curve.loss(80))
    assert math.isnan(curve.loss(500))
    assert curve.steps_to(3.05) == pytest.approx(400 * 2**0.5)  # on the last line
    assert curve.steps_to(-9.0) == pytest.approx(800)
    assert DenseCurve.of({**POINTS, 800: 3.3}).losses[-1] == 3.2  # a longer one is as good
    assert DenseCurve.of({400: 3.2}).steps_to(1.0) == pytest.approx(400)


@given(st.floats(100, 400))
def test_steps_to_is_the_inverse_of_loss(steps: float) -> None:
    curve = DenseCurve.of(POINTS)
    assert curve.steps_to(curve.loss(steps)) == pytest.approx(steps)


def test_the_interval_is_that_of_t_with_the_spread_of_all_methods() -> None:
    groups = [[-0.2, -0.4, -0.3], [-0.1, 0.1], [-0.5]]
    sigma, free = clock.pool_spread(groups)
    squares = sum(((np.array(g) - np.mean(g)) ** 2).sum() for g in groups)
    assert free == 2 + 2 + 1
    assert sigma == pytest.approx(math.sqrt((2 * clock.SPREAD**2 + squares) / free))
    found = clock.estimate_clock(groups[0], (sigma, free))
    half = stats.t.ppf(0.975, free) * sigma / 3**0.5
    assert np.log([found.low, found.mean, found.high]) == pytest.approx(
        [-0.3 - half, -0.3, half - 0.3]
    )
    later = clock.estimate_clock(groups[0], (sigma, free), doublings=3)
    assert later.mean == found.mean
    assert later.low < found.low < found.high < later.high


def test_a_clock_above_1_counts_as_1_unless_it_is_shown() -> None:
    unsure = clock.estimate_clock([0.1, 0.2], (0.2, 5.0))
    assert unsure.mean == 1.0
    assert unsure.low < 1.0 < unsure.high
    assert clock.estimate_clock([0.1, 0.1], (0.001, 50.0)).mean == pytest.approx(math.exp(0.1))


def test_clocks_drift_with_the_length_as_in_the_trainings_of_the_study() -> None:
    """From 300 to 1,200 steps, in deviations that the interval takes for two doublings."""
    page = Path(__file__).parents[3] / "benchmarks" / "clocks.md"
    means: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1] in ("300", "1200"):
            for size, cell in zip(("115k", "460k", "1800k", "sgd"), cells[2:], strict=True):
                if "[" in cell:
                    means[cells[0], int(cells[1])][size] = float(cell.split()[0])
    moved = []
    for (method, length), by_size in means.items():
        for size, k in by_size.items():
            if length == 300 and (other := means[method, 1200].get(size)):
                one = clock.DRIFT * max(0.0, 1 - k) + clock.STILL
                moved.append(math.log(other / k) / (2 * one))
    assert len(moved) > 15
    assert 0.6 < np.sqrt(np.mean(np.square(moved))) < 1.2, json.dumps(moved)
