"""A mean over seeds with its interval: as columns of a table, and as text.

A column ``value`` has its 95 % t interval in ``value_ci_low`` and ``value_ci_high``; the only mean
of a table has it in ``ci_low`` and ``ci_high``. A text table is specified by its columns, each a
heading and a function from a row to text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.console.units import interval_text, p_text
from regimes.base.statistics import ANY, Range, interval_names, read_interval, t_interval

Row = Mapping[Any, Any]
Cell = Callable[[Row], str]
WITHIN: dict[str, Range] = {  # what a mean can be, by column: its interval ends there
    **dict.fromkeys(("critical", "jaccard", "auc", "overlap"), (0.0, 1.0)),
    **dict.fromkeys(("kappa", "control", "spearman", "rank", "after"), (-1.0, 1.0)),
    "accuracy": (0.0, 100.0),
}


# -- numbers ---------------------------------------------------------------------------------


def estimate(
    values: Sequence[float], name: str, *, alone: bool = False, logs: bool = False
) -> dict[str, float]:
    """Mean and 95 % t interval as columns ``name`` and those of `interval_names`; nan without
    values. An interval of `WITHIN`'s columns ends where the mean must.

    >>> estimate([1.0, 2.0, 3.0], "loss")["loss"]
    2.0

    Args:
        alone: it is the only mean of its table.
        logs: the values are logarithms, the columns are not: a geometric mean.
    """
    numbers = t_interval(values, WITHIN.get(name, ANY)) if len(values) else (math.nan,) * 3
    if logs:
        numbers = (math.exp(numbers[0]), math.exp(numbers[1]), math.exp(numbers[2]))
    columns = (name, *interval_names("" if alone else name))
    return dict(zip(columns, numbers, strict=True))


def over_seeds(rows: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """One row per value of ``by``: n, and `estimate` of each column, without its nan."""
    table = []
    for key, seeds in rows.groupby([*by], sort=False):
        row: dict[str, Any] = {**dict(zip(by, key, strict=True)), "n": len(seeds)}
        for column in columns:
            row |= estimate(seeds[column].dropna().to_list(), column)
        table.append(row)
    ends = [name for column in columns for name in (column, *interval_names(column))]
    return pd.DataFrame(table, columns=[*by, "n", *ends])


def exact(count: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of independent values (Clopper and Pearson 1934).

    >>> [round(end, 3) for end in exact(0, 5)]  # 1 - 0.025 ** (1 / 5)
    [0.0, 0.522]
    """
    from scipy import stats

    ends = stats.binomtest(count, n).proportion_ci(method="exact")
    return float(ends.low), float(ends.high)


# -- text ------------------------------------------------------------------------------------


def as_table(
    rows: pd.DataFrame, columns: Mapping[str, Cell], texts: int = 1, ends: int = 0
) -> Table:
    """Rows as rounded text.

    Args:
        columns: what each cell below a heading shows.
        texts, ends: how many columns from the left, and from the right, hold words.
    """
    lines = [[cell(row) for cell in columns.values()] for row in rows.to_dict("records")]
    return Table(tuple(columns), lines, texts=texts, ends=ends)


def frame_table(rows: pd.DataFrame, digits: int, texts: int = 1) -> Table:
    """A frame as rounded text; a value that is missing is empty.

    Args:
        digits: after the point, as far as they are not zero.
        texts: how many columns from the left hold words.
    """

    def cell(value: Any) -> str:
        if isinstance(value, str):
            return value
        return "" if pd.isna(value) else f"{round(value, digits):.10g}"

    lines = [[cell(value) for value in row] for row in rows.itertuples(index=False)]
    return Table([str(name) for name in rows.columns], lines, texts=texts)


def word(column: str) -> Cell:
    """The value as it is."""
    return lambda row: str(row[column])


def number(column: str, form: str) -> Cell:
    """A rounded number; empty for nan."""
    return lambda row: "" if math.isnan(row[column]) else f"{row[column]:{form}}"


def p(column: str) -> Cell:
    """A p value with two digits; empty for nan."""
    return lambda row: p_text(row[column])


def mean(column: str, form: str, alike: str = "") -> Cell:
    """A mean and its interval, "0.5 [0.3, 0.7]"; empty for nan.

    Args:
        alike: in place of an interval that several equal values do not have.
    """

    def text(row: Row) -> str:
        if math.isnan(row[column]):
            return ""
        brackets = interval_text(*read_interval(row, column), form)
        if not brackets and row["n"] > 1:
            brackets = alike
        return f"{row[column]:{form}} {brackets}".rstrip()

    return text
