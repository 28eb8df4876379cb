"""The numbers in the prose of the findings: local steps, formed anew (oracle: the
committed records; each number is rounded once)."""

from __future__ import annotations

import json
from statistics import fmean

import pandas as pd
import pytest
from findings import (
    REFERENCE,
    against,
    between,
    effect,
    ends,
    plain,
    records,
    says,
    signed,
    tournament_of,
)

from analysis.claims.effects import minus
from analysis.tournament import tournament
from analysis.tournament.equal_floats import comparisons
from regimes.statistics import p_value

# -- local steps -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "marker", "n"),
    [("lm-local", "local", 8), ("lm-local-sgd", "local-sgd", 8), ("small-local", "local-small", 8)],
)
def test_the_tables_of_local_steps(source: str, marker: str, n: int) -> None:
    each, shown = tournament_of(source)
    assert {len(runs) for _, runs in each.groupby("name")} == {n}
    rows, found = tournament.table(each, shown), comparisons(each, shown)
    assert between(marker) == tournament.arms_as_text(rows, shown).markdown() + "\n"
    differences = tournament.differences_as_text(found, shown).markdown() + "\n"
    assert between(f"{marker}-differences") == differences


def test_what_is_said_of_local_steps() -> None:
    each, shown = tournament_of("lm-local")
    at = tournament.table(each, shown).set_index("arm")
    lost = {n: signed(effect("lm-local", f"every {n}", "every 1"), 2) for n in (4, 32, 128)}
    assert says(
        f"a period of 4 has {lost[4]} bits per byte more than each step, of 32 {lost[32]}, of 128 "
        f"{lost[128]}"
    )
    won = {
        name: signed(effect("lm-local", f"{name} quarter", "first quarter"), 2)
        for name in ("second", "third", "last")
    }
    assert says(
        f"beats the second by {won['second']}, the third by {won['third']} and the last by "
        f"{won['last']} bits"
    )
    worst = max(
        p_value(minus(f"{name} quarter", "first quarter")(records("lm-local")))
        for name in ("second", "third", "last")
    )
    assert says(f"bits (p at most {worst:.3f})")
    _, low, high = effect("lm-local", "last quarter", "every 32")
    assert max(abs(low), abs(high)) <= 0.01
    assert says("is within 0.01 bits of a period of 32")
    spent = at["floats"]
    assert round(spent["last quarter"] / spent["every 32"]) == 7
    assert {round(spent[f"{n} quarter"] / spent["every 4"], 1) for n in ("first", "last")} == {
        1.1,
        0.9,
    }
    found = comparisons(each, shown).set_index("arm")
    quarters = found.loc[[f"{n} quarter" for n in ("first", "second", "third", "last", "random")]]
    assert quarters["difference"].idxmin() == "first quarter"
    assert (quarters["ci_low"] > 0).all()
    assert (found["p_holm"] < 0.05).all()
    ahead = signed(effect("lm-local", "accordion", "every 4"), 2)
    assert says(
        f"than ACCORDION (by {ahead}), for {spent['every 4'] / spent['accordion']:.0%}".replace(
            "%", " %"
        )
    )
    (steps,) = {
        sum(row["sync"]["rounds"] for row in run.rows)
        for run in records("lm-local")
        if run.name == "diloco 32"
    }
    assert says(f"Its {steps} outer steps")
    times = [at.loc["every 1", n] / at.loc["every 4", n] for n in tournament.NETWORKS]
    assert says(
        f"takes {times[2]:.1f} times as long as a period of 4 on 20 Mbit/s with 50 ms, and "
        f"{times[0]:.1f} times as long on 10 Gbit/s"
    )


def test_what_is_said_of_local_steps_with_sgd() -> None:
    source = "lm-local-sgd"
    four, far = (signed(effect(source, f"every {n}", "every 1"), 2) for n in (4, 32))
    assert says(f"period of 4 has {four} bits more than each step, which is open, and of 32 {far}")
    last = signed(effect(source, "last quarter", "first quarter"), 2)
    even = signed(effect(source, "first quarter", "every 4"), 2)
    p = p_value(minus("last quarter", "first quarter")(records(source)))
    assert says(
        f"first quarter beats the last by {last} bits (p {p:.3f}) and loses to the "
        f"constant period of 4 by {even}"
    )
    assert says(f"beats a period of 32 by {signed(effect(source, 'every 32', 'last quarter'), 2)}")


def test_what_is_said_of_local_steps_on_images() -> None:
    source = "small-local"
    up = {n: plain(effect(source, f"every {n}", "every 1")) for n in (4, 32)}
    p = p_value(minus("every 32", "every 1")(records(source)))
    assert says(f"is {up[32]} points *above* each step (p {p:.3f}), and of 4 {up[4]}")
    found = comparisons(*tournament_of(source))
    first = plain(ends(against(found, "first quarter", "period")))
    beyond = plain(effect(source, "first quarter", "every 32"))
    assert says(f"The first quarter is {first} above constant periods at its floats")
    assert says(f"and {beyond} above a period of 32, which sends a ninth")
    spent = tournament.table(*tournament_of(source)).set_index("arm")["floats"]
    assert round(spent["first quarter"] / spent["every 32"]) == 9
    assert says(f"differ by {plain(effect(source, 'first quarter', 'last quarter'))}")
    trials = json.loads((REFERENCE / f"{source}-tune.json").read_text())["trials"]
    at = {
        (t["schedule"], float(t["values"].split("=")[1])): 100 * fmean(t["scores"]) for t in trials
    }
    flat = [score for (_, rate), score in at.items() if rate <= 0.05]
    assert says(f"all arms have {min(flat):.1f} to {max(flat):.1f} % of the validation images")
    rare = [f"{at['every 32', rate]:.1f} %" for rate in (0.2, 0.4)]
    each = [f"{at['every 1', rate]:.1f} %" for rate in (0.2, 0.4)]
    assert says(f"32 has {rare[0]} and each step {each[0]}, at 0.4 {rare[1]} and {each[1]}")


@pytest.mark.parametrize("source", ["lm-local", "lm-local-sgd", "small-local"])
def test_the_rates_of_local_steps(source: str) -> None:
    path = REFERENCE / f"{source}-tune.json"
    scores: dict[str, dict[float, float]] = {}
    for trial in json.loads(path.read_text())["trials"]:
        rate = float(trial["values"].split("=")[1])
        scores.setdefault(trial["schedule"], {})[rate] = fmean(trial["scores"])
    rates = tournament.table(*tournament_of(source)).set_index("arm")["rate"].to_dict()
    best = min if tournament_of(source)[1].lower else max
    assert rates == {name: best(found, key=found.__getitem__) for name, found in scores.items()}
    assert not tournament.edges(path, pd.Series(rates))
    if source == "lm-local":
        assert {n for n, found in scores.items() if len(found) > 4} == {"every 2", "diloco 32"}
        assert (rates["every 2"], rates["diloco 32"]) == (0.012, 0.0015)  # of 0.0015 to 0.012
