"""What the numbers are computed from: archives and trials of ``data/reference``, read once.

Every read is noted, so that a number's archives are known (`reading`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.plotting import groups
from regimes.plotting.looks import Metric
from regimes.records import Record, load_all

from ..tournament import tournament
from . import pools

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "data" / "reference"
Number = Callable[..., Any]

_reads: list[set[str]] = []  # names of files, one set for each number under way


@contextlib.contextmanager
def reading() -> Iterator[set[str]]:
    """Collects the files that are read inside."""
    files: set[str] = set()
    _reads.append(files)
    try:
        yield files
    finally:
        _reads.pop()
        if _reads:
            _reads[-1].update(files)


def record_read(name: str) -> Path:
    """The path of a file in ``data/reference`` that is about to be read."""
    if _reads:
        _reads[-1].add(name)
    return REFERENCE / name


@functools.cache
def digest(name: str) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256, or of the names that a pattern such as
    ``*.tar.xz`` matches; empty where there is no file."""
    if "*" in name:
        names = "\n".join(sorted(path.name for path in REFERENCE.glob(name)))
        return hashlib.sha256(names.encode()).hexdigest()[:16]
    path = REFERENCE / name
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


# -- reading ---------------------------------------------------------------------------------


def records(source: str) -> tuple[Record, ...]:
    """The runs of ``SOURCE.tar.xz``."""
    record_read(f"{source}.tar.xz")
    return _records(source)


@functools.cache
def _records(source: str) -> tuple[Record, ...]:
    return tuple(load_all(REFERENCE / f"{source}.tar.xz"))


def pooled(source: str, *schedules: str) -> tuple[Record, ...]:
    """The runs of one source, or of several joined by " + " (see `analysis.findings.pools`)."""
    blocks = {name: records(name) for name in source.split(" + ")}
    return tuple(pools.pool(blocks, schedules)) if len(blocks) > 1 else records(source)


def entries(source: str) -> tuple[pd.DataFrame, Metric]:
    """One row per run of a tournament, and the metric that is shown."""
    record_read(f"{source}.tar.xz")
    return _entries(source)


@functools.cache
def _entries(source: str) -> tuple[pd.DataFrame, Metric]:
    return tournament.entries(_records(source)), groups.tested_by(_records(source)[0])


def trials(source: str) -> list[dict[str, Any]]:
    """The trials that chose learning rates; ``rate`` is the rate of each."""
    path = record_read(f"{source}-tune.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["trials"]
    return [{**row, "rate": float(row["values"].rpartition("=")[2])} for row in rows]


def row_of(rows: pd.DataFrame, **values: Any) -> dict[str, Any]:
    """The only row with these values."""
    kept = rows
    for column, value in values.items():
        kept = kept[kept[column] == value]
    (row,) = kept.to_dict("records")
    return {str(key): cell for key, cell in row.items()}


def without_n(table: Table, n: int) -> Table:
    """The table without its column "n", which the sentence above it says for all rows.

    Raises:
        ValueError: another n in one of the rows.
    """
    at = list(table.heads).index("n")
    if any(row[at] != str(n) for row in table.rows):
        raise ValueError(f"not all rows of the table have n = {n}")
    rows = [[*row[:at], *row[at + 1 :]] for row in table.rows]
    return dataclasses.replace(table, heads=[h for h in table.heads if h != "n"], rows=rows)


# -- what templates may call -----------------------------------------------------------------


def number(function: Number) -> Number:
    """Marks a function of records as one that templates call."""
    function.is_number = True  # type: ignore[attr-defined]
    return function


def number_functions(*modules: ModuleType) -> dict[str, Number]:
    """The marked functions, by name.

    Raises:
        ValueError: two have one name.
    """
    named: dict[str, Number] = {}
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if getattr(function, "is_number", False) and function.__module__ == module.__name__:
                if name in named:
                    raise ValueError(f"two numbers are called {name}")
                named[name] = function
    return named
