"""Paired comparisons: differences by seed become a table with corrected p.

`compare` is one family of comparisons: p values are corrected over all its rows (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.console.units import p_text
from regimes.base.statistics import correct_by_holm, p_value
from regimes.plotting.looks import Metric
from regimes.plotting.said import MeanInterval, Verdict

from .estimates import Cell, estimate, mean

ALPHA = 0.05  # a comparison is marked where p after correction is below
ALIKE = "[all alike]"  # several seeds with one difference say nothing about sampling


def compare(differences: Mapping[tuple[str, str], Sequence[float]]) -> pd.DataFrame:
    """One row per comparison: arm, control, n, mean difference, 95 % t interval, p, p_holm.

    Without values all numbers are nan; if all values are equal, p and interval are nan too.

    Args:
        differences: (arm, control) -> arm minus control, by seed.
    """
    rows: list[dict[str, Any]] = []
    for (arm, control), values in differences.items():
        row = estimate(values, "difference", alone=True)
        names = {"arm": arm, "control": control, "n": len(values)}
        rows.append(names | row | {"p": p_value(values)})
    columns = ["arm", "control", "n", "difference", "ci_low", "ci_high", "p"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(p_holm=correct_by_holm(table["p"].to_list()))


def as_text(rows: pd.DataFrame, shown: Metric, against: str, missing: str) -> Table:
    """`compare`, rounded.

    Args:
        against: heading of the controls.
        missing: in place of a difference that could not be computed.
    """
    difference = difference_text(shown)
    lines = [
        (
            row["arm"],
            row["control"],
            str(row["n"]),
            difference(row) if row["n"] else missing,
            p_text(row["p"]),
            p_text(row["p_holm"]),
        )
        for row in rows.to_dict("records")
    ]
    heads = ("arm", against, "n", f"{shown.unit} [95 %]", "p", "p (Holm)")
    return Table(heads, lines, texts=2)


def difference_text(shown: Metric) -> Cell:
    """The difference of a row of `compare` with its interval."""
    return mean("difference", f"+.{shown.digits}f", ALIKE)


def verdicts(rows: pd.DataFrame) -> list[Verdict]:
    """What may be said of each row of `compare`: `MeanInterval.verdict` of the difference, and only
    where p after correction is below `ALPHA` that it is above or below."""
    found = []
    for row in rows.to_dict("records"):
        verdict = MeanInterval.at(row, "difference").verdict()
        sure = row["p_holm"] < ALPHA or verdict == "open"
        found.append(verdict if sure else "not shown")
    return found


def are_shown(rows: pd.DataFrame) -> list[bool]:
    """Whether each row's difference is shown to be above or below 0."""
    return [verdict in ("above", "below") for verdict in verdicts(rows)]
