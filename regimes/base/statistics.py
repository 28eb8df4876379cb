"""Statistics that reports, figures and the study share: intervals, tests, corrections, agreement.

Values are one number per run, e.g. a difference between two schedules with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regimes.base.errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

Calls = NDArray[np.bool_]  # [epochs] or [epochs, layers]: is it critical?
Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
LEAST = 3  # values that an interval needs
MOST_EXACT = 20  # values up to which all orders of signs are tried
DIGITS = 9  # in which ties of ranks are equal


def t_interval(values: Sequence[float], within: Range = ANY) -> tuple[float, float, float]:
    """Compute the mean and the 95 % t interval of the mean; the ends are nan for fewer than
    ``LEAST`` values (of two it would reach six times as far as they are apart, whatever they are)
    and where all values are alike, which say nothing about sampling.

    Args:
        within: what the mean can be, e.g. 0 to 1 for a share: the interval ends there. A mean
            that lies outside was given a wrong range: the interval ends at the mean.
    """
    from scipy.special import stdtrit  # what `scipy.stats.t.ppf` calls, without its imports

    mean, n = float(np.mean(values)), len(values)
    if n < LEAST or are_alike(values):
        return mean, math.nan, math.nan
    half = float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n))
    low, high = max(mean - half, within[0]), min(mean + half, within[1])
    return mean, min(mean, low), max(mean, high)


def ratio_interval(
    over: Sequence[float],
    under: Sequence[float],
    quantile: float | None = None,
    least_spread: float = 0.0,
) -> tuple[float, float]:
    """Compute the interval of the ratio of two means of paired values (Fieller 1954): the ratios r
    at which the mean of ``over - r x under`` is not significantly different from 0. nan where it
    has no two ends, because the lower mean may be 0; and for fewer than ``LEAST`` values.

    Args:
        quantile: of the t distribution; default that of a 95 % interval.
        least_spread: the standard deviation that either has at least, because it is rounded.
    """
    from scipy.special import stdtrit

    x, y, n = np.asarray(under, float), np.asarray(over, float), len(over)
    if n < LEAST:
        return math.nan, math.nan
    square = float(stdtrit(n - 1, 0.975) if quantile is None else quantile) ** 2
    (xx, xy), (_, yy) = np.cov(x, y) / n
    xx, yy = (max(own, least_spread**2 / n) for own in (xx, yy))
    a, b, c = (
        x.mean() ** 2 - square * xx,
        x.mean() * y.mean() - square * xy,
        y.mean() ** 2 - square * yy,
    )
    inside = b * b - a * c
    if a <= 0 or inside < 0:
        return math.nan, math.nan
    return float((b - math.sqrt(inside)) / a), float((b + math.sqrt(inside)) / a)


def interval_names(column: str = "") -> tuple[str, str]:
    """Name the columns of an interval's ends: ``ci_low`` and ``ci_high``; in a table of several
    means, after the name of the mean's column.

    >>> interval_names(), interval_names("kappa")
    (('ci_low', 'ci_high'), ('kappa_ci_low', 'kappa_ci_high'))
    """
    prefix = f"{column}_" if column else ""
    return f"{prefix}ci_low", f"{prefix}ci_high"


def read_interval(row: Mapping[Any, Any] | pd.Series, column: str) -> tuple[float, float]:
    """Read the ends of a mean's interval in a table's row: of its column, else of the row's only
    one."""
    low, high = interval_names(column)
    if low not in row:
        low, high = interval_names()
    return float(row[low]), float(row[high])


def pair_by_seed(runs: pd.DataFrame, a: str, b: str, column: str) -> pd.DataFrame:
    """Pair the values of ``a`` and ``b``, a column each and a row for each seed that both have.

    Args:
        runs: one row per run, with columns name, seed and ``column``.

    Raises:
        RecordError: no seed in common.
    """
    wide = runs[runs["name"].isin([a, b])].pivot(index="seed", columns="name", values=column)
    wide = wide.reindex(columns=[*{a, b}]).dropna()
    if wide.empty:
        raise RecordError(f"{a} and {b} have no seed in common: run both with the same seeds")
    return wide


def paired_differences(runs: pd.DataFrame, a: str, b: str, column: str) -> list[float]:
    """Subtract ``b`` from ``a``, seed by seed; arguments and errors as `pair_by_seed`."""
    wide = pair_by_seed(runs, a, b, column)
    return (wide[a] - wide[b]).to_list()


def are_alike(values: Sequence[float]) -> bool:
    """Answer whether values are one number, but for rounding."""
    return bool(np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())))


def p_value(values: Sequence[float], base: float = 0.0) -> float:
    """Compute the two-sided p of a t test that the mean is ``base``: below 0.05 where the interval
    leaves it out. nan for a single value, where all are alike (they say nothing about sampling),
    and where one is nan."""
    from scipy import stats

    if len(values) < 2 or are_alike(values):
        return math.nan
    return float(stats.ttest_1samp(values, base).pvalue)


def p_ranks(values: Sequence[float], base: float = 0.0) -> float:
    """Compute the two-sided p of the signed-rank test (Wilcoxon 1945), which assumes no normal
    distribution.

    Over all orders of signs up to ``MOST_EXACT`` values, ties sharing their mean rank; values that
    differ by rounding alone are ties. nan as for `p_value`. It is never below `least_p`.
    """
    from scipy import stats

    if len(values) < 2 or are_alike(values) or np.isnan(values).any():
        return math.nan
    shifted = np.subtract(values, base)
    shifted = np.round(shifted / np.abs(shifted).max(), DIGITS)
    shifted = shifted[shifted != 0]
    if len(shifted) < 2:
        return 1.0
    if len(shifted) > MOST_EXACT:
        return float(stats.wilcoxon(shifted).pvalue)
    ranks = np.sign(shifted) * stats.rankdata(np.abs(shifted))
    test = stats.permutation_test(
        (ranks,),
        lambda signed, axis: signed.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
        batch=4096,
    )
    return float(test.pvalue)


def least_p(n: int) -> float:
    """Compute the smallest p of the signed-rank test on ``n`` values: all of one sign, so one order
    of signs in 2^n on either side. Five values cannot reach 0.05.

    >>> least_p(5), least_p(6)
    (0.0625, 0.03125)
    """
    return 2.0 ** (1 - n)


def correct_by_holm(values: Sequence[float]) -> list[float]:
    """Correct the p values of a family so that one false alarm in it has at most the level's
    probability (Holm 1979): the i-th smallest of k times k - i, and never below a smaller one's.
    nan values are ignored.

    >>> correct_by_holm([0.01, 0.04, 0.03, math.nan])
    [0.03, 0.06, 0.06, nan]
    """
    known = sorted((p, i) for i, p in enumerate(values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(values), 0.0
    for place, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        corrected[i] = largest
    return corrected


def jaccard(a: Calls, b: Calls) -> float:
    """Divide both critical by either critical (Jaccard 1912); nan if neither ever is.

    >>> a, b = np.array([1, 1, 1, 0, 0, 0], bool), np.array([1, 1, 0, 1, 0, 0], bool)
    >>> jaccard(a, b), jaccard(a, a), jaccard(a, ~a)
    (0.5, 1.0, 0.0)
    """
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else math.nan


def kappa(a: Calls, b: Calls) -> float:
    """Compute the agreement beyond chance (Cohen 1960): ``(p - q) / (1 - q)``, with q the agreement
    of independent calls of the same frequency; nan if both are constant and alike.

    >>> a, b = np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)
    >>> kappa(a, b), kappa(a, a), kappa(a, ~a)  # half agree, as by chance; all; none
    (0.0, 1.0, -1.0)
    """
    p, share_a, share_b = float((a == b).mean()), float(a.mean()), float(b.mean())
    chance = share_a * share_b + (1 - share_a) * (1 - share_b)
    return (p - chance) / (1 - chance) if chance < 1 else math.nan
