"""Verdicts: what an interval says of an effect, and of a sentence that expects one. Numbers only.

The *verdict* is decided by the 95 % t interval of the mean effect, relative to zero (`Claim.base`)
and to the margin, the smallest effect that matters. It is one of six:

- *better*: above zero, and an effect as large as the margin is not excluded;
- *better, within the margin*: above zero and below the margin, so too small to matter;
- *equivalent*: contains zero and lies between minus the margin and the margin;
- *worse, within the margin*, and *worse*: the same below zero;
- *open*: contains zero and an effect that matters; more seeds are needed.

A sentence expects *more* (an effect that matters) or *no less* (no loss that matters; the opposite
of more in the other direction). More is *supported* if the effect is better, also after Holm's
correction within the family, and its mean at least the margin; *contradicted* if the interval lies
below the margin; open otherwise. So a claim of no effect is decided by the interval alone, and a
claim of an effect must also hold after correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from regimes.console.units import interval_text as interval_text

Verdict = Literal[
    "better", "better, within the margin", "equivalent", "worse, within the margin", "worse", "open"
]
Expect = Literal["more", "no less"]
Outcome = Literal["supported", "contradicted", "open"]
LEVEL = 0.05
MOST, DIGITS = 20, 9  # values whose signs are all tried; digits in which ties are equal


def verdict(low: float, high: float, margin: float) -> Verdict:
    """Of an interval about zero; open where there is none (nan).

    >>> verdict(-0.97, -0.02, 1), verdict(0.29, 1.25, 1), verdict(-0.6, 2.1, 1)
    ('worse, within the margin', 'better', 'open')
    """
    if not low <= high:
        return "open"
    within = -margin < low and high < margin
    if low > 0:
        return "better, within the margin" if within else "better"
    if high < 0:
        return "worse, within the margin" if within else "worse"
    return "equivalent" if within else "open"


def outcome(expect: Expect, low: float, high: float, margin: float, p: float) -> Outcome:
    """Whether a sentence is supported; ``p`` is that of no effect, corrected for the family.

    >>> outcome("more", 0.29, 1.25, 1, 0.01), outcome("more", 0.29, 2.25, 1, 0.01)
    ('open', 'supported')
    >>> outcome("no less", -0.97, -0.02, 1, 0.04), outcome("more", -0.97, -0.02, 1, 0.04)
    ('supported', 'contradicted')
    """
    if expect == "no less":  # the other side is not more
        other = outcome("more", -high, -low, margin, p)
        return {"supported": "contradicted", "contradicted": "supported", "open": "open"}[other]  # type: ignore[return-value]
    if high < margin:
        return "contradicted"
    shown = verdict(low, high, margin) == "better" and p < LEVEL and (low + high) / 2 >= margin
    return "supported" if shown else "open"


def p_value(values: Sequence[float], base: float = 0.0) -> float:
    """Two-sided p of a t test that the mean is ``base``: below 0.05 where the 95 % interval
    excludes it. nan for a single value, and for equal values, which carry no information on
    sampling."""
    from scipy import stats

    if len(values) < 2 or alike(values):
        return math.nan
    return float(stats.ttest_1samp(values, base).pvalue)


def p_ranks(values: Sequence[float], base: float = 0.0) -> float:
    """Two-sided p of the signed-rank test (Wilcoxon 1945), which assumes no normal distribution.

    Exact, over all signs, of up to `MOST` values. Ties share their mean rank; values that differ by
    rounding alone are ties. nan as for `p_value`. Never below `least_p`."""
    from scipy import stats

    if len(values) < 2 or alike(values):
        return math.nan
    lost = np.subtract(values, base)
    lost = np.round(lost / np.abs(lost).max(), DIGITS)
    lost = lost[lost != 0]
    if len(lost) < 2:
        return 1.0
    if len(lost) > MOST:
        return float(stats.wilcoxon(lost).pvalue)
    ranks = np.sign(lost) * stats.rankdata(np.abs(lost))
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
    """The smallest p of the signed-rank test on ``n`` values: all of one sign, so one order of
    signs in 2^n on either side. Five values cannot reach 0.05.

    >>> least_p(5), least_p(6)
    (0.0625, 0.03125)
    """
    return 2.0 ** (1 - n)


def p_text(value: float) -> str:
    """p with two digits; empty where there is none."""
    return "" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.2g}"


def alike(values: Sequence[float]) -> bool:
    """Whether all values are equal up to rounding."""
    return bool(np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())))


def holm(values: Sequence[float]) -> list[float]:
    """p values of a family, corrected for the probability of one false alarm in it (Holm 1979).

    The i-th smallest of k is multiplied by k - i; none ends below a smaller one. nan does not
    count.

    >>> holm([0.01, 0.04, 0.03, math.nan])
    [0.03, 0.06, 0.06, nan]
    """
    known = sorted((p, i) for i, p in enumerate(values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(values), 0.0
    for place, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        corrected[i] = largest
    return corrected
