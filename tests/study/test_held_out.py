"""Calls judged by other seeds (oracles: drawn harms of known means, closed forms, a t test)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.criticality import held_out, law
from analysis.criticality.held_out import Tree
from analysis.findings.sources import records
from regimes.errors import ConfigError, RecordError
from regimes.harms.search import Facts
from regimes.plotting.looks import find_metric

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
MARGIN = 0.06  # 2 % of a trunk of 3 bits


def made(
    phases: dict[tuple[str, int], list[float]], kind: str = "pulse", name: str = "drawn"
) -> Tree:
    """A tree of pulses of three units, whose harms are given by arm and onset, in the order of the
    seeds."""
    rows: list[dict[str, Any]] = [
        {"tree": name, "arm": arm, "onset": onset, "seed": seed, "harm": harm, "length": 3}
        | {"left": 3, "rate": 1.0 / onset, "trunk": "trunk", "kind": kind}
        for (arm, onset), harms in phases.items()
        for seed, harm in enumerate(harms)
    ]
    return Tree(name, pd.DataFrame(rows), {"trunk": Facts(24, 3.0, 0.0, find_metric("bits"))})


def test_drawn_phases_get_their_calls_and_judgement() -> None:
    random = np.random.default_rng(0)
    means = {6: 0.0, 9: 0.02, 12: 0.2, 15: MARGIN}
    drawn = {("rank 1", at): [*random.normal(mean, 0.004, 12)] for at, mean in means.items()}
    each = held_out.judged(made(drawn)).set_index("onset")
    assert each["margin"].to_list() == pytest.approx([MARGIN] * 4)
    assert each.loc[[6, 9, 12], "call"].to_list() == ["safe", "safe", "harmful"]
    assert each.loc[[6, 9, 12], "against"].to_list() == [0, 0, 0]
    assert each.loc[[6, 9, 12], "n"].to_list() == [3, 3, 3]
    for at in (6, 9, 12):  # the six seeds after the first six judge
        others = drawn["rank 1", at][6:]
        low, high = stats.t.interval(0.95, 5, np.mean(others), stats.sem(others))
        found = each.loc[at, ["others", "mean", "mean_low", "mean_high"]].to_list()
        assert found == pytest.approx([6, np.mean(others), low, high])


def test_other_seeds_are_against_a_call_or_refute_it() -> None:
    """Three seeds say safe, which stands, whatever the fourth says."""
    safe, harmful = [0.0, 0.001, 0.002, 9.0], [0.2, 0.21, 0.22, 0.2]
    phases = {
        ("a", 6): [*safe, 0.05, 0.07, 0.06],  # a mean of the margin, and an interval around it
        ("a", 9): [*safe, 0.1, 0.101, 0.102],
        ("a", 12): [*safe, 0.01, 0.02, 0.03],
        ("a", 15): [*harmful, 0.0, 0.001, 0.002],
        ("a", 18): [*harmful, 0.2, 0.2, 0.3],
        ("a", 21): [0.0, 0.06, 0.12, 0.06, 0.06, 0.06, 0.06],
        ("b", 6): safe[:2],  # too few for a call
    }
    each = held_out.judged(made(phases), first=4)
    assert each["call"].to_list() == [*["safe"] * 3, *["harmful"] * 2, "unresolved"]
    assert each["against"].to_list()[:5] == [1, 1, 0, 1, 0]
    assert each["refuted"].to_list()[:5] == [0, 1, 0, 1, 0]
    assert each.loc[5, ["against", "refuted"]].isna().all()
    (row,) = held_out.summary(each).to_dict("records")
    wanted = {"phases": 6, "seeds": 7, "safe": 3, "safe_judged": 3, "safe_against": 2}
    wanted |= {"safe_refuted": 1, "harmful": 2, "harmful_against": 1, "harmful_refuted": 1}
    assert {key: row[key] for key in wanted} == wanted
    assert row["resolved"] == pytest.approx(5 / 6)
    assert row["share"] == pytest.approx(2 / 3)
    assert row["share_high"] == pytest.approx(0.975 ** (1 / 3), abs=0.01)
    # at a margin that no harm reaches, nothing is against a call of safe
    wide = held_out.judged(made(phases), first=4, margin=50.0)
    assert {*wide["call"]} == {"safe"}
    assert wide["against"].sum() == 0


def test_the_tree_is_the_unit() -> None:
    """Eight phases of one tree are against their calls: one tree of six, not eight phases of 48."""
    trees = []
    for place in range(6):
        last = 0.2 if place == 0 else 0.0
        phases = {("a", at): [0.0, 0.001, 0.002, last] for at in range(1, 9)}
        trees.append(held_out.judged(made(phases, name=f"tree {place}")))
    each = pd.concat(trees)
    assert held_out.summary(each).iloc[-1][["tree", "safe_judged"]].to_list() == ["all", 48]
    found = held_out.over_trees(each)
    assert (found["n"], found["count"]) == (6, 1)
    # of 1 of 6: the share at which 1 or fewer have a probability of 2.5 %
    high = found["share_high"]
    assert (1 - high) ** 6 + 6 * high * (1 - high) ** 5 == pytest.approx(0.025)
    assert 1 - (1 - found["share_low"]) ** 6 == pytest.approx(0.025)


def test_seeds_that_are_too_few_are_said() -> None:
    tree = made({("a", at): [0.0, 0.001, 0.002] for at in (6, 9, 12, 15)})
    each = held_out.judged(tree)
    assert each["others"].to_list() == [0] * 4
    assert each["against"].isna().all()
    assert "a phase needs 4 seeds" in held_out.sentences([tree], each, {})[0]
    assert held_out.judged(made({("a", 6): [0.0, 0.0]})).empty
    few = held_out.predictions(made({("a", at): [0.1, 0.1, 0.1] for at in (6, 9)}))
    assert few["why"].to_list() == ["2 pulses: an exponent needs 3, at two rates"]
    with pytest.raises(ConfigError, match="first = 2"):
        held_out.main((REFERENCE,), first=2)
    with pytest.raises(RecordError, match="give trees of pulses"):
        held_out.main(())


def test_a_law_that_holds_predicts_with_r2_one() -> None:
    """Harm = 0.3 x rate^1.5, with the rates 1 / onset."""
    tree = made({("a", at): [0.3 * at**-1.5] * 3 for at in (6, 8, 10, 14, 18)})
    (row,) = held_out.predictions(tree).to_dict("records")
    assert (row["exponent"], row["r2"]) == pytest.approx((1.5, 1.0))
    assert row["n"] == 2
    (own,) = held_out.predictions(tree, (6, 8, 10)).to_dict("records")
    assert own["fitted"] == "6, 8, 10"
    assert held_out.scored_together([tree])["bits"].r2 == pytest.approx(1.0)


@pytest.mark.parametrize("three", [(6, 10, 99), (6, 6, 10), (5, 9, 17)])
def test_three_units_in_which_no_three_pulses_start_are_said(three: tuple[int, int, int]) -> None:
    """Two of them would give an exponent, too."""
    tree = made({("a", at): [0.3 * at**-1.5] * 3 for at in (6, 8, 10, 14, 18)})
    (row,) = held_out.predictions(tree, three).to_dict("records")
    named = ", ".join(map(str, three))
    assert row["why"] == f"three = {named}: expected three of 6, 8, 10, 14, 18"
    assert (row["n"], row["fitted"]) == (0, "")
    assert held_out.scored_together([tree], three) == {}


def test_the_share_of_lost_time_has_the_interval_of_a_t_test() -> None:
    """The ends are the shares r at which the harms of deletion minus r times those of the pulse
    have a mean that differs from 0 with p = 0.05."""
    random = np.random.default_rng(1)
    harm, lost = random.normal(0.2, 0.02, (2, 5)), random.normal(0.08, 0.02, (2, 5))
    pulses = made({("a", at): [*harm[i]] for i, at in enumerate((6, 9))}).pulses
    left_out = made({("gone", at): [*lost[i]] for i, at in enumerate((6, 9))}, "deletion").pulses
    tree = made({("a", 6): [0.0]})
    both = Tree("drawn", pd.concat([pulses, left_out]), tree.facts)
    table = held_out.lost_time(both).set_index("onset")
    assert table.loc[6, "share"] == pytest.approx(lost[0].mean() / harm[0].mean())
    whole = table.loc[-1]
    assert whole["share"] == pytest.approx(lost.mean() / harm.mean())
    for end in ("share_low", "share_high"):
        rest = (lost - whole[end] * harm).mean(0)
        assert stats.ttest_1samp(rest, 0.0).pvalue == pytest.approx(0.05)
    assert whole["share_low"] < whole["share"] < whole["share_high"]


def test_a_tree_of_the_records() -> None:
    """Its null pulses have a harm of exactly 0 and are not judged."""
    runs = records("harm-lm-constant")
    tree = held_out.tree("constant", runs)
    assert {*tree.pulses["kind"]} == {"pulse", "null"}
    (null,) = held_out.nulls(tree).to_dict("records")
    assert (null["arm"], null["n"], null["largest"]) == ("same", 9, 0.0)
    each = held_out.judged(tree)
    assert {*each["arm"]} == {"rank 1", "rank 1, no feedback"}
    assert each["others"].max() == 0
    theirs = law.pulses("constant", runs, "rank 1")
    own = theirs[theirs["onset"] == 6]["harm"]
    row = each[(each["arm"] == "rank 1") & (each["onset"] == 6)].iloc[0]
    assert row["harm"] == pytest.approx(own.mean())
    last = {t.seed: t.rows[-1]["metric"] for t in runs if t.name == "trunk"}
    assert row["margin"] == pytest.approx(0.02 * float(last[min(last)] or 0))
    assert all("two rates" in why for why in held_out.predictions(tree)["why"])
    assert held_out.scored_together([tree]) == {}
    assert held_out.lost_time(tree).empty
    assert math.isnan(held_out.over_trees(each)["share"])
