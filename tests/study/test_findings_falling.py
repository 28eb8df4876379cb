"""The numbers in the prose of the findings: ranks that fall with the learning rate, formed anew
(oracle: the committed records; each number is rounded once)."""

from __future__ import annotations

import itertools
import json
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
from findings import (
    REFERENCE,
    ROOT,
    Numbers,
    against,
    between,
    effect,
    ends,
    plain,
    records,
    says,
    tournament_of,
    turned,
)

from analysis.tournament import tournament
from analysis.tournament.equal_floats import comparisons, moments
from regimes.statistics import t_interval

STEP, COSINE, CONSTANT = "falling-lm", "falling-lm-cosine", "falling-lm-constant"
WIKI = "falling-wikitext"
LADDERS = ("rate 2-1", "rate 3-1", "rate 3-2-1")


def held(source: str, arm: str, without: int | None = None) -> Numbers:
    """Minus one rank throughout at its floats; of losses."""
    each, shown = tournament_of(source)
    return ends(against(comparisons(each[each["seed"] != without], shown), arm, "static"))


def bits(numbers: Numbers) -> str:
    return plain(numbers, 2)


def test_the_tables() -> None:
    each, shown = tournament_of(STEP)
    rows = tournament.table(each, shown)
    assert between(STEP) == tournament.arms_as_text(rows, shown).markdown() + "\n"
    for source, marker in ((STEP, f"{STEP}-differences"), (CONSTANT, CONSTANT)):
        found = comparisons(*tournament_of(source))
        shown = tournament_of(source)[1]
        assert between(marker) == tournament.differences_as_text(found, shown).markdown() + "\n"


def test_each_arm_at_its_own_rate() -> None:
    far = {}
    for source, tried, n in ((STEP, 3, 10), (COSINE, 4, 6), (CONSTANT, 4, 6)):
        each = tournament_of(source)[0]
        trials = REFERENCE / f"{source}-tune.json"
        far[source] = tournament.edges(trials, each.groupby("name")["rate"].first())
        found = json.loads(trials.read_text(encoding="utf-8"))
        assert len({trial["values"] for trial in found["trials"]}) == tried
        assert found["seeds"] == [1000, 1001]
        assert {len(runs) for _, runs in each.groupby("name")} == {n}
        assert each["seed"].min() == 7000
    assert far == {STEP: ["coin 2-1"], COSINE: [], CONSTANT: []}


def test_a_rank_that_follows_the_rate_beats_one_throughout() -> None:
    found = comparisons(*tournament_of(STEP))
    assert found["p_holm"].max() < 0.003
    sent = tournament_of(STEP)[0].groupby("name")["floats"].mean()
    lost = [
        plain(effect(STEP, a, b), 3) for a, b in (("rate 2-1", "rank 2"), ("rate 3-1", "rank 3"))
    ]
    two, three = sent["rate 2-1"] / sent["rank 2"], sent["rate 3-1"] / sent["rank 3"]
    assert says(
        f"sends {two:.2f} of rank 2's floats and loses {lost[0]} bits to it; *rate 3-1* "
        f"sends {three:.2f} of rank 3's and loses {lost[1]}."
    )
    assert says(f"floats and loses {lost[0]} bits to it, {BEST} less than", "how-to/start.md")
    assert says(f"rank 2 itself is {bits(turned(of_a_line()))} below the one through ranks 1 and 3")
    words = [bits(turned(of_a_parabola(STEP, arm))) for arm in LADDERS]
    assert words[0] == BEST
    assert says(f"{words[0]}, {words[1]} and {words[2]} better.")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"[{BEST} bits](docs" in readme
    assert f"it loses {lost[0][:5]} to rank 2 and sends {100 * (1 - two):.0f} % less" in readme
    first = effect("tournament-lm", "rank 1", "last 6")[0]
    assert says(f"a third and then a tenth, wins back {first:.2f} bits")


BEST = "0.05 [0.04, 0.06]"  # rate 2-1, beside a parabola


