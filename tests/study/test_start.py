"""The tables of ``docs/how-to/start.md`` (oracle: the committed records, computed again)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import regimes
from analysis.findings.effects import minus
from analysis.findings.numbers.differences import effect
from analysis.findings.sources import records
from regimes.base.statistics import correct_by_holm, p_value
from regimes.cost.cases import make_cases
from regimes.records import load_all

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "start.md"
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


def test_a_user_gets_the_same_differences_from_the_archive() -> None:
    """Dense, ranks, TopK, signs and rounding are arms of one comparison, with one command."""
    archive = ROOT / "data/reference/smoke-start.tar.xz"
    compared = regimes.compare(archive, baseline="dense").set_index("comparison")
    assert {*compared.index} == {f"{name} - dense" for name in ROWS.values()}
    for name in ROWS.values():
        row, known = compared.loc[f"{name} - dense"], effect("smoke-start", name, "dense")
        near = {"abs": 0.0005 * (known.high - known.low) / 2}  # to which a table is rounded
        assert row["difference"] == pytest.approx(known.mean, **near)
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((known.low, known.high), **near)
        assert row["unit"] == "points"


def test_the_cost_of_several_compressors_has_the_levels_of_each() -> None:
    cases = make_cases(load_all(ROOT / "data/reference/smoke-start.tar.xz"))
    levels = [case.name for case in cases if not case.runs]
    assert levels.count("dense") == 1
    assert {"powersgd high (1)", "topk high (1)", "quantise low (8)", "sign high (1)"} < {*levels}
    assert {*ROWS.values()} < {case.name for case in cases if case.runs}
