"""The fitted curve of losses (oracles: another way to the same posterior, drawn losses whose law is
known)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import multivariate_t

from regimes.plans import curve as curves
from regimes.plans.curve import Curve, Probe

METHODS = ("dense", "a", "b")


def law(probe: Probe) -> float:
    """3 + 4 n^-0.4, a parabola of the rate, and gaps of 0.02 and 0.2."""
    gap = {"dense": 0.0, "a": 0.02, "b": 0.2}[probe.method]
    best = {"dense": 1.0, "a": 0.0, "b": -1.0}[probe.method]
    return 3 + 4 * probe.steps**-0.4 + gap + 0.05 * (probe.rate - best) ** 2


def drawn(noise: float, seed: int = 0, lengths: tuple[int, ...] = (50, 100, 200)) -> Curve:
    rng = np.random.default_rng(seed)
    probes = [
        Probe(method, steps, rate, s)
        for method in METHODS
        for steps in lengths
        for rate in (-1.0, 0.0, 1.0)
        for s in (0, 1)
    ]
    return Curve(METHODS, {p: law(p) + noise * rng.standard_normal() for p in probes}, 800)


def test_posterior_is_that_of_a_regression_with_the_prior_as_further_rows() -> None:
    """Least squares with a row for each coefficient's prior, and the t of the mean's marginal."""
    curve = drawn(0.01)
    index = 7
    mean, factor, shape, scale = curve._posteriors[index]
    a = float(curves.EXPONENTS[index])
    rows = [curve._row(p.method, p.steps, p.seed, a) for p in curve.used]
    values = (np.array([curve.losses[p] for p in curve.used]) - curve.centre) / curve.scale
    prior = np.diag(curve.noise / curve._prior)
    design = np.vstack([rows, prior])
    target = np.concatenate([values, np.zeros(len(prior))])
    other, *_ = np.linalg.lstsq(design, target)
    np.testing.assert_allclose(mean, other, rtol=1e-7, atol=1e-9)
    residual = float(((target - design @ other) ** 2).sum())
    assert scale == pytest.approx(curves.WEIGHT * curves.NOISE**2 + residual / 2)
    assert shape == curves.WEIGHT + len(values) / 2
    np.testing.assert_allclose(factor @ factor.T, design.T @ design, rtol=1e-9, atol=1e-9)


def test_evidence_is_the_density_of_the_losses() -> None:
    """A multivariate t of all losses, with the coefficients integrated out."""
    curve = drawn(0.02, lengths=(50, 200))
    values = (np.array([curve.losses[p] for p in curve.used]) - curve.centre) / curve.scale
    logs = []
    for a in curves.EXPONENTS:
        rows = np.array([curve._row(p.method, p.steps, p.seed, float(a)) for p in curve.used])
        spread = np.eye(len(values)) + (rows * (curve._prior / curve.noise) ** 2) @ rows.T
        of_noise = curves.NOISE**2  # scale over shape of its inverse gamma
        logs.append(multivariate_t(shape=of_noise * spread, df=2 * curves.WEIGHT).logpdf(values))
    expected = np.exp(np.array(logs) - max(logs))
    np.testing.assert_allclose(curve.weights, expected / expected.sum(), rtol=1e-5, atol=1e-12)


def test_known_law_is_found_and_extrapolated() -> None:
    curve = drawn(0.003)
    for method, best in (("dense", 1.0), ("a", 0.0), ("b", -1.0)):
        assert curve.best_rate(method, 200) == best
        true = law(Probe(method, 800, best, 0))
        middle, low, high = (float(x[0]) for x in curve.interval(method, [800]))
        assert low < true < high
        assert middle == pytest.approx(true, abs=0.08)
    draws = {method: curve.losses_at(method, [800])[:, 0] for method in METHODS}
    assert (draws["b"] > draws["dense"]).mean() > 0.99
    steps = curve.steps_to("dense", law(Probe("dense", 200, 1.0, 0)), 800)
    assert np.median(steps) == pytest.approx(200, rel=0.1)
    assert np.isinf(curve.steps_to("dense", 1.0, 800)).all()


def test_intervals_cover_at_the_lengths_that_were_tried_and_beyond() -> None:
    inside = {200: 0, 800: 0}
    count = 60
    for seed in range(count):
        curve = drawn(0.02, seed)
        for steps in inside:
            true = law(Probe("a", steps, curve.best_rate("a", steps), 0))
            _, low, high = (float(x[0]) for x in curve.interval("a", [steps]))
            inside[steps] += low < true < high
    assert min(inside.values()) >= 0.85 * count, inside


def test_a_training_that_broke_and_rates_far_from_the_best_do_not_count() -> None:
    curve = drawn(0.003)
    more = {
        Probe("a", 200, 3.0, 0): math.inf,
        Probe("a", 200, 2.5, 0): 900.0,
    }
    other = Curve(METHODS, {**curve.losses, **more}, 800)
    assert other.used == curve.used


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_is_that_of_the_losses(noise: float) -> None:
    """Also where it is far above the prior's, and seeds differ as the prior says all the same."""
    curve = drawn(noise)
    assert curve.noise * curve.scale == pytest.approx(noise, rel=0.4)
    _, low, high = curve.interval("dense", [200])
    assert high[0] - low[0] < 4 * (curves.SEED * curve.scale + noise)