def wide(source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Bits and the logarithm of floats, a row per seed and a column per arm."""
    each, shown = tournament_of(source)
    values, floats = (
        each.pivot(index="seed", columns="name", values=x) for x in (shown.name, "floats")
    )
    return values, np.log(floats)


def of_a_parabola(source: str, arm: str) -> Numbers:
    """Minus what a parabola through ranks 1, 2 and 3 has at the arm's floats."""
    values, logs = wide(source)
    ranks = ["rank 1", "rank 2", "rank 3"]
    return t_interval(
        [
            values.loc[seed, arm]
            - np.polyval(
                np.polyfit(logs.loc[seed, ranks].to_numpy(), values.loc[seed, ranks].to_numpy(), 2),
                logs.loc[seed, arm],
            )
            for seed in values.index
        ]
    )


def of_a_line() -> Numbers:
    """Rank 2 minus the straight line through ranks 1 and 3."""
    values, logs = wide(STEP)
    share = (logs["rank 2"] - logs["rank 1"]) / (logs["rank 3"] - logs["rank 1"])
    line = values["rank 1"] + share * (values["rank 3"] - values["rank 1"])
    return t_interval((values["rank 2"] - line).to_list())


def test_what_is_said_of_its_controls() -> None:
    late, coin = (bits(effect(STEP, f"{name} 2-1", "rate 2-1")) for name in ("late", "coin"))
    assert says(f"are {late} and {coin} bits worse than *rate 2-1*")
    assert says(f"in a longer run there, late is worse by {late} where the learning rate falls")
    rates = tournament_of(STEP)[0].groupby("name")["rate"].first()
    assert rates.drop("coin 2-1").eq(0.003).all()
    assert rates["coin 2-1"] == 0.0015
    ranks = levels(STEP, "coin 2-1")
    assert sum(a != b for a, b in itertools.pairwise(ranks)) == pytest.approx(12, abs=2)
    digits = against(moments(*tournament_of("tournament-smoke")), "first 12", "static")
    assert says(f"there is nothing to see: {plain(ends(digits))} points against one rank")


def levels(source: str, arm: str) -> list[float]:
    """The mean rank over compressed layers and seeds, unit by unit."""
    found = []
    for run in records(source):
        if run.name == arm:
            ranks = run.layers[run.layers["level"] != "dense"]
            found.append(ranks["level"].str[1:].astype(int).groupby(ranks["epoch"]).mean())
    return list(sum(found) / len(found))


def test_what_is_said_of_accordion() -> None:
    worse = bits(held(STEP, "accordion"))
    assert says(f"**ACCORDION** is {worse} bits worse than one rank throughout")
    each, shown = tournament_of(STEP)
    at = each.set_index(["name", "seed"])[shown.name]
    far = [at[arm, 7008] for arm in ("accordion", "rank 4")]
    assert says(
        f"One seed (7008) is far off, ACCORDION at {far[0]:.2f} and rank 4 at {far[1]:.2f}"
        f"; without it it is {bits(held(STEP, 'accordion', without=7008))}"
    )
    assert far[0] == at["accordion"].max() > at["accordion"].drop(7008).max() + 0.2
    ranks = levels(STEP, "accordion")
    before, after = fmean(ranks[:15]), fmean(ranks[15:])
    assert says(f"less after the first (mean rank {before:.1f}, then {after:.1f})")
    assert ranks[15] == ranks[20] == 4


def test_under_a_cosine() -> None:
    two, three = (bits(turned(held(COSINE, arm))) for arm in LADDERS[:2])
    parabola = bits(turned(of_a_parabola(COSINE, "rate 2-1")))
    assert says(
        f"*rate 2-1* is {two} bits below the line and {parabola} below the parabola; *rate "
        f"3-1*, {three} below the line, is open"
    )
    assert held(COSINE, "rate 3-1")[2] > 0
    assert says(f"by {BEST} bits at the same floats, and by {parabola} under a cosine")


def test_with_a_rate_that_never_falls() -> None:
    constant = bits(effect(CONSTANT, "early 2-1", "late 2-1"))
    assert says(f"in the last 15 differ by {constant}, early at 0.0015 and late at 0.003")
    rates = tournament_of(CONSTANT)[0].groupby("name")["rate"].first()
    assert rates[["early 2-1", "late 2-1"]].to_list() == [0.0015, 0.003]
    assert says(f"not shown to differ at a constant one ({constant})")
    still, falls = wide(CONSTANT)[0], wide(STEP)[0]
    both = (still["early 2-1"] - still["late 2-1"]) - (falls["rate 2-1"] - falls["late 2-1"])
    assert says(
        f"that is {bits(t_interval(both.dropna().to_list()))} from what they differ by above"
    )
    assert min(held(CONSTANT, arm)[0] for arm in ("early 2-1", "late 2-1", "coin 2-1")) > 0
    trials = json.loads((REFERENCE / f"{CONSTANT}-tune.json").read_text(encoding="utf-8"))["trials"]
    scores = {(row["schedule"], row["values"]): fmean(row["scores"]) for row in trials}
    early, late = (scores[f"{arm} 2-1", "optimizer.lr=0.006"] for arm in ("early", "late"))
    assert says(f"At a constant 0.006, which no arm chose, early was {late - early:.2f} better")
    assert 0.006 not in set(rates)


def test_another_text() -> None:
    each, shown = tournament_of(WIKI)
    below = bits(turned(held(WIKI, "rate 2-1")))
    late = bits(effect(WIKI, "late 2-1", "rate 2-1"))
    assert says(f"*rate 2-1* is {below} bits below the line and {late} below *late 2-1*")
    assert says(f"On another text it is open ({below})")
    assert held(WIKI, "rate 2-1")[2] > 0
    values = wide(WIKI)[0]
    far = values.loc[7006]
    assert says(
        f"(7006) rank 2 ends at {far['rank 2']:.2f} and *rate 2-1* at {far['rate 2-1']:.2f}"
    )
    assert values.drop(7006)[["rank 2", "rate 2-1"]].max().max() < 3.02
    rates = each.groupby("name")["rate"].first()
    assert tournament.edges(REFERENCE / f"{WIKI}-tune.json", rates) == [*rates.index]
    assert set(rates) == {0.0015}
    lost = plain(effect(WIKI, "rate 2-1", "rank 2"), 3)
    assert says(f"To rank 2 it loses {lost} there.")
    assert {len(runs) for _, runs in each.groupby("name")} == {8}
    p = against(comparisons(each, shown), "rate 2-1", "static")["p_holm"]
    assert says(f"and by *rate 2-1* on WikiText-2 (p {p:.2f})")
    assert shown.name == "bits per byte"


@pytest.mark.parametrize("source", [STEP, COSINE, CONSTANT, WIKI])
def test_seeds_that_chose_are_others(source: str) -> None:
    assert not {1000, 1001, 1002, 1003} & {*tournament_of(source)[0]["seed"]}
