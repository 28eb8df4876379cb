"""The law of harm: ``harm = level x rate^exponent``, fitted to pulses, and what it predicts.

A rate is the share of the run's peak rate, the mean over the steps of a pulse. Harm has the unit of
the metric (bits, points); the level is the harm of a pulse at the peak rate. All pulses of a fit
are of one kind and have one length; a *trunk* is the run that they disturb, one per tree and seed.

Two ways to fit, which treat a harm of zero or less differently:

- ``"log"``: log harm is linear in log rate, and each trunk has a random level (a mixed model,
  fitted by restricted maximum likelihood). Errors are factors. A harm of zero or less has no
  logarithm and is left out. Such harms are the smallest ones, so that many of them make the
  exponent too small.
- ``"harm"``: least squares on harm itself, a level for each trunk and one exponent (variable
  projection: Golub and Pereyra 1973). Errors are differences of one size. All pulses count, and
  those at a high rate decide.

An exponent's 95 % interval is over trunks where there are three: what other trunks would give
(a jackknife that leaves out one at a time). With fewer it is over pulses: what other pulses of
these trunks would give, if the law is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regimes.base.errors import RecordError
from regimes.base.statistics import LEAST, are_alike, t_interval

Floats = NDArray[np.float64]
Method = Literal["log", "harm"]
EXPONENTS = (-4.0, 8.0)  # between which least squares looks for one
LOG_RATIO = (-12.0, 25.0)  # of the variances between and within trunks
LEAST_SHARE = 0.5  # of the pulses must have a positive harm, or "log" says too little


@dataclass(frozen=True)
class Exponent:
    """An exponent, or a difference of two, with its 95 % interval.

    Attributes:
        value: no unit.
        low, high: ends of the interval; nan where there are too few values.
        n: trunks, or pulses.
        over: which of them the interval is over.
    """

    value: float
    low: float
    high: float
    n: int
    over: Literal["trunks", "pulses"]


@dataclass(frozen=True)
class Law:
    """``harm = level x rate^exponent``.

    Attributes:
        exponent: of the rate.
        level: harm of a pulse at the peak rate, in the unit of harm: of a trunk in the middle (its
            logarithm is the mean); where ``method`` is "harm", the one that fits all pulses best.
        levels: of each trunk; the mixed model draws them towards ``level``.
        spread: standard deviation of the log level between trunks; 0 for one trunk, nan of "harm".
        noise: standard deviation of log harm around the law, or of harm; nan if nothing is left.
        length: units of each pulse.
        method: how it was fitted.
        pulses: how many it was fitted to.
        left_out: pulses without a positive harm, which "log" cannot use.
    """

    exponent: Exponent
    level: float
    levels: Mapping[Hashable, float] = field(repr=False)
    spread: float
    noise: float
    length: int
    method: Method
    pulses: int
    left_out: int

    def of_pulses(self, rates: ArrayLike, trunk: Hashable = None) -> Floats:
        """The harm of pulses of ``length`` units, [pulses], in the unit of harm.

        Args:
            rates: of each pulse, as a share of the peak rate.
            trunk: its own level is used; None: ``level``.

        Raises:
            RecordError: the trunk was not among the fit's.
        """
        if trunk is not None and trunk not in self.levels:
            raise RecordError(f"the law was not fitted to pulses of the trunk {trunk!r}")
        level = self.level if trunk is None else self.levels[trunk]
        return np.asarray(level * np.asarray(rates, dtype=float) ** self.exponent.value)

    def of_units(self, rates: ArrayLike, trunk: Hashable = None) -> Floats:
        """What each unit adds to the harm of a pulse: a pulse's harm over its length, [units].

        Args:
            rates: the mean over the steps of each unit, as a share of the peak rate.
            trunk: as for `of_pulses`.
        """
        return self.of_pulses(rates, trunk) / self.length

    def of_schedule(
        self, rates: ArrayLike, disturbed: Sequence[bool], trunk: Hashable = None
    ) -> float:
        """The harm of a schedule that disturbs some units: the sum of `of_units` over them.

        This assumes that harms add up. They do for a few units; with error feedback a long
        disturbance costs less than the sum, without it more.

        Args:
            rates: as for `of_units`, of all units of the run.
            disturbed: which of them.
            trunk: as for `of_pulses`.

        Raises:
            RecordError: not one rate for each unit.
        """
        each = self.of_units(rates, trunk)
        if each.shape != (len(disturbed),):
            raise RecordError(f"{len(disturbed)} units, but rates of the shape {each.shape}")
        return float(each[np.asarray(disturbed, dtype=bool)].sum())


@dataclass(frozen=True)
class Score:
    """How well harms were predicted.

    Attributes:
        r2: 1 - sum of squared errors / the sum that a constant leaves; the constant knows no more
            than the law did (`score_predictions`). 1 is perfect, 0 no better than the constant; it
            has no lower bound.
        rank: Spearman's correlation of predicted and measured; nan where one of both is constant.
        error: root of the mean squared error, in the unit of harm.
        n: pulses.
    """

    r2: float
    rank: float
    error: float
    n: int


# -- fit -------------------------------------------------------------------------------------


def fit_law(
    harms: Sequence[float],
    rates: Sequence[float],
    trunks: Sequence[Hashable],
    *,
    length: int = 1,
    method: Method | None = None,
) -> Law:
    """Fit the law to pulses, one value each in the same order.

    >>> law = fit_law([0.09, 0.01, 0.36, 0.04], [1, 1 / 3, 1, 1 / 3], ["a", "a", "b", "b"])
    >>> round(law.exponent.value, 6), round(law.level, 6), law.method
    (2.0, 0.18, 'log')

    Args:
        harms: in the unit of the metric, positive where the pulse made it worse.
        rates: mean over the steps of the pulse, as a share of the peak rate.
        trunks: the trunk (tree and seed) of each.
        length: units of each pulse.
        method: see the module; None: "log" where all harms are positive, else "harm".

    Raises:
        RecordError: sequences of several lengths, a number that is not finite, a rate of zero or
            less; or no trunk has pulses at two rates that can be used.
    """
    y, x, names = _checked(harms, rates, trunks)
    if method is None:
        method = "log" if (y > 0).all() else "harm"
    used = y > 0 if method == "log" else np.ones(len(y), bool)
    if used.mean() < LEAST_SHARE:
        raise RecordError(
            f"{int((~used).sum())} of {len(y)} harms are zero or less and have no logarithm: "
            'use method="harm", or more seeds'
        )
    y, x, names = y[used], x[used], [n for n, use in zip(names, used, strict=True) if use]
    estimate = _by_logarithm(y, x, names) if method == "log" else _by_least_squares(y, x, names)
    return Law(
        exponent=_with_interval(estimate, y, x, names, method),
        level=estimate.level,
        levels=estimate.levels,
        spread=estimate.spread,
        noise=estimate.noise,
        length=length,
        method=method,
        pulses=len(y),
        left_out=int((~used).sum()),
    )


def fit_exponents(
    harms: Sequence[float],
    rates: Sequence[float],
    trunks: Sequence[Hashable],
    *,
    method: Method = "log",
) -> dict[Hashable, float]:
    """The exponent of each trunk alone, of those that have pulses at two rates or more.

    Args:
        harms, rates, trunks, method: as for `fit_law`.

    Raises:
        RecordError: as `fit_law`.
    """
    y, x, names = _checked(harms, rates, trunks)
    used = y > 0 if method == "log" else np.ones(len(y), bool)
    places = _places([n for n, use in zip(names, used, strict=True) if use])
    y, x = y[used], x[used]
    solve = _by_logarithm if method == "log" else _by_least_squares
    return {
        name: solve(y[at], x[at], [name] * len(at)).exponent
        for name, at in places.items()
        if not are_alike(x[at].tolist())
    }


def compare_exponents(one: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> Exponent:
    """One kind's exponents minus another's on the same trunks, with a t interval over trunks.

    Args:
        one, other: of `fit_exponents`; trunks that only one of them has are left out.

    Raises:
        RecordError: no trunk in common.
    """
    both = [one[name] - other[name] for name in one if name in other]
    if not both:
        raise RecordError("the two kinds of pulses have no trunk in common")
    return Exponent(*t_interval(both), n=len(both), over="trunks")


def _checked(
    harms: Sequence[float], rates: Sequence[float], trunks: Sequence[Hashable]
) -> tuple[Floats, Floats, list[Hashable]]:
    y, x, names = np.asarray(harms, float), np.asarray(rates, float), list(trunks)
    if not (y.ndim == x.ndim == 1 and len(y) == len(x) == len(names)):
        raise RecordError(f"{y.size} harms, {x.size} rates, {len(names)} trunks: one each")
    if not len(y):
        raise RecordError("there are no pulses to fit")
    if not (np.isfinite(y).all() and np.isfinite(x).all()):
        raise RecordError("a harm or a rate is not a finite number")
    if (x <= 0).any():
        raise RecordError("a pulse has a rate of zero or less, at which nothing is trained")
    return y, x, names


def _places(trunks: Sequence[Hashable]) -> dict[Hashable, NDArray[np.intp]]:
    """Where the pulses of each trunk are."""
    found: dict[Hashable, list[int]] = {}
    for place, name in enumerate(trunks):
        found.setdefault(name, []).append(place)
    return {name: np.asarray(at, dtype=np.intp) for name, at in found.items()}


@dataclass(frozen=True)
class _Estimate:
    exponent: float
    level: float
    levels: dict[Hashable, float]
    spread: float
    noise: float
    left: int  # degrees of freedom: pulses - trunks - 1
    loss: Callable[[float], float]  # sum of squares at an exponent, all else fitted


def _by_logarithm(y: Floats, x: Floats, trunks: Sequence[Hashable]) -> _Estimate:
    """The mixed model ``log y = a + u(trunk) + p log x + e``, by restricted maximum likelihood.

    With the ratio of variances q of u and e known, the model is ordinary least squares after
    the share ``1 - 1 / sqrt(1 + n q)`` of its mean is taken from each trunk's n values.
    """
    places = _places(trunks)
    _check_rates(x, places)
    log_y, log_x = np.log(y), np.log(x)
    counts = np.array([len(at) for at in places.values()], float)

    def reduced(ratio: float) -> tuple[Floats, Floats]:
        """(columns of 1 and log x, log y) after that share is taken."""
        columns, values = np.column_stack([np.ones_like(log_x), log_x]), log_y.copy()
        for at in places.values():
            share = 1 - 1 / math.sqrt(1 + len(at) * ratio)
            columns[at] -= share * columns[at].mean(axis=0)
            values[at] -= share * values[at].mean()
        return columns, values

    def criterion(log_ratio: float) -> float:
        """-2 x the restricted likelihood, but for constants."""
        ratio = math.exp(log_ratio)
        columns, values = reduced(ratio)
        solution = np.linalg.lstsq(columns, values, rcond=None)[0]
        squares = float(((values - columns @ solution) ** 2).sum())
        determinant = np.linalg.slogdet(columns.T @ columns)[1]
        likelihood = (len(values) - 2) * math.log(max(squares, 1e-300))
        return float(likelihood + np.log1p(counts * ratio).sum() + determinant)

    ratio = 0.0
    if len(places) > 1:
        from scipy.optimize import minimize_scalar

        best = minimize_scalar(criterion, bounds=LOG_RATIO, method="bounded")
        ratio = math.exp(float(best.x))
    columns, values = reduced(ratio)
    level, exponent = map(float, np.linalg.lstsq(columns, values, rcond=None)[0])
    rest = log_y - level - exponent * log_x
    left = len(y) - len(places) - 1

    def loss(p: float) -> float:
        remaining = values - p * columns[:, 1]
        ones = columns[:, 0]
        return float(((remaining - (ones @ remaining) / (ones @ ones) * ones) ** 2).sum())

    noise = math.sqrt(loss(exponent) / (len(y) - 2)) if len(y) > 2 else math.nan
    means = {
        name: level + float(rest[at].mean()) * (ratio * len(at) / (1 + ratio * len(at)))
        for name, at in places.items()
    }
    return _Estimate(
        exponent=exponent,
        level=math.exp(level),
        levels={name: math.exp(mean) for name, mean in means.items()},
        spread=math.sqrt(ratio) * noise,
        noise=noise,
        left=left,
        loss=loss,
    )


def _by_least_squares(y: Floats, x: Floats, trunks: Sequence[Hashable]) -> _Estimate:
    """``y = level(trunk) x^p`` with the least sum of squares: at each exponent the levels are
    linear, so that the search is over the exponent alone. The level of all trunks together has the
    least squares, too: a trunk's counts by the sum of its x^2p, and one that has only low rates,
    whose own level is extrapolated, hardly."""
    from scipy.optimize import minimize_scalar

    places = _places(trunks)
    _check_rates(x, places)

    def level_of(p: float, at: NDArray[np.intp] | slice = slice(None)) -> float:
        powers = x[at] ** p
        return float(y[at] @ powers / (powers @ powers))

    def levels(p: float) -> dict[Hashable, float]:
        return {name: level_of(p, at) for name, at in places.items()}

    def loss(p: float) -> float:
        powers, known = x**p, levels(p)
        parts = (y[at] - known[name] * powers[at] for name, at in places.items())
        return float(sum((part**2).sum() for part in parts))

    # the sum may have several minima: the bounded search starts beside the best of a grid
    grid = np.linspace(*EXPONENTS, 121)
    near = int(np.argmin([loss(p) for p in grid]))
    around = grid[max(near - 1, 0)], grid[min(near + 1, len(grid) - 1)]
    options = {"xatol": 1e-10}
    best = float(minimize_scalar(loss, bounds=around, method="bounded", options=options).x)
    found, left = levels(best), len(y) - len(places) - 1
    return _Estimate(
        exponent=best,
        level=level_of(best),
        levels=found,
        spread=math.nan,
        noise=math.sqrt(loss(best) / left) if left > 0 else math.nan,
        left=left,
        loss=loss,
    )


def _check_rates(x: Floats, places: Mapping[Hashable, NDArray[np.intp]]) -> None:
    if all(are_alike(x[at].tolist()) for at in places.values()):
        raise RecordError(
            "no trunk has pulses at two rates: an exponent needs a rate that changes during the run"
        )


# -- intervals -------------------------------------------------------------------------------


def _with_interval(
    estimate: _Estimate, y: Floats, x: Floats, trunks: Sequence[Hashable], method: Method
) -> Exponent:
    places, value = _places(trunks), estimate.exponent
    several = [name for name, at in places.items() if not are_alike(x[at].tolist())]
    if len(several) >= LEAST:
        # with one rate and a level of its own a trunk says nothing of the exponent
        among = several if method == "harm" else [*places]
        low, high = _over_trunks(value, y, x, trunks, method, among)
        return Exponent(value, low, high, n=len(among), over="trunks")
    low, high = _over_pulses(estimate)
    return Exponent(value, low, high, n=len(y), over="pulses")


def _over_trunks(
    value: float,
    y: Floats,
    x: Floats,
    trunks: Sequence[Hashable],
    method: Method,
    among: Sequence[Hashable],
) -> tuple[float, float]:
    """Jackknife over some trunks (Tukey 1958) with a t quantile."""
    from scipy.stats import t

    solve = _by_logarithm if method == "log" else _by_least_squares
    without, places = [], _places(trunks)
    for name in among:
        kept = np.setdiff1d(np.arange(len(y)), places[name])
        without.append(solve(y[kept], x[kept], [trunks[i] for i in kept]).exponent)
    k = len(without)
    error = math.sqrt((k - 1) * float(np.var(without)))
    half = float(t.ppf(0.975, k - 1)) * error
    return value - half, value + half


def _over_pulses(estimate: _Estimate) -> tuple[float, float]:
    """The exponents at which the sum of squares is not significantly larger than its least: the
    profile interval, which is the t interval where the model is linear (Bates and Watts 1988)."""
    from scipy.optimize import brentq
    from scipy.stats import t

    if estimate.left < 1:
        return math.nan, math.nan
    best, least = estimate.exponent, estimate.loss(estimate.exponent)
    allowed = least * (1 + float(t.ppf(0.975, estimate.left)) ** 2 / estimate.left)

    def above(p: float) -> float:
        return estimate.loss(p) - allowed

    ends = []
    for edge in (min(EXPONENTS[0], best - 8), max(EXPONENTS[1], best + 8)):
        if least == 0:
            ends.append(best)
        elif above(edge) <= 0:  # no exponent on this side is excluded
            ends.append(math.copysign(math.inf, edge - best))
        else:
            ends.append(float(brentq(above, best, edge)))
    return ends[0], ends[1]


# -- what is predicted -----------------------------------------------------------------------


def choose_pilots(rates: Sequence[float], count: int = 3) -> list[int]:
    """Which pulses to measure first: those nearest to an even division of log rates from the lowest
    to the highest, in the order of the pulses. Among several at one rate it is the one in the
    middle (of two, the later).

    >>> choose_pilots([1, 1, 1, 0.86, 0.32, 0.19])
    [1, 4, 5]

    Raises:
        RecordError: fewer pulses than ``count``, or fewer than two rates.
    """
    x = np.asarray(rates, float)
    if len(x) < count or count < 2 or are_alike(x.tolist()):
        raise RecordError(f"{len(x)} pulses: an exponent needs {max(count, 2)}, at two rates")
    log = np.log(x)
    chosen: list[int] = []
    wanted = np.linspace(log.min(), log.max(), count)
    # from both ends inwards: the pulse nearest to a value between may be one of the ends
    for value in sorted(wanted, key=lambda v: -abs(v - wanted.mean())):
        free = [place for place in range(len(x)) if place not in chosen]
        away = np.abs(log[free] - value)
        nearest = [place for place, d in zip(free, away, strict=True) if d <= away.min() + 1e-9]
        chosen.append(nearest[len(nearest) // 2])
    return sorted(chosen)


def score_predictions(
    measured: Sequence[float], predicted: Sequence[float], constant: float | Sequence[float]
) -> Score:
    """How well harms were predicted.

    Args:
        measured, predicted: in the unit of harm, one for each pulse that was not fitted.
        constant: what would be said without the law, e.g. the mean harm of the pulses that were;
            one for each pulse where they are of several trees.
    """
    from scipy.stats import spearmanr

    real, said = np.asarray(measured, float), np.asarray(predicted, float)
    errors, plain = (
        float(((real - said) ** 2).sum()),
        float(((real - np.asarray(constant)) ** 2).sum()),
    )
    n = len(real)
    rank = math.nan
    if n > 1 and not are_alike(real.tolist()) and not are_alike(said.tolist()):
        rank = float(spearmanr(real, said).statistic)
    return Score(
        r2=1 - errors / plain if plain else math.nan,
        rank=rank,
        error=math.sqrt(errors / n) if n else math.nan,
        n=n,
    )
