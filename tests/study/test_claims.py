"""Verdicts, families and the committed claims (oracles: the definitions over a grid of
intervals, statistics by scipy and by hand, the records themselves)."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic import make

from analysis.campaign.campaign import CPU
from analysis.findings import claims, verdicts
from analysis.findings.effects import fall_at_decay, minus
from analysis.findings.sentences import PAPER, QUESTIONS, WHOLE, Claim
from regimes.base import statistics
from regimes.base.errors import RecordError
from regimes.records import Record, load, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
POINTS = (-3.0, -1.25, -1.0, -0.97, -0.5, -0.02, 0.0, 0.02, 0.29, 0.5, 1.0, 1.25, 3.0)
OUTCOMES = ("supported", "contradicted", "not reproduced at this scale", "open")
GRID = [*itertools.combinations_with_replacement(POINTS, 2)]


def records(source: str, *names: str) -> list[Record]:
    found = load_all(REFERENCE / f"{source}.tar.xz")
    return [run for run in found if not names or run.name in names]


# -- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [0.0, 0.3, 1.0, 2.0])
def test_every_interval_has_exactly_one_verdict(margin: float) -> None:
    """By the six definitions, each on its own."""
    for low, high in GRID:
        small = -margin < low and high < margin  # an effect that matters is excluded
        about = low <= 0 <= high
        meant = {
            "better": low > 0 and not high < margin,
            "better, within the margin": low > 0 and high < margin,
            "equivalent": about and small,
            "worse, within the margin": high < 0 and low > -margin,
            "worse": high < 0 and not low > -margin,
            "open": about and not small,
        }
        (true,) = [name for name, is_so in meant.items() if is_so]
        assert verdicts.verdict(low, high, margin) == true, (low, high)


def test_an_interval_cannot_support_and_contradict() -> None:
    """More and no less are opposites in opposite directions; and what each verdict means for both:
    [-0.97, -0.02] is a loss, resolved, that does not matter."""
    for (low, high), p in itertools.product(GRID, (0.01, 0.2, math.nan)):
        more = verdicts.outcome("more", low, high, 1.0, p)
        enough = verdicts.outcome("no less", low, high, 1.0, p)
        word = verdicts.verdict(low, high, 1.0)
        assert (more == "supported") <= (word == "better" and enough == "supported")
        assert (enough == "contradicted") <= (word == "worse" and more == "contradicted")
        assert (
            word in ("equivalent", "better, within the margin", "worse, within the margin")
        ) <= ((more, enough) == ("contradicted", "supported"))
        if p != 0.01:
            assert more != "supported"
            assert enough != "contradicted"


@pytest.mark.parametrize(
    ("expect", "low", "high", "p", "outcome"),
    [
        ("more", 1.1, 6.8, 0.04, "supported"),
        ("more", 1.1, 6.8, 0.06, "open"),  # not after correction
        ("more", 0.29, 1.25, 0.01, "open"),  # there, but on average below the margin
        ("more", -0.1, 0.99, 0.2, "contradicted"),
        ("more", -0.1, 1.0, 0.2, "open"),  # the margin itself is not excluded
        ("more", -3.0, 3.0, 0.9, "open"),
        ("more", math.nan, math.nan, math.nan, "open"),
        ("no less", math.nan, math.nan, math.nan, "open"),
        ("no less", -0.97, -0.02, 0.04, "supported"),
        ("no less", -0.6, 2.1, 0.3, "supported"),
        ("no less", -1.0, 2.1, 0.3, "open"),
        ("no less", -3.0, -0.1, 0.01, "contradicted"),
        ("no less", -1.5, -0.1, 0.01, "open"),  # less, but on average by less than the margin
    ],
)
def test_what_becomes_of_a_claim(
    expect: Any, low: float, high: float, p: float, outcome: str
) -> None:
    assert verdicts.outcome(expect, low, high, 1.0, p) == outcome


def test_runs_below_the_paper_s_regime_contradict_nothing_of_the_paper() -> None:
    """Every interval, by both expectations: what was contradicted is not reproduced, the rest is
    as it was; and so it is in the committed claims, whose networks reach 51 % on CIFAR-10."""
    for (low, high), p, expect in itertools.product(GRID, (0.01, 0.2), ("more", "no less")):
        before = verdicts.outcome(expect, low, high, 1.0, p)  # type: ignore[arg-type]
        below = verdicts.outcome(expect, low, high, 1.0, p, reached=False)  # type: ignore[arg-type]
        assert below == ("not reproduced at this scale" if before == "contradicted" else before)
    text = (REFERENCE / "claims.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in row.split("|")] for row in text.splitlines()[4:]]
    ours = {claim.says for claim in QUESTIONS}
    outcomes = {word: [row[2] for row in cells if row[11:12] == [word]] for word in OUTCOMES}
    assert outcomes["not reproduced at this scale"]
    assert {*outcomes["contradicted"]} <= ours
    assert not {*outcomes["not reproduced at this scale"]} & ours


@pytest.mark.parametrize(
    ("data", "accuracy", "reached"),
    [("cifar10", 0.94, True), ("cifar10", 0.51, False), ("digits", 0.99, False)],
)
def test_a_run_at_the_paper_s_accuracy_can_contradict_it(
    tmp_path: Path, data: str, accuracy: float, reached: bool
) -> None:
    for schedule, seed in itertools.product(("low", "high"), range(3)):
        metric = accuracy + 1e-4 * seed * (schedule == "low")
        ends = {"change": lambda row, x=metric: {"metric": x}, "data": {"name": data}}
        make(tmp_path / "small", schedule, seed, **ends)
    rows = claims.judge(tmp_path, PAPER[:1])  # high compression loses accuracy
    assert [*rows["reached"]] == [reached]
    words = "contradicted" if reached else "not reproduced at this scale"
    assert [*rows["outcome"]] == [words]


# -- p values --------------------------------------------------------------------------------


def test_p_and_the_interval_say_the_same() -> None:
    generator = np.random.default_rng(0)
    for n in (2, 3, 5, 8):
        values = generator.normal(1, 1, n).tolist()
        low, high = stats.t.interval(0.95, n - 1, np.mean(values), stats.sem(values))
        for base in (0.0, low - 1e-6, low + 1e-6, high + 1e-6):
            assert (statistics.p_value(values, base) < 0.05) == (not low <= base <= high)


def test_five_seeds_cannot_reach_a_level_by_signs_and_ranks() -> None:
    """Of values of one sign, by counting all 2^n signs: the least that there is."""
    for n in range(2, 9):
        values = [*range(1, n + 1)]
        sums = [
            sum(s * v for s, v in zip(signs, values, strict=True))
            for signs in itertools.product((-1, 1), repeat=n)
        ]
        extreme = sum(abs(s) >= sum(values) for s in sums) / len(sums)
        assert statistics.least_p(n) == extreme == pytest.approx(statistics.p_ranks(values))
    assert statistics.least_p(5) > 0.05 > statistics.least_p(6)


@pytest.mark.parametrize("n", [2, 5, 8, 11])
def test_ranks_with_ties_and_rounding_by_counting_all_signs(n: int) -> None:
    """Accuracies in points: differences of hundredths, which are ties but for their last bits."""
    steps = np.random.default_rng(n).integers(-3, 6, n)
    values = [(50.0 + 0.1 * step) - 50.0 for step in steps]
    kept = steps[steps != 0]
    ranks = stats.rankdata(np.abs(kept))
    sums = np.array([*itertools.product((-1, 1), repeat=len(kept))]) @ ranks
    expected = (abs(sums) >= abs(np.sign(kept) @ ranks) - 1e-9).mean()
    assert statistics.p_ranks(values) == pytest.approx(expected)
    assert statistics.p_ranks([v + 1 for v in values], 1) == pytest.approx(expected)
    many = np.random.default_rng(n).normal(0.4, 1, 40)
    exact = stats.wilcoxon(many, method="exact").pvalue
    assert statistics.p_ranks(many.tolist()) == pytest.approx(exact, rel=1e-6)
    assert statistics.p_ranks([0.0, 0.0, 0.7]) == 1


def test_values_that_are_alike_or_of_which_one_is_unknown_have_no_p() -> None:
    alike: list[list[float]] = [[0.3], [0.0, 0.0], [0.1 + 0.2, 0.3, 0.3]]
    for values in (*alike, *([*range(1, count), math.nan] for count in (2, 5, 30))):
        assert math.isnan(statistics.p_value(values))
        assert math.isnan(statistics.p_ranks(values))


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.02 x 3, 0.03 x 2 and 0.5; a smaller one's 0.06 holds for the third."""
    found = statistics.correct_by_holm([0.5, 0.01, math.nan, 0.03, 0.02])
    assert found == pytest.approx([0.5, 0.04, math.nan, 0.06, 0.06], nan_ok=True)
    assert statistics.correct_by_holm([0.9, 0.8]) == [1.0, 1.0]


