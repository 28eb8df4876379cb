"""Lemma 1 of the paper (appendix B), made executable: the gradient of the LASSO on a Gaussian pair.

y = ±1 equally likely, x | y ~ N(y mu, sigma^2 I). One sample's stochastic subgradient of
|x'w - y|^2 / 2 + lam |w|_1 is g = x (x'w - y) + lam sign(w). With u = y x ~ N(mu, sigma^2 I), g is
u (u'w - 1) + lam sign(w): the label drops out. With u = mu + sigma z, a = mu'w - 1, s = |w|^2:

- E g = sigma^2 w + a mu + lam sign(w), zero outside supp(w) | supp(mu);
- Var g_j = sigma^2 (a^2 + 2 a mu_j w_j + mu_j^2 s) + sigma^4 (s + w_j^2). (Odd moments of z vanish,
  E (mu_j z'w + a z_j)^2 = mu_j^2 s + 2 a mu_j w_j + a^2, Var(z_j z'w) = s + w_j^2 by Isserlis.)

The lemma: let gamma be the least nonzero |E g_j|; for every n and epsilon, a small enough sigma
gives P(max over n samples of |g - E g|_inf < gamma) >= 1 - epsilon. Chebyshev and the union over
coordinates and samples give the *lower bound* 1 - n sum_j Var g_j / gamma^2 (``lower_bound``).

Where the paper slips:

1. Its mean is w + mu mu'w + lam sign(w): E[x y] = mu and the factor sigma^2 are lost.
2. Its variance bound (sigma^4 + 2 max mu^2 sigma^2) s + sigma^2 is none: a^2 may exceed 1 + 2 max
   mu^2 s, and the sigma^4 term is short by w_j^2 (``paper_variance``). Nor are deviations below the
   mean counted (Chebyshev covers them).
3. gamma depends on sigma. Where a mu_j + lam sign(w_j) = 0 for some w_j != 0, |E g_j| = sigma^2
   |w_j| falls faster than the noise: *no* sigma is small enough. That is no corner case: E g = 0
   on supp(w) is what minimises the objective. At the minimiser for n samples E g_j is there as
   small as the error of a mean of n, so that gamma is far below the noise of one.
4. Its proof swaps k1 and k2; it writes lam for the sum over samples, and uses it per sample.
5. Noise below gamma can still reorder coordinates; below gamma / 2 it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.random import Generator
from scipy.optimize import brentq
from sklearn.linear_model import Lasso

Vector = Float[np.ndarray, " d"]


@dataclass(frozen=True)
class Problem:
    """A weight vector and the distribution that its gradient is taken over.

    Attributes:
        sigma: standard deviation of every coordinate of x around its class mean, > 0.
        lam: weight of |w|_1 per sample, scikit-learn's ``alpha``.
    """

    mu: Vector
    w: Vector
    sigma: float
    lam: float

    @cached_property
    def residual(self) -> float:
        """a = mu'w - 1: the residual at the mean of the positive class."""
        return float(self.mu @ self.w) - 1

    @cached_property
    def mean_without_noise(self) -> Vector:
        """E g for sigma = 0."""
        return self.residual * self.mu + self.lam * np.sign(self.w)

    @cached_property
    def mean(self) -> Vector:
        """E g."""
        return self.sigma**2 * self.w + self.mean_without_noise

    @cached_property
    def variance(self) -> Vector:
        """Var g_j, exact."""
        first, second = self._orders
        return self.sigma**2 * first + self.sigma**4 * second

    @property
    def _orders(self) -> tuple[Vector, Vector]:
        """Var g_j's factors of sigma^2 and sigma^4."""
        a, s = self.residual, float(self.w @ self.w)
        return a**2 + 2 * a * self.mu * self.w + self.mu**2 * s, s + self.w**2

    @property
    def paper_mean(self) -> Vector:
        """As printed; for comparison."""
        return self.w + self.mu * (self.mu @ self.w) + self.lam * np.sign(self.w)

    @property
    def paper_variance(self) -> float:
        """The variance of any coordinate as the paper prints it; for comparison."""
        sigma, top = self.sigma, float(np.abs(self.mu).max())
        return (sigma**4 + 2 * top**2 * sigma**2) * float(self.w @ self.w) + sigma**2

    @property
    def support(self) -> Bool[np.ndarray, " d"]:
        """Where E g is not zero for all sigma: within supp(w) | supp(mu)."""
        return (self.mean_without_noise != 0) | (self.w != 0)

    @property
    def gamma(self) -> float:
        """The least |E g_j| on the support; infinite if there is none."""
        return float(np.abs(self.mean[self.support]).min(initial=np.inf))

    def gradients(self, n: int, rng: Generator) -> Float[np.ndarray, "n d"]:
        """Stochastic subgradients of n independent samples, from x and y as they are defined."""
        x, y = sample(self.mu, self.sigma, n, rng)
        return x * (x @ self.w - y)[:, None] + self.lam * np.sign(self.w)


