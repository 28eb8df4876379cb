"""Lost time, and what three pulses say of others (oracles: closed forms, a t test)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.criticality import lost_time
from analysis.criticality.lost_time import Tree
from analysis.findings.sources import records
from regimes.base.errors import RecordError


def made(phases: dict[tuple[str, int], list[float]], kind: str = "pulse") -> Tree:
    """A tree of pulses of three units, whose harms are given by arm and onset, in the order of the
    seeds."""
    rows: list[dict[str, Any]] = [
        {"tree": "drawn", "arm": arm, "onset": onset, "seed": seed, "harm": harm, "length": 3}
        | {"left": 3, "rate": 1.0 / onset, "trunk": "trunk", "kind": kind}
        for (arm, onset), harms in phases.items()
        for seed, harm in enumerate(harms)
    ]
    return Tree("drawn", pd.DataFrame(rows), {"trunk": "bits"})


def test_pulses_that_are_too_few_are_said() -> None:
    few = lost_time.predictions(made({("a", at): [0.1, 0.1, 0.1] for at in (6, 9)}))
    assert few["why"].to_list() == ["2 pulses: an exponent needs 3, at two rates"]
    with pytest.raises(RecordError, match="give trees of pulses"):
        lost_time.main(())


def test_a_law_that_holds_predicts_with_r2_one() -> None:
    """Harm = 0.3 x rate^1.5, with the rates 1 / onset."""
    tree = made({("a", at): [0.3 * at**-1.5] * 3 for at in (6, 8, 10, 14, 18)})
    (row,) = lost_time.predictions(tree).to_dict("records")
    assert (row["exponent"], row["r2"]) == pytest.approx((1.5, 1.0))
    assert row["n"] == 2
    (own,) = lost_time.predictions(tree, (6, 8, 10)).to_dict("records")
    assert own["fitted"] == "6, 8, 10"
    assert lost_time.scored_together([tree])["bits"].r2 == pytest.approx(1.0)


@pytest.mark.parametrize("three", [(6, 10, 99), (6, 6, 10), (5, 9, 17)])
def test_three_units_in_which_no_three_pulses_start_are_said(three: tuple[int, int, int]) -> None:
    """Two of them would give an exponent, too."""
    tree = made({("a", at): [0.3 * at**-1.5] * 3 for at in (6, 8, 10, 14, 18)})
    (row,) = lost_time.predictions(tree, three).to_dict("records")
    named = ", ".join(map(str, three))
    assert row["why"] == f"three = {named}: expected three of 6, 8, 10, 14, 18"
    assert (row["n"], row["fitted"]) == (0, "")
    assert lost_time.scored_together([tree], three) == {}


def test_the_share_of_lost_time_has_the_interval_of_a_t_test() -> None:
    """The ends are the shares r at which the harms of deletion minus r times those of the pulse
    have a mean that differs from 0 with p = 0.05."""
    random = np.random.default_rng(1)
    harm, lost = random.normal(0.2, 0.02, (2, 5)), random.normal(0.08, 0.02, (2, 5))
    pulses = made({("a", at): [*harm[i]] for i, at in enumerate((6, 9))}).pulses
    left_out = made({("gone", at): [*lost[i]] for i, at in enumerate((6, 9))}, "deletion").pulses
    tree = made({("a", 6): [0.0]})
    both = Tree("drawn", pd.concat([pulses, left_out]), tree.units)
    table = lost_time.lost_time(both).set_index("onset")
    assert table.loc[6, "share"] == pytest.approx(lost[0].mean() / harm[0].mean())
    whole = table.loc[-1]
    assert whole["share"] == pytest.approx(lost.mean() / harm.mean())
    for end in ("share_ci_low", "share_ci_high"):
        rest = (lost - whole[end] * harm).mean(0)
        assert stats.ttest_1samp(rest, 0.0).pvalue == pytest.approx(0.05)
    assert whole["share_ci_low"] < whole["share"] < whole["share_ci_high"]


def test_a_tree_of_the_records() -> None:
    """Its null pulses have a harm of exactly 0."""
    runs = records("harm-lm-constant")
    tree = lost_time.tree("constant", runs)
    assert {*tree.pulses["kind"]} == {"pulse", "null"}
    (null,) = lost_time.nulls(tree).to_dict("records")
    assert (null["arm"], null["n"], null["largest"]) == ("same", 9, 0.0)
    assert all("two rates" in why for why in lost_time.predictions(tree)["why"])
    assert lost_time.scored_together([tree]) == {}
    assert lost_time.lost_time(tree).empty
