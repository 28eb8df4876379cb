"""How well two detectors agree, and the mean of a few runs with its interval. Pure numpy.

Calls are boolean arrays whose first axis is the epoch; a second axis, if any, is the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Calls = NDArray[np.bool_]
LEAST = 3  # values that an interval needs
FARTHEST = 5  # epochs of lead or lag that are looked for


def jaccard(a: Calls, b: Calls) -> float:
    """Both critical over either critical (Jaccard 1912); nan if neither ever is.

    >>> a, b = np.array([1, 1, 1, 0, 0, 0], bool), np.array([1, 1, 0, 1, 0, 0], bool)
    >>> jaccard(a, b), jaccard(a, a), jaccard(a, ~a)
    (0.5, 1.0, 0.0)
    """
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else math.nan


def kappa(a: Calls, b: Calls) -> float:
    """Agreement beyond chance (Cohen 1960): ``(p - q) / (1 - q)``, with q the agreement of
    independent calls of the same frequency; nan if both are constant and alike.

    >>> a, b = np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)
    >>> kappa(a, b), kappa(a, a), kappa(a, ~a)  # half agree, as by chance; all; none
    (0.0, 1.0, -1.0)
    """
    p, share_a, share_b = float((a == b).mean()), float(a.mean()), float(b.mean())
    chance = share_a * share_b + (1 - share_a) * (1 - share_b)
    return (p - chance) / (1 - chance) if chance < 1 else math.nan


def lag(a: Calls, b: Calls, farthest: int = FARTHEST) -> tuple[float, float]:
    """By how many epochs ``b`` follows ``a`` (negative: leads it), and the agreement there.

    The shift s of at most ``farthest`` epochs, and at most a quarter of the run, that maximises
    the Jaccard index of ``a[e]`` with ``b[e + s]`` over the epochs that both have; of equals the
    smallest, of opposite ones the lead. (nan, nan) if no shift has a critical call.
    """
    best, where = math.nan, math.nan
    reach = min(farthest, len(a) // 4)
    for shift in sorted(range(-reach, reach + 1), key=abs):
        early, late = (a, b) if shift >= 0 else (b, a)
        kept = len(a) - abs(shift)
        value = jaccard(early[:kept], late[len(a) - kept :])
        if not math.isnan(value) and (math.isnan(best) or value > best + 1e-12):
            best, where = value, float(shift)
    return where, best


def majority(calls: Calls) -> Calls:
    """Per epoch: are at least half of the layers critical?"""
    return calls if calls.ndim == 1 else calls.mean(1) >= 0.5


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t interval of the mean; the ends are nan for fewer than ``LEAST`` values: of
    two it reaches six times as far as they are apart, whatever they are."""
    from scipy.stats import t

    mean, n = float(np.mean(values)), len(values)
    if n < LEAST:
        return mean, math.nan, math.nan
    half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half
