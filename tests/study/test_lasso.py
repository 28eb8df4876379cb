"""Lemma 1 on a Gaussian LASSO: moments by Monte Carlo, scikit-learn's solutions, the bound against
exact and empirical probabilities; where the paper's own formulas fail; the command."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import complaints
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm
from synthetic import make

from analysis.lasso import lasso
from analysis.lasso.model import (
    Problem,
    density,
    holds,
    largest_sigma,
    lower_bound,
    recovers,
    sample,
    solution,
    top_share,
)
from analysis.lasso.numbers import SHAPES, Setting, chances, network, shapes, sparsity
from regimes.base.errors import ConfigError, RecordError
from regimes.records import load_all, unit_name

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def problem(mu: list[float], w: list[float], sigma: float, lam: float = 0.1) -> Problem:
    return Problem(np.array(mu), np.array(w), sigma, lam)


CASES = [  # the reason for each
    problem([1.0, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], 0.5),  # start: noise is -sigma z
    problem([1.0, -0.5, 0.0, 0.0], [0.6, 0.0, 0.3, 0.0], 0.5),  # supports overlap in one
    problem([0.0, 0.0, 2.0], [1.0, -1.0, 0.0], 0.3),  # disjoint supports, a = -1
    problem([1.0, 1.0], [0.5, 0.5], 1.0),  # a = 0
    problem([1.0, 2.0, 0.0], [-1.0, -1.5, 0.4], 2.0),  # large a and sigma: all terms at work
    problem([0.0, 0.0], [1.0, 2.0], 1.5),  # no class mean
]


# -- closed form against Monte Carlo ---------------------------------------------------------


@pytest.mark.parametrize("p", CASES)
def test_mean_and_variance_by_monte_carlo(p: Problem) -> None:
    """Within 5 standard errors; of the variance, from the sample's fourth moment. The paper's mean
    is refused by the same sample."""
    n = 200_000
    g = p.gradients(n, np.random.default_rng(1))
    off = g - g.mean(0)
    variance, fourth = (off**2).mean(0), (off**4).mean(0)
    error = 5 * np.sqrt(variance / n)
    assert np.all(np.abs(g.mean(0) - p.mean) <= error)
    assert np.all(np.abs(variance - p.variance) <= 5 * np.sqrt((fourth - variance**2) / n))
    assert np.any(np.abs(g.mean(0) - p.paper_mean) > error)


def test_the_papers_variance_is_no_upper_bound() -> None:
    many = problem([0.5] * 16, [-0.5] * 16, 0.01)  # a^2 = 25 exceeds 1 + 2 max mu^2 s = 3
    assert many.variance.min() > 9 * many.paper_variance
    wide = problem([0.0, 0.0], [1.0, 0.0], 3.0)  # its sigma^4 term lacks w_j^2
    assert wide.variance[0] == 9 + 2 * 81
    assert wide.paper_variance == 9 + 81


# -- sparsity, at scikit-learn's solutions ---------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lam", [0.002, 0.02, 0.2])
def test_the_mean_is_as_sparse_as_w_and_mu(lam: float, seed: int) -> None:
    """The optimality conditions of Tibshirani's LASSO, for the scaling that lam has here."""
    rng = np.random.default_rng(seed)
    mu = np.concatenate([rng.normal(size=6), np.zeros(54)])
    x, y = sample(mu, 0.7, 300, rng)
    p = Problem(mu, solution(x, y, lam), 0.7, lam)
    union = (p.w != 0) | (mu != 0)
    assert 1 <= np.count_nonzero(p.w) <= 60
    assert not p.mean[~union].any()
    assert np.count_nonzero(p.mean) == p.support.sum() <= np.count_nonzero(p.w) + 6
    slope = x.T @ (x @ p.w - y) / len(y)
    assert slope[p.w != 0] == pytest.approx(-lam * np.sign(p.w[p.w != 0]), abs=1e-5)
    assert np.abs(slope[p.w == 0]).max(initial=0) <= lam * (1 + 1e-5)


def test_at_the_minimiser_of_the_expectation_the_mean_vanishes_where_w_does_not() -> None:
    """A square root of E x x' and its dual y have the expectation's normal equations exactly."""
    mu, sigma, lam = np.array([1.0, -0.8, 0.5, 0.0, 0.0]), 0.6, 0.05
    root = np.linalg.cholesky(sigma**2 * np.eye(5) + np.outer(mu, mu))
    x, y = 5**0.5 * root.T, 5**0.5 * np.linalg.solve(root, mu)
    p = Problem(mu, solution(x, y, lam), sigma, lam)
    assert np.count_nonzero(p.w) == 3
    assert p.mean == pytest.approx(np.zeros(5), abs=1e-7)


