"""What the harms of one pulse say, one number per seed: safe, harmful or not known yet. No torch.

A pulse is *safe* if the upper end of the interval of its harm is below the margin, *harmful* if the
lower end is above 0 and the mean above the margin, else *open*. A pulse is looked at again after
more seeds, and each look may be wrong. So the interval is the 95 % t interval at three seeds, and
its level rises with their number n to ``1 - 0.05 x 3 / n``. Error is spent over the looks (Lan and
DeMets 1983), by a formula that was chosen by simulation. The harm there equals the margin and is
normal, so that each call of safe is wrong. A search that looks after each seed makes one in 6 % of
cases up to 40 seeds, and in 7 % up to 200; with a 95 % interval at each look it would be 15 and
21 %. A search (`harms.decide`) looks less often, and is wrong less often.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regimes.base.statistics import LEAST, ratio_interval

Call = Literal["safe", "harmful", "open"]
WORDS: dict[Call, str] = {"safe": "safe", "harmful": "harmful", "open": "unresolved"}
Comparison = Literal["more", "less", "open"]
ERROR = 0.05  # the share of wrong intervals at the first look, both ends together
MOST_SEEDS = 200  # no more are proposed: the wrong calls above were counted up to so many


@dataclass(frozen=True)
class PulseVerdict:
    """Holds what the harms of one pulse say.

    Attributes:
        harm: mean over seeds; nan without any.
        low, high: its interval, which may be looked at again (`half_width`); nan below `LEAST`
            seeds.
        n: seeds.
        needed: seeds, all together, with which the interval would decide if mean and spread stayed;
            None: no number up to `MOST_SEEDS`, or not known; ``n`` where it is decided.
    """

    call: Call
    harm: float
    low: float
    high: float
    n: int
    needed: int | None


def judge_harms(harms: Sequence[float], margin: float, grain: float = 0.0) -> PulseVerdict:
    """Judge the harms of one pulse, one number per seed. An infinite one is a training that broke.

    Args:
        margin: in the unit of harm; what is below counts as none.
        grain: the smallest step of the metric, e.g. 1 / test samples of an accuracy. Rounding to it
            has a standard deviation of grain / sqrt(6) in a difference, and the harms of a few
            seeds that are alike by rounding have no smaller one.

    >>> judge_harms([0.1, 0.2, 0.3], margin=1.0).call, judge_harms([1.0, 1.1, 1.2], margin=0.5).call
    ('safe', 'harmful')
    """
    n = len(harms)
    if any(math.isinf(x) for x in harms):
        return PulseVerdict("harmful", math.inf, math.inf, math.inf, n, n)
    if n < LEAST:
        mean = float(np.mean(harms)) if n else math.nan
        return PulseVerdict("open", mean, math.nan, math.nan, n, None)
    mean, spread = float(np.mean(harms)), max(float(np.std(harms, ddof=1)), grain / math.sqrt(6))
    half = half_width(spread, n)
    call: Call = "open"
    if mean + half < margin:
        call = "safe"
    elif mean - half > 0 and mean > margin:
        call = "harmful"
    needed = n if call != "open" else seeds_needed(mean, spread, margin, n)
    return PulseVerdict(call, mean, mean - half, mean + half, n, needed)


@dataclass(frozen=True)
class LostTime:
    """Compares the harm of a pulse with the harm of leaving its units out, over the seeds that have
    both.

    Attributes:
        call: does the pulse harm more or less? By the interval of the paired difference.
        lost: the verdict on the units left out.
        times: the harm as a multiple of it, the ratio of the means; nan where the units left out
            may harm by nothing.
        low, high: the interval of the multiple.
    """

    call: Comparison
    lost: PulseVerdict
    times: float
    low: float
    high: float

    def spell(self, number: float) -> str:
        """Write the multiple, or an end of its interval, in the digits of the multiple."""
        return f"{number:.{2 if self.times < 1 else 1 if self.times < 10 else 0}f}"


def judge_lost_time(
    harms: Sequence[float], lost: Sequence[float], margin: float, grain: float = 0.0
) -> LostTime:
    """Compare a pulse with its units left out, one number per seed of both; other arguments as for
    `judge_harms`.

    >>> judge_lost_time([2.0, 2.1, 2.2], [1.0, 1.1, 0.9], margin=0.5).call
    'more'
    """
    verdict, n = judge_harms(lost, margin, grain), len(lost)
    if any(map(math.isinf, (*harms, *lost))):
        broke: Comparison = "more" if math.isinf(sum(harms)) else "less"
        return LostTime(broke, verdict, math.nan, math.nan, math.nan)
    if n < LEAST:
        return LostTime("open", verdict, math.nan, math.nan, math.nan)
    differences, least = np.subtract(harms, lost), grain / math.sqrt(6)
    mean = float(np.mean(differences))
    half = half_width(max(float(np.std(differences, ddof=1)), least), n)
    call: Comparison = "more" if mean > half else "less" if mean < -half else "open"
    if verdict.low <= 0:
        return LostTime(call, verdict, math.nan, math.nan, math.nan)
    ends = ratio_interval(harms, lost, _quantile(n), least)
    return LostTime(call, verdict, float(np.mean(harms)) / verdict.harm, *ends)


def half_width(spread: float, n: int) -> float:
    """Return half of the t interval of a mean of ``n`` values, of the level ``1 - 0.05 x LEAST /
    n``."""
    return _quantile(n) * spread / math.sqrt(n)


@functools.cache
def _quantile(n: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - ERROR / 2 * LEAST / n, n - 1))


def seeds_needed(mean: float, spread: float, margin: float, n: int = 0) -> int | None:
    """Return the smallest number of seeds above ``n`` at which the interval decides, at this mean
    and spread; None above `MOST_SEEDS`."""
    distance = margin - mean if mean < margin else mean
    counts = range(max(LEAST, n + 1), MOST_SEEDS + 1)
    return next((k for k in counts if half_width(spread, k) < distance), None)
