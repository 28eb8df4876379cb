"""The numbers in the prose of the findings: language models, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import json
import re
from statistics import fmean, stdev

import pandas as pd
import pytest
from findings import (
    REFERENCE,
    ROOT,
    against,
    between,
    effect,
    ends,
    floats,
    page_of,
    plain,
    records,
    says,
    signed,
    text,
    tournament_of,
    turned,
)

from analysis.claims.effects import minus
from analysis.common import compare
from analysis.tournament import tournament
from analysis.tournament.equal_floats import comparisons, moments
from regimes.statistics import holm, p_value, t_interval

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
    "pair",
    [
        "high - low",
        "low-first - high",
        "low-last - high",
        "low-last - low-first",
        "low-first - mid",
        "accordion - low",
        "accordion - low-first",
        "accordion - mid",
    ],
)
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
    assert says(
        f"(p {' and '.join(f'{corrected.pop(pair):.2f}' for pair in mid)}), the others "
        f"hold (p at most {max(corrected.values()):.3f})"
    )


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
    early, late = (turned(effect("lm-demo", a, "high")) for a in ("low-first", "low-last"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"it wins back {plain(early, 2)} of that, in the last {late[0]:.2f}." in readme
    digits = [
        effect(source, "rank 4", "rank 1")[0] for source in ("tournament-smoke", "detection-smoke")
    ]
    assert f"{digits[0]:.1f} to {digits[1]:.1f} points of the loss are left on digits" in readme
    images = plain(effect("tournament-small", "rank 4", "rank 1"))
    assert f"on CIFAR-10 it is not shown ([{images} points]" in readme


# -- the tournament on a text ----------------------------------------------------------------

LM = "tournament-lm"


def test_the_table_of_the_tournament_on_a_text() -> None:
    each, shown = tournament_of(LM)
    rows = tournament.table(each, shown)
    assert between(LM) == tournament.arms_as_text(rows, shown).markdown() + "\n"
    at = rows.set_index("arm")
    assert len(at) == 12
    assert at["rate"].to_dict() == dict.fromkeys(at.index, 0.003) | {"dense": 0.006}
    assert not tournament.edges(REFERENCE / f"{LM}-tune.json", at["rate"])
    tried = {0.0015, 0.003, 0.006, 0.012}  # as analysis/grids/tournament-lm.toml says
    trials = json.loads((REFERENCE / f"{LM}-tune.json").read_text(encoding="utf-8"))["trials"]
    assert {float(trial["values"].split("=")[1]) for trial in trials} == tried
    beyond = 100 * (at["bytes_of_dense"] - at["floats_of_dense"])
    assert says(f"sends {beyond['l-greco']:.0f} % of dense's bytes besides")
    assert at["bytes"]["rank 4"] / at["bytes"]["l-greco"] == pytest.approx(0.5, abs=0.1)
    assert says(
        f"has {at['bits per byte']['l-greco'] - at['bits per byte']['rank 4']:.2f} bits less"
    )
    spent = at[[*tournament.NETWORKS]]
    assert (spent.idxmin() == "dense").to_list() == [True, False, True]
    slow = spent[tournament.NETWORKS[1]]
    assert slow.idxmax() == "dense"
    assert says(f"the slowest, with {slow['dense'] / slow['rank 4']:.1f} times rank 4's time")
    assert says(f"open here, and {plain(effect(LM, 'rank 4', 'dense'), 2)} with eight seeds")
    dense = [run.epochs["metric"].tail(3).mean() for run in records(LM) if run.name == "dense"]
    assert says(f"eight at that rate below end at {plain(t_interval(dense), 2)}.")


def bits(row: pd.Series) -> str:
    return plain(ends(row), 2)


def test_what_is_said_of_blind_schedules_on_a_text() -> None:
    found = moments(*tournament_of(LM))
    first, coin, last = (against(found, f"{n} 6", "static") for n in ("first", "coin", "last"))
    assert says(
        f"first quarter has {bits(first)} bits more, in epochs drawn by chance "
        f"{bits(coin)}, in the last quarter {bits(last)}, all after correction (p at most "
        "0.005)"
    )
    assert max(row["p_holm"] for row in (first, coin, last)) < 0.005
    assert says(f"First beats last by {bits(against(found, 'last 6', 'first'))}.")


def test_what_is_said_of_policies_on_a_text() -> None:
    found = comparisons(*tournament_of(LM))
    behind = [against(found, arm, "static") for arm in ("accordion", "forced", "gravac")]
    assert says(
        f"lose to it**, by {bits(behind[0])}, {bits(behind[1])} and {bits(behind[2])} "
        f"bits, all three after correction over {len(found)} comparisons"
    )
    firsts = [against(found, arm, "first") for arm in ("accordion", "forced", "gravac")]
    assert all(row["p_holm"] < 0.05 and row["difference"] > 0 for row in (*behind, *firsts))
    assert says(f"Against a coin ACCORDION has {bits(against(found, 'accordion', 'coin'))}:")
    assert says(f"AdaQS is open, {bits(against(found, 'adaqs', 'static'))}.")
    level, first = (against(found, "l-greco", name) for name in ("static", "first"))
    words = [plain(turned(ends(row)), 2) for row in (level, first)]
    assert says(
        f"is better**: {words[0]} bits below one rank throughout (p {level['p']:.3f}; "
        f"{level['p_holm']:.2f} after correction), {words[1]} below rank 4 first "
        f"({first['p_holm']:.4f} after it)"
    )
