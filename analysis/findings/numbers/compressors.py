"""Errors of compressors for what they send: numbers for templates."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ...tournament import error_per_float
from ..sources import number, records, row_of, without_n

SHOWN = (  # rows of the table
    ("topk", "1"),
    ("sign", "1"),
    ("dct-topk", "3"),
    ("powersgd", "1"),
    ("acp-sgd", "2"),
    ("acp-sgd, iterations 2", "1"),
    ("topk", "3"),
    ("powersgd", "2"),
    ("acp-sgd", "4"),
    ("acp-sgd, iterations 2", "2"),
    ("powersgd", "4"),
    ("topk", "10"),
    ("quantise", "8"),
    ("threshold", "0.3"),
    ("threshold", "0.1"),
    ("chunked-topk", "1.5625"),
    ("chunked-topk", "6.25"),
    ("quantised-all-reduce", "4"),
    ("quantised-all-reduce", "8"),
)


def _errors(source: str) -> pd.DataFrame:
    return error_per_float.errors(records(source))


@number
def rivals_table() -> str:
    """Errors of a step and of the sum, from few bytes to many."""
    rows = pd.concat([_errors("smoke-rivals"), _errors("smoke-rivals-more")])
    keys = zip(rows["compressor"], rows["level"], strict=True)
    shown = error_per_float.as_text(rows[[key in SHOWN for key in keys]])
    return without_n(shown, 3).markdown()


@number
def error(source: str, compressor: str, level: str) -> dict[str, float]:
    """A compressor's error ``once`` (one step) and ``summed`` (all updates); its floats and bytes
    as shares of dense's."""
    row = row_of(_errors(source), compressor=compressor, level=level)
    return {key: float(row[key]) for key in ("once", "summed", "floats", "bytes")}


@number
def best_in_a_step(source: str, rank: int) -> list[Any]:
    """Compressors that send as many floats as a rank: the one with the least error in a step, and
    the largest summed error among them over that rank's."""
    at = _errors(source).set_index(["compressor", "level"])
    ours = ("powersgd", str(rank))
    same = at[(at["floats"] / at["floats"][ours]).between(0.99, 1.01)]
    return [*same["once"].idxmin(), float(same["summed"].max() / same["summed"][ours])]


@number
def best_below(source: str, share: float, column: str) -> str:
    """The compressor with the smallest error below a share of dense's bytes."""
    rows = _errors(source)
    kept = rows[rows["bytes"] < share]
    return str(kept.sort_values(column)["compressor"].iloc[0])
