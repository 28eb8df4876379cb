"""What the tests of the findings share: the page, and effects over the committed records."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pandas as pd

from analysis.claims import pools
from analysis.claims.effects import minus
from analysis.tournament import tournament
from regimes.plotting import groups
from regimes.plotting.metrics import Metric
from regimes.records import Record, load_all, share_of_low
from regimes.statistics import t_interval

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "data" / "reference"
Numbers = tuple[float, float, float]  # mean and the ends of its interval


@functools.cache
def records(source: str) -> tuple[Record, ...]:
    return tuple(load_all(REFERENCE / f"{source}.tar.xz"))


def effect(source: str, a: str, b: str) -> Numbers:
    blocks = {name: records(name) for name in source.split(" + ")}
    runs = pools.pool(blocks, (a, b)) if len(blocks) > 1 else records(source)
    return t_interval(minus(a, b)(runs))


def signed(numbers: Numbers, digits: int = 1) -> str:
    mean, low, high = (f"{x:+.{digits}f}" for x in numbers)
    return f"{mean} [{low}, {high}]"


def plain(numbers: Numbers, digits: int = 1) -> str:
    """As a loss is said; a minus sign only where it is needed."""
    mean, low, high = (f"{round(x, digits) + 0.0:.{digits}f}" for x in numbers)
    return f"{mean} [{low}, {high}]"


def turned(numbers: Numbers) -> Numbers:
    """b minus a, of a minus b."""
    mean, low, high = numbers
    return -mean, -high, -low


def text(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def page_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def says(words: str, page: str = "findings.md") -> bool:
    return words in text(page)


def between(marker: str) -> str:
    """What the findings have between ``<!-- MARKER -->`` and ``<!-- end -->``."""
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- end -->", page_of("findings.md"), re.DOTALL)
    assert found
    return found[1]


def floats(source: str, name: str) -> str:
    """Of low's, the mean over seeds."""
    shares = [share_of_low(run.header, run.rows) for run in records(source) if run.name == name]
    return f"{sum(s or 0 for s in shares) / len(shares):.2f}"


@functools.cache
def tournament_of(source: str) -> tuple[pd.DataFrame, Metric]:
    return tournament.entries(records(source)), groups.tested_by(records(source)[0])


def against(found: pd.DataFrame, arm: str, control: str) -> pd.Series:
    (row,) = (r for _, r in found.iterrows() if (r["arm"], r["control"]) == (arm, control))
    return row


def ends(row: pd.Series) -> Numbers:
    return row["difference"], row["ci_low"], row["ci_high"]
