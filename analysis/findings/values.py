"""`Interval`, a number with its interval, which most functions of this package return; rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any

from regimes.base.statistics import LEAST, p_value, t_interval

if TYPE_CHECKING:
    import pandas as pd

DIGITS = 8  # significant ones that are kept: the last bits differ between processors


@dataclass(frozen=True)
class Interval:
    """The mean of one value per seed.

    Attributes:
        mean: arithmetic; of `of_ratios` geometric.
        low, high: ends of the 95 % t interval of the mean.
        n: number of values.
        p: of the t test that the mean is 0 (of a ratio: 1); nan where it was not computed.
        p_holm: the same after Holm's correction, where the number is one of a family.
    """

    mean: float
    low: float
    high: float
    n: int = 0
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def alike(self) -> bool:
        """Are all values one number? Then no end is known."""
        return math.isnan(self.low) and self.n >= LEAST

    def __neg__(self) -> Interval:
        """The interval of b - a, where this is the interval of a - b."""
        return dataclasses.replace(self, mean=-self.mean, low=-self.high, high=-self.low)

    def text(self, digits: int = 1, sign: bool = False, significant: bool = False) -> str:
        """As "0.5 [-0.1, 1.1]"; with a sign "+0.5 [-0.1, +1.1]". Where both ends would be written
        alike and are not, with more digits.

        >>> Interval(0.51, -0.04, 1.06).text()
        '0.5 [0.0, 1.1]'
        >>> Interval(0.51, -0.06, 1.06).text(sign=True)
        '+0.5 [-0.1, +1.1]'
        >>> Interval(0.0083, 0.0054, 0.0112).text(2)
        '0.008 [0.005, 0.011]'
        """

        def spell(x: float) -> str:
            return significant_text(x, digits) if significant else decimal(x, digits, sign)

        apart = self.high - self.low > 10.0**-DIGITS * abs(self.mean)
        while apart and digits < DIGITS and spell(self.low) == spell(self.high):
            digits += 1

        if math.isnan(self.low):
            return spell(self.mean)
        return f"{spell(self.mean)} [{spell(self.low)}, {spell(self.high)}]"


def decimal(x: float, digits: int, sign: bool = False) -> str:
    """A number with so many digits after the point. It is first cut to `DIGITS` significant digits,
    and a half is then rounded away from zero: the last bits, which differ between processors,
    decide nothing. An end of an interval that is infinite is "inf".

    >>> decimal(0.475, 2), f"{0.475:.2f}", decimal(-0.04, 1), decimal(-0.04, 1, sign=True)
    ('0.48', '0.47', '0.0', '-0.0')
    """
    if math.isinf(x):
        return f"{x:+}" if sign else f"{x}"
    exact = Decimal(f"{x:.{DIGITS}g}").quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{exact:+,f}" if sign else f"{exact if exact else abs(exact):,f}"


def significant_text(x: float, digits: int = 2) -> str:
    """A number with so many significant digits, and at least all digits before the point.

    >>> significant_text(0.6), significant_text(1.02), significant_text(9.1), significant_text(371)
    ('0.60', '1.0', '9.1', '371')
    """
    text = f"{x:#.{digits}g}"
    return f"{x:,.0f}" if "e+" in text else text.removesuffix(".")


def mean_of(values: Sequence[float]) -> Interval:
    """Mean, 95 % t interval and p of a t test against 0."""
    mean, low, high = t_interval(values)
    return Interval(mean, low, high, n=len(values), p=p_value(values))


def over_common_seeds(differences: pd.Series[float]) -> Interval:
    """`mean_of` a difference of columns by seed, which is nan where one of them lacks the seed.

    Raises:
        ValueError: they have no seed in common.
    """
    known = differences.dropna()
    if known.empty:
        raise ValueError("no seed in common")
    return mean_of(known.to_list())


def of_ratios(logarithms: Sequence[float]) -> Interval:
    """Geometric mean of ratios from their logarithms, with interval; p is against a ratio of 1."""
    logs = mean_of(logarithms)
    mean, low, high = (math.exp(x) for x in (logs.mean, logs.low, logs.high))
    return Interval(mean, low, high, n=logs.n, p=logs.p)


# -- as JSON ---------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """For ``numbers.json``: floats rounded, nan as null, a table's text as its lines."""
    if isinstance(value, Interval):
        return {"interval": [encode(x) for x in dataclasses.astuple(value)]}
    if isinstance(value, str):
        return {"lines": value.split("\n")} if "\n" in value else value
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        return {str(key): encode(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [encode(x) for x in value]
    return None if math.isnan(value) else float(f"{value:.{DIGITS}g}")


def decode(value: Any) -> Any:
    """What `encode` was given; None for a nan that is no part of an interval."""
    if isinstance(value, dict):
        if value.keys() == {"interval"}:
            mean, low, high, n, p, p_holm = (
                math.nan if x is None else x for x in value["interval"]
            )
            return Interval(mean, low, high, int(n), p, p_holm)
        if value.keys() == {"lines"}:
            return "\n".join(value["lines"])
        return {key: decode(x) for key, x in value.items()}
    if isinstance(value, list):
        return [decode(x) for x in value]
    return value