def sample(
    mu: Vector, sigma: float, n: int, rng: Generator
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, " n"]]:
    """n pairs (x, y) of the model."""
    y = rng.choice([-1.0, 1.0], size=n)
    return y[:, None] * mu + sigma * rng.standard_normal((n, mu.size)), y


def solution(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"], lam: float) -> Vector:
    """The minimiser of |Xw - y|^2 / (2 n) + lam |w|_1, by scikit-learn."""
    return Lasso(lam, fit_intercept=False, tol=1e-8, max_iter=100_000).fit(x, y).coef_


def lower_bound(problem: Problem, n: int, variance: Vector | float | None = None) -> float:
    """Never above P(max over n samples of |g - E g|_inf < gamma); negative where it says nothing.

    Args:
        variance: per coordinate; the exact one by default. ``paper_variance`` gives the paper's
            number, which is no bound where that is too small.
    """
    used = problem.variance if variance is None else variance
    total = float(np.broadcast_to(used, problem.mu.shape).sum())
    return 1 - n * total / problem.gamma**2 if problem.gamma > 0 else -np.inf


def largest_sigma(problem: Problem, n: int, epsilon: float) -> float:
    """The sigma up to which ``lower_bound`` is at least 1 - epsilon; 0.0 if it is for none.

    w, mu and lam are held. In t = sigma^2 and for each j of the support, n sum_i Var g_i - epsilon
    (E g_j)^2 is a quadratic that starts at -epsilon m_j^2 with m = mean_without_noise, and
    whose leading coefficient n (d + 1) s - epsilon w_j^2 is not negative: it changes sign once, and
    so does their maximum.
    """
    start, slope = problem.mean_without_noise[problem.support], problem.w[problem.support]
    if not start.size or not np.all(start):
        return 0.0 if start.size else np.inf
    first, second = (float(order.sum()) for order in problem._orders)

    def excess(t: float) -> float:
        return n * (first * t + second * t**2) - epsilon * float(((start + slope * t) ** 2).min())

    high = 1.0
    while excess(high) <= 0:
        high *= 4
    while excess(high / 4) > 0:
        high /= 4
    return float(np.sqrt(brentq(excess, high / 4, high, xtol=1e-300, rtol=1e-12)))


def holds(problem: Problem, n: int, trials: int, rng: Generator) -> int:
    """In how many of ``trials`` do n fresh gradients all stay within gamma of their mean?"""
    noise = np.abs(problem.gradients(n * trials, rng) - problem.mean).max(1)
    return int((noise.reshape(trials, n).max(1) < problem.gamma).sum())


def recovers(problem: Problem, trials: int, rng: Generator) -> int:
    """In how many of ``trials`` are one gradient's k largest coordinates the mean's support?"""
    inside, g = problem.support, np.abs(problem.gradients(trials, rng))
    least = g[:, inside].min(1, initial=np.inf)
    return int((g[:, ~inside].max(1, initial=0.0) < least).sum())


# -- how concentrated a vector is ------------------------------------------------------------


def top(vector: Vector, percent: float) -> Int[np.ndarray, " k"]:
    """Indices of its ``percent`` largest magnitudes, at least one; ties go to the smaller index."""
    k = max(1, round(percent / 100 * vector.size))
    return np.argsort(-np.abs(vector), kind="stable")[:k]


def top_share(vector: Vector, percent: float) -> float:
    """The share of |v|^2 in its ``percent`` largest coordinates."""
    return float((vector[top(vector, percent)] ** 2).sum() / (vector**2).sum())


def density(vector: Vector) -> float:
    """|v|_1^2 / (N |v|_2^2): k / N for k equal coordinates, 2 / pi for Gaussian ones, 1 if flat.
    Of a variance, its participation ratio."""
    return float(np.abs(vector).sum() ** 2 / (vector.size * (vector**2).sum()))