# -- the committed records -------------------------------------------------------------------


@pytest.mark.slow
def test_a_row_by_hand() -> None:
    """One family of three: differences, interval, p, and its correction."""
    runs = records("small")

    def metric(name: str) -> np.ndarray:
        chosen = sorted((r for r in runs if r.name == name), key=lambda r: r.seed)
        return 100 * np.array([np.mean([row["metric"] for row in r.rows[-3:]]) for r in chosen])

    expected = metric("low") - metric("high")
    assert minus("low", "high")(runs) == pytest.approx(expected.tolist())
    rows = claims.judge(REFERENCE, PAPER[:3])
    row = rows.iloc[0]
    assert (row["records"], row["effect"], row["n"]) == ("small", "low - high", 5)
    ends = stats.t.interval(0.95, 4, expected.mean(), stats.sem(expected))
    assert row[["mean", "ci_low", "ci_high"]].to_list() == pytest.approx([expected.mean(), *ends])
    assert row["p"] == pytest.approx(stats.ttest_1samp(expected, 0).pvalue)
    assert row["p_holm"] == pytest.approx(3 * row["p"])
    assert rows["p_holm"].to_list() == statistics.correct_by_holm(rows["p"].to_list())
    first, *_ = claims.as_text(rows).rows
    assert {"+2.91 [+1.99, +3.84]", "≥ 0.0625", "0.0028", "better", "supported"} < {*first}


