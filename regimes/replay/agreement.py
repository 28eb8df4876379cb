"""By how many epochs one detector follows another. Pure numpy.

Calls are boolean arrays whose first axis is the epoch; a second axis, if any, is the layer.
"""

from __future__ import annotations

import math

from regimes.statistics import Calls, jaccard

FARTHEST = 5  # epochs of lead or lag that are looked for


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
