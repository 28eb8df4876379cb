"""Means and their intervals in any table, found by the names of its columns."""

from __future__ import annotations

import re

import pandas as pd

LOW, HIGH = "ci_low", "ci_high"


def interval_complaints(table: pd.DataFrame) -> list[str]:
    """What is wrong with a table's intervals: rows in which low <= mean <= high does not hold, an
    end without the other, and ends of another
    name.

    The mean of ``X_ci_low`` is ``X``, that of ``ci_low`` the column before it.
    """
    names = [str(name) for name in table.columns]
    said = [
        f"{name}: not {LOW}"
        for name in names
        if re.search(r"(?<!_ci)_low$", f"_{name}") and name.removesuffix("low") + "high" in names
    ]
    for low in (name for name in names if f"_{name}".endswith(f"_{LOW}")):
        high = low.removesuffix(LOW) + HIGH
        mean = low.removesuffix(f"_{LOW}") if low != LOW else names[names.index(low) - 1]
        if high not in names or mean not in names:
            said.append(f"{low}: no {high}, or no {mean}")
            continue
        rows = table[[low, mean, high]].astype(float).dropna()
        slack = 1e-12 * rows.abs().max(axis=1)
        wrong = (rows[low] > rows[mean] + slack) | (rows[mean] > rows[high] + slack)
        said += [f"{mean}: {row.to_list()}" for _, row in rows[wrong].iterrows()]
    return said