def test_at_a_solution_gamma_is_below_the_noise_for_every_sigma() -> None:
    """So the lemma's event does not happen, though w is sparse and sigma as small as one likes."""
    s = Setting(dimension=50, train=400)
    rng = np.random.default_rng(0)
    for i, sigma in enumerate((1e-4, 1e-2, 0.3)):
        p = s.solved(s.lam, sigma, i)
        assert np.count_nonzero(p.w) < 10
        assert p.gamma < p.variance.max() ** 0.5
        assert holds(p, 8, 500, rng) == 0


# -- the bound -------------------------------------------------------------------------------

quarters = st.integers(-8, 8).map(lambda k: k / 4)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    d = draw(st.integers(1, 5))
    mu, w = (draw(st.lists(quarters, min_size=d, max_size=d)) for _ in range(2))
    sigma = draw(st.floats(0.001, 2.0))
    return problem(mu, w, sigma, draw(st.sampled_from([0.01, 0.1, 1.0])))


@given(p=problems(), n=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_bound_is_never_above_the_probability(p: Problem, n: int, seed: int) -> None:
    """Failures in 1,000 trials are no more than the bound allows (one-sided exact test, 1e-8)."""
    assume(p.support.any())
    allowed = 1 - lower_bound(p, n)
    failures = 1000 - holds(p, n, 1000, np.random.default_rng(seed))
    if allowed < 1:
        assert binom.sf(failures - 1, 1000, allowed) > 1e-8
    assert allowed >= 0


def test_the_property_can_fail_with_the_papers_variance_it_does() -> None:
    """d = 16, a = -5: gamma is 1.7 deviations, the paper's bound promises 42 %; 22 % happens."""
    p = problem([0.5] * 16, [-0.5] * 16, 2.6 / (1.7 * 28.5**0.5))
    promised = lower_bound(p, 1, p.paper_variance)
    count = holds(p, 1, 20_000, np.random.default_rng(0))
    assert binom.cdf(count, 20_000, promised) < 1e-8
    assert lower_bound(p, 1) < count / 20_000


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.6])
def test_probability_at_zero_weights_is_known(sigma: float) -> None:
    """g = -u: d n independent normal deviations; Chebyshev is below them."""
    p = problem([1.0, -0.8, 0.0], [0.0, 0.0, 0.0], sigma)
    exact = (2 * norm.cdf(0.8 / sigma) - 1) ** (3 * 4)
    count = holds(p, 4, 20_000, np.random.default_rng(2))
    assert min(binom.cdf(count, 20_000, exact), binom.sf(count - 1, 20_000, exact)) > 1e-6
    assert lower_bound(p, 4) == pytest.approx(1 - 4 * 3 * sigma**2 / 0.64)
    assert lower_bound(p, 4) <= exact


def test_top_coordinates_are_recovered_when_noise_is_below_half_of_gamma() -> None:
    p = problem([1.0, -0.8, 0.0, 0.0], [0.0] * 4, 0.05)  # 8 deviations
    assert recovers(p, 2000, np.random.default_rng(0)) == 2000
    loud = replace(p, sigma=50.0)  # all 6 pairs of coordinates alike, to 1 %
    assert recovers(loud, 20_000, np.random.default_rng(0)) / 20_000 == pytest.approx(1 / 6, 0.1)


# -- the largest sigma -----------------------------------------------------------------------


def test_largest_sigma_at_zero_weights() -> None:
    p = problem([1.0, -0.8, 0.0], [0.0, 0.0, 0.0], 0.1)
    assert largest_sigma(p, 4, 0.05) == pytest.approx(0.8 * (0.05 / (3 * 4)) ** 0.5)


@given(p=problems(), n=st.integers(1, 50), epsilon=st.floats(0.001, 0.9))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_largest_sigma_divides_the_line(p: Problem, n: int, epsilon: float) -> None:
    """Below it the bound holds and above it does not; numpy's polynomial roots agree."""
    assume(p.support.any() and p.mean_without_noise[p.support].all())
    found = largest_sigma(p, n, epsilon)
    first = (replace(p, sigma=1.0).variance - p.w**2 - p.w @ p.w).sum()
    second = (p.w**2 + p.w @ p.w).sum()
    roots = []
    for c, d in zip(p.mean_without_noise[p.support], p.w[p.support], strict=True):
        t = np.roots(
            [n * second - epsilon * d**2, n * first - 2 * epsilon * c * d, -epsilon * c**2]
        )
        roots.append(min(x.real for x in t if x.real > 0))
    assert found == pytest.approx(min(roots) ** 0.5, rel=1e-6)
    for factor in (1e-3, 0.3, 0.999):
        assert lower_bound(replace(p, sigma=factor * found), n) >= 1 - epsilon - 1e-9
    for factor in (1.001, 3, 1e3):
        assert lower_bound(replace(p, sigma=factor * found), n) < 1 - epsilon


