"""A mean over seeds as a title says it: no more than its numbers do.

Every title that states an effect takes its words from here: `MeanInterval.verdict` decides whether
the effect is shown, not shown or open; `text` is its size with the interval, or with the seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from regimes.base.statistics import ANY, LEAST, Range, read_interval, t_interval

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["above", "below", "not shown", "open"]
MOST_DIGITS = 6  # after the point
COUNTS = ("different seeds", "one seed", "two seeds")  # of so many in common


@dataclass(frozen=True)
class MeanInterval:
    """Holds a mean and its 95 % interval.

    Attributes:
        low, high: nan without an interval: of fewer than `LEAST` values, and of equal ones, which
            say nothing about sampling.
        n: how many values; 0 if they are of no common seeds.
    """

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float], within: Range = ANY) -> MeanInterval:
        """Average those values that are finite.

        Args:
            within: what the mean can be: its interval ends there.
        """
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(*t_interval(finite, within), len(finite))

    @classmethod
    def at(cls, row: Mapping[Any, Any] | pd.Series, column: str) -> MeanInterval:
        """Take the number of a table's row that has the column ``column`` and those of its interval
        (`statistics.read_interval`), and n where it is known (default: enough seeds)."""
        value, (low, high) = float(row[column]), read_interval(row, column)
        n = row.get("n", LEAST)
        n = 0 if n is None or math.isnan(n) or not math.isfinite(value) else int(n)
        width = high - low if n >= LEAST else 0.0
        if not width > 1e-9 * max(1.0, abs(value)):  # nan, or equal values
            low = high = math.nan
        return cls(value if n else math.nan, low, high, n)

    def verdict(self, base: float = 0.0) -> Verdict:
        """Return what a title may say of the mean against ``base``: "above" or "below" where the
        interval leaves ``base`` out, "not shown" where it does not, and "open" where there is none,
        since fewer than `LEAST` seeds have a value or all have the same one.

        >>> samples = [1.0, 1.1, 1.2], [1.0, 0.0, 0.5], [9.0]
        >>> [MeanInterval.of(values).verdict() for values in samples]
        ['above', 'not shown', 'open']
        """
        if self.n < LEAST or not self.low < self.high:
            return "open"
        if self.low > base:
            return "above"
        return "below" if self.high < base else "not shown"

    def is_above(self, base: float) -> bool:
        """Answer whether the mean is shown to lie above."""
        return self.verdict(base) == "above"

    def is_below(self, base: float) -> bool:
        """Answer whether the mean is shown to lie below."""
        return self.verdict(base) == "below"

    @property
    def size(self) -> MeanInterval:
        """Drop the sign of the mean; the interval turns with it."""
        return MeanInterval(-self.value, -self.high, -self.low, self.n) if self.value < 0 else self

    def text(self, form: str, unit: str = "") -> str:
        """Write "0.51 bits [0.48, 0.54]"; without an interval " in two seeds", " in all 5 seeds".

        >>> MeanInterval.of([1.0, 2.0, 3.0]).text(".1f", "points")
        '2.0 points [-0.5, 4.5]'
        >>> MeanInterval.of([1.0, 2.0]).text(".1f")
        '1.5 in two seeds'
        """
        return f"{self.numbers(form, unit)}{self.seeds}"

    def numbers(self, form: str, unit: str = "") -> str:
        """Write `text` without the seeds, which the sentence names elsewhere."""
        size = f"{format_number(self.value, form)} {unit}".rstrip()
        if math.isnan(self.low):
            return size
        apart = self.low > 0 or self.high < 0
        low, high = (_beside_zero(end, form, apart) for end in (self.low, self.high))
        return f"{size} [{low}, {high}]"

    @property
    def seeds(self) -> str:
        """Say of which seeds a mean without an interval is."""
        if not math.isnan(self.low):
            return ""
        count = COUNTS[self.n] if self.n < LEAST else f"all {self.n} seeds"
        return f" in {count}"


def _beside_zero(end: float, form: str, apart: bool) -> str:
    """An interval's end, with as many digits as show that it is not zero where zero is ``apart``.

    >>> _beside_zero(0.031, ".1f", True), _beside_zero(0.031, ".1f", False)
    ('0.03', '0.0')
    """
    text = format_number(end, form)
    found = re.fullmatch(r"(\+?)\.(\d)f", form)
    if apart and found and float(text) == 0:
        digits = int(found[2]) + 1
        return _beside_zero(end, f"{found[1]}.{digits}f", digits < MOST_DIGITS)
    return text


def format_number(value: float, form: str) -> str:
    """Round a number; a zero has no minus, and a number that is none does not look like one.

    >>> format_number(-0.01, ".1f"), format_number(0.01, "+.1f")
    ('0.0', '0.0')
    """
    text = f"{value:{form}}"
    return text.lstrip("+-") if math.isfinite(value) and float(text) == 0 else text
