"""The numbers in the prose of the findings: language models, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import json
import re
from statistics import fmean, stdev

import pytest
from findings import REFERENCE, ROOT, effect, floats, page_of, records, says, signed, text

from analysis import (
    compare,
)
from analysis.effects import minus
from analysis.verdicts import holm, p_value

# -- a language model ------------------------------------------------------------------------


def test_the_tuned_language_model_has_the_scores_of_its_trials() -> None:
    trials = json.loads((REFERENCE / "lm-small-tune.json").read_text())["trials"]
    for level in ("dense", "low", "mid", "high"):
        scores = [trial["scores"] for trial in trials if trial["schedule"] == level]
        cells = " | ".join(f"{fmean(s):.2f} ± {stdev(s):.2f}" for s in scores)
        assert re.search(rf"\| {level}[^|]*\| {re.escape(cells)} \|", text("findings.md"))


@pytest.mark.parametrize("pair", ["low - dense", "mid - low", "high - mid", "high - low"])
def test_the_tuned_language_model_at_its_best_rates(pair: str) -> None:
    a, b = pair.split(" - ")
    assert says(f"| {pair} | {signed(effect('lm-small-tuned', a, b), 2)} |")


@pytest.mark.parametrize(
    "pair", ["high - low", "low-first - high", "low-last - high", "low-last - low-first",
             "low-first - mid", "accordion - low", "accordion - low-first", "accordion - mid"],
)  # fmt: skip
def test_when_low_compression_is_sent_in_the_tuned_demo(pair: str) -> None:
    a, b = pair.split(" - ")
    sent = " and ".join(floats("lm-demo", name) for name in (a, b))
    assert says(f"| {pair} | {sent} | {signed(effect('lm-demo', a, b), 2)} |")


def test_the_demos_p_values() -> None:
    mid = ["low-first - mid", "accordion - mid"]
    pairs = re.findall(r"^\| (\S+ - \S+) \| [\d.]+ and ", page_of("findings.md"), re.MULTILINE)
    values = [p_value(minus(*pair.split(" - "))(records("lm-demo"))) for pair in pairs]
    corrected = dict(zip(pairs, holm(values), strict=True))
    assert len(corrected) == 8
    assert says(f"(p {' and '.join(f'{corrected.pop(pair):.2f}' for pair in mid)}), the others "
                f"hold (p at most {max(corrected.values()):.3f})")  # fmt: skip


def test_what_is_said_of_the_demos_baseline() -> None:
    rows, _ = compare.table(records("lm-demo"), ())
    at = rows.set_index("schedule")
    mid, first, accordion = (at["of_low"][name] for name in ("mid", "low-first", "accordion"))
    assert says(f"for {100 * (mid / first - 1):.0f} % more floats")
    assert says(f"beat it, for {100 * (accordion / mid - 1):.0f} % more")
    low, flat = (at["sd"][name] for name in ("low", "mid"))
    assert says(
        f"have a standard deviation of {low:.2f}, those of rank 2, at half that rate, {flat:.2f}"
    )
    won = [tuple(-x for x in effect("lm-demo", a, "high")) for a in ("low-first", "low-last")]
    (early, high, low), (late, *_) = won
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"it wins back {early:.2f} [{low:.2f}, {high:.2f}] of that, in the last {late:.2f}."
        in readme
    )
