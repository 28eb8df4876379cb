"""What a sentence says, checked where the sentence stands: filters and functions of templates.

``{{ effect("small", "low", "high") | above | ci }}`` prints the interval, and fails where it does
not lie above zero. So a sentence that says "more" cannot outlive a number that says "less".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regimes.base.console.units import p_text

from .values import Interval, decimal
from .verdicts import ALPHA, verdict


class ClaimError(Exception):
    """A number does not support the sentence that quotes it."""


def above(value: Interval, least: float = 0.0) -> Interval:
    """The whole interval is above ``least``."""
    return _checked(value, value.low > least, f"above {least:g}")


def below(value: Interval, most: float = 0.0) -> Interval:
    """The whole interval is below ``most``."""
    return _checked(value, value.high < most, f"below {most:g}")


def unresolved(value: Interval, at: float = 0.0) -> Interval:
    """The interval holds ``at``: no difference is shown."""
    return _checked(value, value.low <= at <= value.high, f"an interval with {at:g} in it")


def significant(value: Interval) -> Interval:
    """p after Holm's correction is below 0.05."""
    return _checked(value, value.p_holm < ALPHA, "p (Holm) below 0.05")


def insignificant(value: Interval) -> Interval:
    """p after Holm's correction is 0.05 or more."""
    return _checked(value, value.p_holm >= ALPHA, "p (Holm) of 0.05 or more")


def _checked(value: Interval, holds: bool, expected: str) -> Interval:
    if not holds:
        raise ClaimError(f"expected {expected}, got {value.text(3)}, p (Holm) {value.p_holm:.3g}")
    return value


def check(holds: object, says: str) -> str:
    """For anything else that a sentence says; prints nothing."""
    if not holds:
        raise ClaimError(f"this no longer holds: {says}")
    return ""


# -- how numbers are written -----------------------------------------------------------------


def ci(value: Interval, digits: int = 1, sign: bool = False) -> str:
    """Mean and interval, with so many digits after the point."""
    return value.text(digits, sign)


def sig(value: Interval, digits: int = 2) -> str:
    """Mean and interval, with so many significant digits."""
    return value.text(digits, significant=True)


def ci0(value: Interval) -> str:
    """Whole numbers, with commas: "1,963 [407, 9,471]"."""
    return value.text(0)


def num(value: float | Interval, digits: int = 1, sign: bool = False) -> str:
    """A number, or the mean of one with an interval."""
    x = value.mean if isinstance(value, Interval) else value
    return decimal(x, digits, sign)


def pct(value: float, digits: int = 0) -> str:
    """A share in per cent."""
    return f"{decimal(100 * value, digits)} %"


def g(value: float, digits: int = 2) -> str:
    """A number with so many significant digits."""
    return f"{value:.{digits}g}"


def named_verdict(value: Interval, margin: float = 1.0) -> str:
    """What the interval says, compared with a margin (`analysis.findings.verdicts`)."""
    return verdict(value.low, value.high, margin)


FILTERS: dict[str, Callable[..., Any]] = {
    "above": above,
    "below": below,
    "unresolved": unresolved,
    "significant": significant,
    "insignificant": insignificant,
    "ci": ci,
    "ci0": ci0,
    "sig": sig,
    "num": num,
    "pct": pct,
    "g": g,
    "p": p_text,
    "verdict": named_verdict,
}
