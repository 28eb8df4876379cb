"""Numbers as text."""

from __future__ import annotations

import math


def format_quantity(count: float | int, unit: str = "") -> str:
    """Write a number in three digits, with a prefix and a unit.

    >>> format_quantity(1_080_000), format_quantity(1_080_000, "B"), format_quantity(12, "B")
    ('1.08 M', '1.08 MB', '12 B')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * factor:
            scaled = count / factor
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f} {prefix}{unit}"
    return f"{count:.0f} {unit}".rstrip()


def interval_text(low: float, high: float, form: str) -> str:
    """Write an interval; empty where there is none.

    >>> interval_text(-0.51, 1.0, "+.1f")
    '[-0.5, +1.0]'
    """
    return "" if math.isnan(low) else f"[{low:{form}}, {high:{form}}]"


def p_text(value: float) -> str:
    """Write p with two digits; empty where there is none."""
    return "" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.2g}"


def metric_unit(name: str) -> tuple[float, str]:
    """Return the factor from a record's unit of a metric to the one that is shown, and what stands
    behind the number: an accuracy is recorded as a share and shown in per cent.

    >>> metric_unit("accuracy"), metric_unit("bits per byte")
    ((100.0, ' %'), (1.0, ''))
    """
    return (100.0, " %") if name == "accuracy" else (1.0, "")
