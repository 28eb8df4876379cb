"""How the loss in the end depends on method and length, fitted to short trainings.

For given exponent a of a power law (as in Hestness et al., 2017) the expected loss at a method's
best learning rate is linear:

    loss(m, n) = E + A (n / n0)^-a + g_m + h_m log2(n / n0) + u_seed + w(n)

with n steps, and for all methods but the first, dense, a gap g_m to it that changes by h_m with
each doubling of the steps. w(n) is a smooth deviation from the power law, a sum of bumps a doubling
apart. Of each method and length the rate with the lowest mean loss counts alone: the best rate
moves with the length and differs between methods, and no parabola that all of them share follows
it. The prior of the coefficients is normal, in units of what the losses span; noise has an inverse
gamma one. Each exponent then has its posterior and its evidence in closed form (Bishop, 2006,
section 3.3; Gelman et al., 2013, chapter 14), and the posterior is their mixture.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import gammaln, logsumexp

EXPONENTS = np.arange(0.05, 1.001, 0.05)
# Prior standard deviations, in units of what the best losses of the lengths span
LEVEL, GAIN, GAP, GROWTH, SEED = 10.0, 3.0, 0.3, 0.1, 0.1
BUMP, WIDTH = 0.2, 0.7  # deviation from the power law; doublings over which it changes
NOISE, WEIGHT = 0.02, 1.0  # of a run; shape of its prior
ROUNDS = 4  # in which the noise is found
DRAWS = 4000


@dataclass(frozen=True)
class Probe:
    """A short training.

    Attributes:
        method: by name; the first of all is dense.
        steps: that were trained, with the schedule of the rate in proportion.
        rate: doublings of the configuration's learning rate.
    """

    method: str
    steps: int
    rate: float
    seed: int


Fit = tuple[np.ndarray, np.ndarray, float, float]
Losses = dict[Probe, float]  # lower is better; infinite if the training broke


@dataclass(frozen=True)
class Curve:
    """The fitted losses.

    Attributes:
        methods: dense first.
        losses: of all probes.
        longest: steps of the longest training that is asked for.
    """

    methods: tuple[str, ...]
    losses: Losses
    longest: float

    # -- what is fitted ----------------------------------------------------------------------

    @cached_property
    def _best_rates(self) -> dict[tuple[str, int], float]:
        """The rate with the lowest mean loss over seeds, of each method and length."""
        found: dict[tuple[str, int], tuple[float, float]] = {}
        for (method, steps, rate), losses in _by_rate(self.losses).items():
            mean = statistics.fmean(losses)
            if math.isfinite(mean) and mean < found.get((method, steps), (math.inf, 0.0))[0]:
                found[method, steps] = mean, rate
        return {key: rate for key, (_, rate) in found.items()}

    @cached_property
    def used(self) -> list[Probe]:
        """Those at the best rate of their method and length."""
        best = self._best_rates
        return [p for p in self.losses if best.get((p.method, p.steps)) == p.rate]

    @cached_property
    def reference(self) -> float:
        """n0, the geometric mean of the lengths."""
        lengths = {probe.steps for probe in self.used}
        return math.exp(float(np.mean(np.log(sorted(lengths)))))

    @cached_property
    def scale(self) -> float:
        """What they span over methods and lengths."""
        best = [self.losses[probe] for probe in self.used]
        span = max(best) - min(best)
        return max(span, 1e-3 * abs(self.centre), 1e-9)

    @cached_property
    def centre(self) -> float:
        return float(np.mean([self.losses[probe] for probe in self.used]))

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({probe.seed for probe in self.used})

    def _row(self, method: str, steps: float, seed: int | None, a: float) -> list[float]:
        doublings = math.log2(steps / self.reference)
        row = [1.0, (steps / self.reference) ** -a]
        for other in self.methods[1:]:
            row += [float(other == method), doublings * (other == method)]
        row += [float(seed == each) for each in self.seeds]
        at = math.log2(steps)
        return row + [math.exp(-0.5 * ((at - each) / WIDTH) ** 2) for each in self._bumps]

    @cached_property
    def _bumps(self) -> list[float]:
        """The middles of the deviations, in doublings of one step."""
        first = min(probe.steps for probe in self.used)
        last = max(self.longest, *(probe.steps for probe in self.used))
        return [float(x) for x in np.arange(math.log2(first), math.log2(last) + 1)]

    @cached_property
    def _prior(self) -> np.ndarray:
        """Standard deviations of the coefficients."""
        common = [LEVEL, GAIN]
        methods = [GAP, GROWTH] * (len(self.methods) - 1)
        others = [SEED] * len(self.seeds) + [BUMP] * len(self._bumps)
        return np.array([*common, *methods, *others])

    @cached_property
    def noise(self) -> float:
        """The noise of a run in units of `scale`: what is left after a fit, found by fitting
        again with it until it stays."""
        noise = NOISE
        for _ in range(ROUNDS):
            fits = self._fits(noise)
            shares = _weights(fits)
            parts = (fit[3] / fit[2] for fit in fits)
            noise = math.sqrt(sum(w * part for w, part in zip(shares, parts, strict=True)))
        return noise

    @cached_property
    def _posteriors(self) -> list[Fit]:
        return self._fits(self.noise)

    def _fits(self, noise: float) -> list[Fit]:
        """By exponent: mean and Cholesky factor of the precision of the coefficients, shape and
        scale of the noise's inverse gamma; losses in units of `scale`.

        Args:
            noise: by which the prior, whose deviations are absolute, is divided: in closed form a
                prior can only be in proportion to the noise.
        """
        values = (np.array([self.losses[p] for p in self.used]) - self.centre) / self.scale
        found = []
        for a in EXPONENTS:
            design = np.array([self._row(p.method, p.steps, p.seed, a) for p in self.used])
            precision = design.T @ design + np.diag((noise / self._prior) ** 2)
            factor = np.linalg.cholesky(precision)
            mean = np.linalg.solve(factor.T, np.linalg.solve(factor, design.T @ values))
            shape = WEIGHT + len(values) / 2
            scale = WEIGHT * NOISE**2 + 0.5 * (values @ values - mean @ (precision @ mean))
            found.append((mean, factor, shape, max(float(scale), 1e-12)))
        return found

    @cached_property
    def weights(self) -> np.ndarray:
        """The posterior probability of each exponent; the prior has them alike."""
        return _weights(self._posteriors)

    @cached_property
    def _draws(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """How many draws each exponent has, and the coefficients in them."""
        rng = np.random.default_rng(0)
        counts = rng.multinomial(DRAWS, self.weights)
        drawn = []
        for count, (mean, factor, shape, scale) in zip(counts, self._posteriors, strict=True):
            noise = np.sqrt(scale / rng.gamma(shape, size=count))
            normal = rng.standard_normal((len(mean), count))
            drawn.append(mean[:, None] + noise * np.linalg.solve(factor.T, normal))
        return counts, drawn

    # -- what it says ------------------------------------------------------------------------

    def best_rate(self, method: str, steps: float) -> float:
        """Doublings of the configuration's rate: the best that was tried with the method, at the
        length nearest to these steps."""
        near = [n for other, n in self._best_rates if other == method]
        if not near:  # all its trainings broke
            return min(probe.rate for probe in self.losses if probe.method == method)
        return self._best_rates[method, min(near, key=lambda n: abs(math.log(n / steps)))]

    def losses_at(self, method: str, steps: Sequence[float]) -> np.ndarray:
        """Draws of the expected loss over seeds, each method at its best rate.

        Returns:
            One row per draw, one column per number of steps.
        """
        counts, drawn = self._draws
        parts = []
        for a, count, coefficients in zip(EXPONENTS, counts, drawn, strict=True):
            if count:
                rows = [self._row(method, n, None, a) for n in steps]
                parts.append((np.array(rows) @ coefficients).T)
        return self.centre + self.scale * np.concatenate(parts)

    def interval(self, method: str, steps: Sequence[float]) -> tuple[np.ndarray, ...]:
        """Median and 95 % interval of the loss at each number of steps."""
        middle, low, high = np.quantile(self.losses_at(method, steps), [0.5, 0.025, 0.975], axis=0)
        return middle, low, high

    def steps_to(self, method: str, loss: float, most: float) -> np.ndarray:
        """Draws of the fewest steps after which a training ends at a loss, from the method's
        shortest probe on; infinite if none of up to ``most`` does."""
        shortest = min((p.steps for p in self.used if p.method == method), default=1)
        grid = np.geomspace(min(shortest, most), most, 200)
        reached = self.losses_at(method, grid.tolist()) <= loss
        first = reached.argmax(axis=1)
        return np.where(reached.any(axis=1), grid[first], np.inf)


def _by_rate(losses: Losses) -> dict[tuple[str, int, float], list[float]]:
    """The losses of all seeds, by method, steps and rate."""
    found: dict[tuple[str, int, float], list[float]] = {}
    for probe, loss in losses.items():
        found.setdefault((probe.method, probe.steps, probe.rate), []).append(loss)
    return found


def _weights(fits: Sequence[Fit]) -> np.ndarray:
    """In proportion to the evidence of fits with as many coefficients."""
    logs = [
        gammaln(shape) - shape * math.log(scale) - np.log(np.diag(factor)).sum()
        for _, factor, shape, scale in fits
    ]
    return np.exp(np.array(logs) - logsumexp(logs))