def test_a_weight_vector_for_which_no_sigma_is_small_enough() -> None:
    """The minimiser for sigma -> 0, mu = e1, w = (1 - lam) e1: |E g| falls as sigma^2, the noise as
    sigma, so that the lemma's probability goes to 0 and not to 1."""
    p = problem([1.0, 0.0], [0.875, 0.0], 1.0, 0.125)
    assert largest_sigma(p, 1, 0.5) == 0.0
    rng = np.random.default_rng(0)
    rates = [holds(replace(p, sigma=x), 1, 20_000, rng) / 20_000 for x in (1.0, 0.3, 0.03, 0.003)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.1
    assert rates[-1] == 0


# -- numbers, figure, command ----------------------------------------------------------------

SMALL = Setting(dimension=30, nonzero=3, train=100, trials=50, draws=2)


def test_numbers_are_those_of_the_model() -> None:
    sizes = sparsity(SMALL).pivot(index="x", columns="series", values="mean")
    assert (sizes["|supp E g|"] <= sizes["|supp w| + |supp μ|"]).all()
    found = chances(SMALL)
    one = found[found["series"] == "halfway: bound, exact variance"].iloc[3]
    half = replace(SMALL.halfway, sigma=one["x"])
    assert one["mean"] == max(0.0, lower_bound(half, SMALL.n))
    table = shapes(SMALL)
    p = SMALL.halfway
    assert table.loc["noise-density", "LASSO, halfway"] == pytest.approx(
        p.variance.sum() ** 2 / (30 * (p.variance**2).sum())
    )
    assert table.loc["mean-top10", "LASSO, zero"] == pytest.approx(1)  # 3 of 30 coordinates
    values = np.array([3.0, -4.0, 0, 0, 0, 0, 0, 0, 0, 0])
    assert (top_share(values, 10), density(values)) == (16 / 25, pytest.approx(49 / 250))


def test_the_networks_numbers_are_means_over_seeds(tmp_path: Path) -> None:
    """Along each unit, and frozen after every second: the table has readings alone, and the axis
    is of the runs' units."""
    draw = np.random.default_rng(0)

    def readings(row: dict[str, Any]) -> dict[str, Any]:
        families = ["moments"] if row["epoch"] % 2 else ["moments", "moments-frozen"]
        names = [f"{family}:{name}" for family in families for name in SHAPES]
        layers = {name: draw.uniform(size=3).tolist() for name in names}
        unit = {"first": 5 * row["epoch"], "stop": 5 * row["epoch"] + 5}
        model = {name: draw.uniform() for name in names}
        return {"model": model, "statistics": layers, "unit": unit}

    for seed in (1, 2):
        make(tmp_path, "low", seed, change=readings, unit_steps=5)
    records = load_all(tmp_path)
    numbers = network(records)
    for panel in ("moments", "moments-frozen"):
        row = numbers.query("panel == @panel and series == 'noise-density' and x == 2").iloc[0]
        values = [run.rows[2]["model"][f"{panel}:noise-density"] for run in records]
        assert row["mean"] == pytest.approx(np.mean(values))
        row = numbers.query("panel == @panel + ' in layers' and series == 'mean-top10' and x == 0")
        lines = [np.array(run.rows[0]["statistics"][f"{panel}:mean-top10"]) for run in records]
        inside = [x[[0, 2]].mean() for x in lines]  # the bias is not compressed
        assert row["mean"].item() == pytest.approx(np.mean(inside))
    for run in records:
        run.details.append({"family": "moments-frozen", "gradients": 12, "gradient": "batch of 16"})
    found = [x for x in lasso.table(SMALL, records) if x.startswith("moments") and "in " not in x]
    frozen = [f"moments-frozen, {unit}" for unit in (0, 2, 4)]
    assert found == [*frozen, *(f"moments, {unit}" for unit in (0, 3, 5))]
    fig, shown = lasso.lasso(SMALL, records)
    assert complaints(fig, [shown]) == []
    unit = unit_name(records[0].config)
    assert unit.startswith("unit of")
    assert [ax.get_xlabel().partition(" (")[0] for ax in fig.axes[2:]] == [unit, unit]


def test_runs_without_readings_are_refused() -> None:
    runs = load_all(REFERENCE / "lm-demo.tar.xz")
    with pytest.raises(RecordError, match=r"recorded no moments of the gradient"):
        network([run for run in runs if run.name == "low"])
    with pytest.raises(RecordError, match=r"schedules .*low.*: give the folder of one"):
        network(runs)


def test_bad_settings_are_one_sentence() -> None:
    for fields, sentence in (
        ({"nonzero": 0}, "nonzero = 0: expected 1 to dimension = 200"),
        ({"nonzero": 201}, "nonzero = 201"),
        ({"n": 0}, "n = 0: expected at least 1"),
        ({"sigma": 0.0}, "sigma = 0.0: expected a positive number"),
        ({"lam": np.inf}, "lam = inf: expected a positive number"),
        ({"seed": -1}, "seed = -1: expected at least 0"),
        ({"epsilon": 1.0}, "epsilon = 1.0: expected a number between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            Setting(**fields)  # type: ignore[arg-type]
