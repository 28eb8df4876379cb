"""The tables of ``docs/how-to/start.md`` (oracle: the committed records, computed again)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from analysis.findings.effects import minus
from analysis.findings.numbers.differences import effect
from analysis.findings.sources import records
from regimes.statistics import correct_by_holm, p_value

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "start.md"
ROWS = {
    "PowerSGD, rank 4": "powersgd-4",
    "PowerSGD, rank 1": "powersgd-1",
    "PowerSGD, rank 1 after a dense tenth": "powersgd-1-after-10",
    "TopK, 10 %": "topk-10",
    "TopK, 1 %": "topk-1",
    "TopK, 1 % after a dense tenth": "topk-1-after-10",
    "quantise, 8 bits": "quantise-8",
    "quantise, 4 bits": "quantise-4",
    "sign": "sign",
}


NOT_RUN = ("lm-start", "quantise, 4 bits")


def bytes_of_dense(source: str, name: str) -> float:
    totals: dict[str, float] = {}
    for run in records(source):
        totals[run.name] = totals.get(run.name, 0.0) + sum(row["bytes"] for row in run.rows)
    return totals[name] / totals["dense"]


@pytest.mark.parametrize(
    ("source", "row"),
    [(s, r) for s in ("smoke-start", "lm-start") for r in ROWS if (s, r) != NOT_RUN],
)
def test_a_row_is_what_the_records_say(source: str, row: str) -> None:
    name = ROWS[row]
    (rate,) = {r.config["optimizer"]["lr"] for r in records(source) if r.name == name}
    difference = effect(source, name, "dense").text(1 if source == "smoke-start" else 2, sign=True)
    words = f"| {row} | {rate} | {difference} | {100 * bytes_of_dense(source, name):.0f} % |"
    assert words in PAGE.read_text(encoding="utf-8"), words


def test_which_compressors_beat_which() -> None:
    """After Holm's correction one pair of compressed rows holds."""
    runs = records("smoke-start")
    pairs = [*itertools.combinations(ROWS.values(), 2)]
    values = dict(
        zip(pairs, correct_by_holm([p_value(minus(*pair)(runs)) for pair in pairs]), strict=True)
    )
    assert [pair for pair, p in values.items() if p < 0.05] == [("powersgd-1", "quantise-8")]
    assert effect("smoke-start", "quantise-8", "powersgd-1").low > 0