def test_seeds_that_are_alike_are_no_interval() -> None:
    """AdaQS at a fall of one half is static high."""
    alike = Claim("", "", ("small-adaqs",), minus("adaqs", "high"), "", ("adaqs", "high"))
    (row,) = claims.judge(REFERENCE, [alike]).to_dict("records")
    assert row["mean"] == 0
    assert math.isnan(row["ci_low"])
    assert (row["verdict"], row["outcome"]) == ("open", "open")
    text = claims.as_text(claims.judge(REFERENCE, [alike]))
    assert "+0.00 [all alike]" in text.rows[0]


def test_runs_of_different_code_are_marked() -> None:
    rows = claims.judge(REFERENCE, [c for c in PAPER if c.item in ("Figure 2b", "Figure 9")])
    assert rows["mixed"].to_list() == [False] * 4 + [True] * 2
    assert "| small |" in claims.page(rows)
    assert "| small-ladder † |" in claims.page(rows)


def test_every_claim_is_about_steps_of_the_campaign() -> None:
    """But for all of CIFAR-10, whose images the user names: the grid's header has the command."""
    steps = {step.folder: step for step in CPU}
    for claim in (*PAPER, *QUESTIONS):
        for source in {*claim.sources} - {WHOLE}:
            known = steps[source].schedules
            own = {s for s in claim.schedules if "yoked" not in s}
            assert not known or own <= set(known), claim.says


TOURNAMENT = {"rank 4": "low", "rank 1": "high"}  # the paper's names of a tournament's arms
PAIRS = [claim for claim in (*PAPER, *QUESTIONS) if len(claim.schedules) == 2]


def test_a_pair_is_the_one_named_first_minus_the_other(tmp_path: Path) -> None:
    """The mean of the last three of epochs 0, 1, ... of invented runs, in points, for each pair."""
    base, draw = load(make(tmp_path, "low", 0)), np.random.default_rng(0)
    accuracy: dict[str, list[float]] = {}
    runs = []
    for name in {name for claim in PAIRS for name in claim.schedules}:
        metrics = draw.uniform(0.5, 0.9, (2, len(base.rows)))
        for seed, reached in enumerate(metrics.tolist()):
            header = {**base.header, "config": {**base.config, "name": name, "seed": seed}}
            rows = [{**r, "metric": x} for r, x in zip(base.rows, reached, strict=True)]
            runs.append(replace(base, header=header, rows=rows))
        accuracy[name] = metrics[:, -3:].mean(1).tolist()
    assert len({tuple(values) for values in accuracy.values()}) == len(accuracy)
    for claim in PAIRS:
        a, b = claim.schedules
        assert claim.name.startswith(f"{a} - {b}")
        expected = [100 * (x - y) for x, y in zip(accuracy[a], accuracy[b], strict=True)]
        assert claim.effect(runs) == pytest.approx(expected), claim.says


@pytest.mark.parametrize(
    ("words", "place", "schedule"),
    [  # what a sentence says of a schedule, where it therefore stands in the difference
        (r"^ACCORDION (beats|is as good|survives)|: ACCORDION (beats|is as good)", 0, "accordion"),
        (r"as good as low\b|loses against low", -1, "low"),
        (r"\bhigh (compression )?loses", -1, "high"),
        (r"ACCORDION .* only reaches", -1, "accordion"),
        (r"beats as much in", -1, "yoked"),
    ],
)
def test_a_sentence_names_the_better_one_first(words: str, place: int, schedule: str) -> None:
    about = [claim for claim in PAIRS if re.search(words, claim.says)]
    assert about
    for claim in about:
        found = claim.schedules[place]
        assert TOURNAMENT.get(found, found).startswith(schedule), claim.says
        assert claim.expect == ("no less" if re.search("good|reach|surv", claim.says) else "more")


def test_the_norm_falls_by_so_many_halvings(tmp_path: Path) -> None:
    """Means of 8 before and of 2 after the decay in epoch 4: two; of 1 and of 4: minus two. The
    layer that is not compressed does not count, nor do epochs more than three away."""
    norms = [[99.0, 7.0, 99.0]] + [[n, 7.0, 1.0] for n in (6.0, 8.0, 10.0)]
    norms += [[n, 50.0, 4.0] for n in (1.0, 2.0, 3.0)] + [[99.0, 7.0, 99.0]]
    run = load(make(tmp_path, "low", 0, epochs=len(norms)))
    assert [layer["compressed"] for layer in run.header["layers"]] == [True, False, True]

    def halvings(norms: list[list[float]]) -> list[float]:
        pairs = zip(run.rows, norms, strict=True)
        rows = [{**row, "statistics": {"norm:update": values}} for row, values in pairs]
        return fall_at_decay("low")([replace(run, rows=rows)])

    assert run.layers["epoch"].tolist() == [epoch for epoch in range(8) for _ in range(3)]
    assert halvings(norms) == [pytest.approx((2 - 2) / 2)]
    assert halvings([[a, b, a] for a, b, _ in norms]) == [pytest.approx(2)]


def test_claims_whose_records_are_not_all_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no records that a claim is about"):
        claims.judge(tmp_path)
    shutil.copy(REFERENCE / "small-joint.tar.xz", tmp_path)
    rows = claims.judge(tmp_path)
    assert set(rows["records"]) == {"small-joint"}
    (found,) = claims.summary(rows).to_dict("records")
    assert found == {"item": "Joint", "claims": 1, "supported": 0, "contradicted": 0, "open": 1} | {
        "not reproduced at this scale": 0
    }
