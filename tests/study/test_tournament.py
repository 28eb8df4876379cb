"""The tournament (oracles: sums by hand, a naive interpolation of committed runs, the registry)."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch

import regimes
from analysis.common.names import LADDERS
from analysis.findings.numbers import ladders
from analysis.tournament import tournament, tournament_figure
from analysis.tournament.equal_floats import at_same_floats, comparisons, timings
from analysis.tournament.tournament import (
    differences_as_text,
    edges,
    entries,
    own_minus_shared,
    own_minus_shared_as_text,
    table,
)
from analysis.tournament.tournament_figure import kinds
from regimes.base.config import Budget, RunConfig, in_windows
from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.compression import make_compressor
from regimes.compression.traffic import costs_per_step
from regimes.plotting.looks import find_metric
from regimes.policies import REGISTRY, check_levels, make_policy
from regimes.presets import get_grid
from regimes.records import load_all
from regimes.training.build import prepare_run

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
OTHERS = {  # of a batch, of a period, and of a grid of its own
    "accordion-batch",
    "smith",
    "post-local",
    "qsr",
    "rate-ladder",
    "by-layer",
}
ACCURACY = find_metric("accuracy")
TUNED = {  # the rates that were tried, as the comments of the grids say
    "tournament-smoke": (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
    "tournament-lm": (0.0015, 0.003, 0.006, 0.012),
    "tournament-small": (0.0125, 0.025, 0.05, 0.1, 0.2),
}

# -- the arms --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TUNED)
def test_every_policy_is_an_arm_and_only_schedules_differ(name: str) -> None:
    grid = get_grid(name)
    own = {"accordion-ladder", "error-ladder", "gravac", "l-greco"}
    assert {cell.policy["name"] for cell in grid.values()} == set(REGISTRY) - OTHERS | own
    assert set(grid) >= {name for ladder in LADDERS.values() for name in ladder}
    first = next(iter(grid.values()))
    for arm, cell in grid.items():
        check_levels(make_policy(cell.policy), cell.levels)
        assert cell.name == arm
        for part in ("data", "model", "compressor", "levels", "workers", "batch_size"):
            assert getattr(cell, part) == getattr(first, part)


def test_the_rates_are_wide_and_reach_to_half_the_presets() -> None:
    for name, rates in TUNED.items():
        assert [*rates] == sorted(rates)
        assert rates[-1] / rates[0] > 7.9
        lr = get_grid(name)["dense"].optimizer.lr
        assert rates[0] < lr < 2 * rates[-1]


def _floats(config: RunConfig, level: str) -> float:
    run = prepare_run(config)
    made = make_compressor(config.compressor)
    cost = costs_per_step(made, run.layers, config.levels, config.workers)[level]["floats"]
    run.close()
    return float(cost)


@pytest.mark.parametrize("name", ["rank 1", "rank 2"])
def test_longer_training_ends_at_the_floats_of_rank_4(name: str) -> None:
    grid = get_grid("tournament-smoke")
    longer = grid[f"{name} longer"]
    ratio = longer.epochs * _floats(longer, f"r{name[-1]}") / (24 * _floats(longer, "r4"))
    assert 1 <= ratio < 1.03  # whole epochs
    assert longer.budget
    assert (longer.budget.level, longer.budget.epochs) == ("r4", 24)
    shares = [first / longer.epochs for first in longer.optimizer.decay_epochs]
    assert shares == pytest.approx([12 / 24, 20 / 24], abs=0.02)


def test_figures_2_and_8_in_the_tournament_of_images() -> None:
    grid = get_grid("tournament-small")
    inside = {unit for unit in range(24) if in_windows(grid["critical 8"].policy["windows"], unit)}
    assert inside == {*range(6), 12, 13}
    turned = grid["high in critical 8"].policy
    assert turned["windows"] == grid["critical 8"].policy["windows"]
    assert (turned["inside"], turned["outside"]) == ("r1", "dense")
    on, stretched = grid["rank 1 on"], grid["rank 1 longer"]
    assert on.budget == stretched.budget == Budget("r4", 24)
    assert on.optimizer == grid["rank 1"].optimizer
    assert on.epochs == stretched.epochs == 83
    assert stretched.optimizer.decay_epochs == (41, 69)


@pytest.mark.parametrize("kind", ["first", "last", "coin"])
def test_controls_have_rank_4_in_so_many_units(kind: str) -> None:
    grid = get_grid("tournament-smoke")
    drawn = set()
    for name in (name for name in LADDERS[kind] if name.startswith(kind)):
        rule, past, levels = make_policy(grid[name].policy), [], []
        for _ in range(24):
            levels.append(rule.decide(past, ["layer"])[0].level)
            past.append(_epoch(levels[-1]))
        share = int(name.split()[1])
        assert levels.count("r4") == share
        assert (levels[:share] == ["r4"] * share) == (kind == "first")
        assert (levels[-share:] == ["r4"] * share) == (kind == "last")
        drawn.add(tuple(levels))
    assert len(drawn) == 3


def _epoch(level: str):  # type: ignore[no-untyped-def]
    from regimes.policies import PastEpoch

    return PastEpoch(0.1, 0.1, {}, [level])


# -- numbers by hand -------------------------------------------------------------------------


def runs(**arms: list[tuple[float, float]]) -> pd.DataFrame:
    """(floats, accuracy) by seed, for each arm."""
    return pd.DataFrame(
        [
            {
                "name": name.replace("_", " "),
                "seed": seed,
                "rate": 0.1,
                "accuracy": reached,
                "floats": sent,
                "bytes": 4 * sent,
                "s": 1.0,
            }
            for name, each in arms.items()
            for seed, (sent, reached) in enumerate(each)
        ]
    )


def test_a_kind_of_which_no_arm_was_run_is_no_control() -> None:
    """Ranks 1 and 4 throughout are the ends of "first" and "last" as well."""
    each = runs(
        rank_1=[(100, 90)] * 3,
        rank_4=[(400, 94)] * 3,
        first_6=[(200, 92)] * 3,
        mine=[(200, 95), (200, 96), (200, 97)],
    )
    assert [*comparisons(each, ACCURACY)["control"]] == ["static", "first"]


def test_a_control_between_two_is_on_the_line_over_the_logarithm_of_the_floats() -> None:
    each = runs(
        rank_1=[(100, 90), (100, 80)],
        rank_2=[(200, 92), (200, 90)],
        dense=[(1600, 98), (1600, 93)],
        mine=[(800, 97.0), (400, 90.0)],
    )
    found = at_same_floats(each, "mine", LADDERS["static"], "accuracy").to_list()
    assert found == pytest.approx([97 - (92 + 6 * 2 / 3), 90 - (90 + 3 / 3)])


def test_an_arm_that_sends_what_a_control_sends_is_compared_with_that() -> None:
    each = runs(rank_1=[(100, 90)], rank_2=[(200, 92)], mine=[(200, 95)], more=[(205, 95)])
    for arm in ("mine", "more"):  # 2.5 % more is as much
        found = at_same_floats(each, arm, LADDERS["static"], "accuracy")
        assert found.to_dict() == pytest.approx({0: 3.0})


@pytest.mark.parametrize("sent", [(90.0, 150.0), (150.0, 400.0)])
def test_beyond_the_controls_there_is_no_comparison(sent: tuple[float, float]) -> None:
    each = runs(rank_1=[(100, 90)] * 2, rank_4=[(300, 92)] * 2, mine=[(s, 91) for s in sent])
    assert at_same_floats(each, "mine", LADDERS["static"], "accuracy").empty
    rows = comparisons(each, ACCURACY)
    assert rows["difference"].isna().all()
    assert (rows["n"] == 0).all()


def test_seeds_are_paired_and_others_left_out() -> None:
    each = runs(
        rank_1=[(100, 90), (100, 50)],
        rank_4=[(300, 90), (300, 50)],
        mine=[(200, 91), (200, 51), (200, 0)],
    )
    found = at_same_floats(each, "mine", LADDERS["static"], "accuracy")
    assert found.to_dict() == pytest.approx({0: 1, 1: 1})
    lone = each[(each["name"] != "mine") | (each["seed"] == 2)]
    with pytest.raises(RecordError, match="no seed in common"):
        at_same_floats(lone, "mine", LADDERS["static"], "accuracy")


def test_a_mean_of_controls_is_over_the_seeds_that_all_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = runs(a=[(1, 1)] * 3, b=[(1, 1)] * 3, c=[(1, 3)] * 2)
    monkeypatch.setattr(ladders, "entries", lambda source: (each, ACCURACY))
    found = ladders.minus_mean("", "a", "b", "c")
    assert (found.mean, found.n) == (-1.0, 2)


def test_the_correction_is_over_all_contestants_and_controls() -> None:
    each = runs(
        rank_1=[(100, 90), (100, 91), (100, 92)],
        rank_4=[(100, 90), (100, 91), (100, 92)],
        a=[(100, 91), (100, 92), (100, 93.2)],
        b=[(100, 90), (100, 91.5), (100, 91)],
        **{f"{kind}_6": [(100, 90), (100, 91), (100, 92)] for kind in ("first", "last", "coin")},
    )
    rows = comparisons(each, ACCURACY)
    assert set(rows["arm"]) == {"a", "b"}
    assert list(rows["control"]) == ["static", "first", "last", "coin"] * 2
    assert rows["p_holm"].iloc[0] == pytest.approx(8 * rows["p"].iloc[0])


def test_controls_are_compared_with_the_kinds_before_their_own() -> None:
    each = runs(
        rank_1=[(100, 90), (100, 91), (100, 92)],
        rank_4=[(400, 94), (400, 96), (400, 94)],
        first_6=[(200, 93), (200, 93.5), (200, 94.5)],
        last_6=[(200, 90), (200, 91), (200, 92.5)],
        a=[(200, 1), (200, 2), (200, 3)],
    )
    rows = timings(each, ACCURACY).set_index(["arm", "control"])
    assert list(rows.index) == [("first 6", "static"), ("last 6", "static"), ("last 6", "first")]
    halfway = [92, 93.5, 93]  # of ranks 1 and 4, over the logarithm of the floats
    assert rows.loc[("first 6", "static"), "difference"] == pytest.approx((1 + 0 + 1.5) / 3)
    assert rows.loc[("last 6", "static"), "difference"] == pytest.approx(
        sum(x - y for x, y in zip((90, 91, 92.5), halfway, strict=True)) / 3
    )
    assert rows.loc[("last 6", "first"), "difference"] == pytest.approx((-3 - 2.5 - 2) / 3)
    assert (rows["p_holm"] <= 3 * rows["p"]).all()


def test_a_rate_of_its_own_is_set_beside_a_shared_one() -> None:
    own = runs(rank_1=[(100, 95), (100, 96), (100, 97)], only=[(100, 1)])
    shared = runs(rank_1=[(100, 85), (100, 90), (100, 80)]).assign(rate=0.4)
    rows = own_minus_shared(own, shared, "accuracy")
    row = rows.iloc[0]
    assert list(rows["arm"]) == ["rank 1"]
    assert (row["rate"], row["shared"], row["n"]) == (0.1, 0.4, 3)
    assert (row["accuracy"], row["accuracy_shared"]) == (96, 85)
    assert row["difference"] == pytest.approx((10 + 6 + 17) / 3)
    assert "+11.0 [" in own_minus_shared_as_text(rows, ACCURACY).markdown()
    with pytest.raises(RecordError, match=r"0 runs are common, at 0\.4"):
        own_minus_shared(own, shared.assign(seed=9), "accuracy")
    with pytest.raises(RecordError, match=r"at one rate: 3 runs are common, at 0\.1, 0\.4"):
        own_minus_shared(own, shared.assign(rate=[0.1, 0.4, 0.4]), "accuracy")


def test_seeds_that_are_all_alike_have_no_interval() -> None:
    each = runs(
        rank_1=[(100, 90), (100, 91)], rank_4=[(300, 92), (300, 93)], adaqs=[(100, 90), (100, 91)]
    )
    rows = comparisons(each, ACCURACY)
    assert (rows["difference"] == 0).all()
    assert rows[["ci_low", "ci_high", "p", "p_holm"]].isna().all(axis=None)
    assert "[all alike]" in differences_as_text(rows, ACCURACY).markdown()


def test_the_table_counts_from_dense() -> None:
    each = runs(dense=[(1000, 95), (1000, 96), (1000, 97)], mine=[(100, 90), (200, 92), (300, 94)])
    rows = table(each, ACCURACY, ["s"]).set_index("arm")
    assert list(rows.index) == ["mine", "dense"]
    assert rows.loc["mine", "floats_of_dense"] == pytest.approx(0.2)
    assert rows.loc["mine", "accuracy"] == 92
    half = 4.3027 * 2 / math.sqrt(3)  # t of two degrees of freedom, sd of 90, 92 and 94
    assert rows.loc["mine", "ci_high"] == pytest.approx(92 + half, rel=1e-4)


def test_the_title_counts_what_survives_correction() -> None:
    """Bits: less is better. L-GreCo is below the control, ACCORDION above, AdaQS is open."""
    rows = pd.DataFrame(
        {
            "arm": ["l-greco", "accordion", "adaqs"],
            "difference": [-0.2, 0.1, -0.1],
            "ci_low": [-0.3, 0.05, -0.15],
            "ci_high": [-0.1, 0.15, -0.05],
            "p_holm": [0.01, 0.04, 0.2],
        }
    )
    bits = find_metric("bits per byte")
    said = tournament_figure._title(rows, bits, "a constant rank")
    assert said == "L-GreCo beats a constant rank with as many floats; 1 of 3 lose to it"
    said = tournament_figure._title(rows[1:], bits, "a constant rank")
    assert said.startswith("No schedule of 2 is shown to beat a constant rank")
    turned = tournament_figure._title(rows, find_metric("accuracy"), "a constant rank")
    assert turned.startswith("ACCORDION beats a constant rank")


def test_rates_at_the_edge_are_named(tmp_path: Path) -> None:
    trials = [
        {"schedule": arm, "values": f"optimizer.lr={rate}"}
        for arm in ("a", "b")
        for rate in (0.1, 0.2, 0.4)
    ]
    (tmp_path / "tune.json").write_text(json.dumps({"trials": trials}))
    assert edges(tmp_path / "tune.json", pd.Series({"a": 0.4, "b": 0.2, "c": 9})) == ["a"]
    (tmp_path / "tune.json").write_text("{}")
    with pytest.raises(RecordError, match=r"no tune\.json"):
        edges(tmp_path / "tune.json", pd.Series({"a": 0.4}))


# -- committed runs --------------------------------------------------------------------------


def test_committed_runs_have_the_differences_of_a_naive_loop() -> None:
    records = load_all(REFERENCE / "small-ladder.tar.xz")
    rows = comparisons(entries(records), ACCURACY).set_index(["arm", "control"])
    found = []
    for run in (run for run in records if run.name == "accordion-ladder"):
        others = [r for r in records if r.seed == run.seed and r.name.startswith("rank ")]
        points = sorted((math.log(r.epochs["floats"].sum()), _last(r)) for r in others)
        x = math.log(run.epochs["floats"].sum())
        (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if a[0] <= x <= b[0])
        found.append(_last(run) - (y0 + (y1 - y0) * (x - x0) / (x1 - x0)))
    assert rows.loc[("accordion-ladder", "static"), "n"] == len(found)
    mean = sum(found) / len(found)
    assert rows.loc[("accordion-ladder", "static"), "difference"] == pytest.approx(mean)


def _last(run) -> float:  # type: ignore[no-untyped-def]
    return 100 * sum(row["metric"] for row in run.rows[-3:]) / 3


def test_the_same_arms_at_one_rate_are_set_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of its own, of what `own_minus_shared` says of them."""
    frame = runs(rank_1=[(100, 95), (100, 96)])
    monkeypatch.setattr(tournament, "own_minus_shared", lambda each, others, metric: frame)
    monkeypatch.setattr(
        tournament, "own_minus_shared_as_text", lambda rows, shown: Table(("here",), [])
    )
    archive = REFERENCE / "small-ladder.tar.xz"
    paths = tournament.main(archive, shared=archive, out=tmp_path)
    assert tmp_path / "shared.csv" in paths
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "shared.csv"), frame)
    assert "here" in capsys.readouterr().out


def test_a_slow_network_takes_longer_by_what_is_sent() -> None:
    rows = entries(load_all(REFERENCE / "small-ladder.tar.xz")).groupby("name").mean()
    fast, slow, far = tournament.NETWORKS
    assert (rows[fast] < rows[slow]).all()
    assert (rows[slow] < rows[far]).all()
    for network in (slow, far):
        assert rows.loc["rank 1", network] < rows.loc["rank 4", network]


def test_controls_that_were_not_run_are_not_drawn() -> None:
    """Ranks 1 and 4 are the ends of three other ladders, too."""
    ranks = {"rank 1", "rank 2", "rank 4", "accordion"}
    assert kinds(ranks) == ["static"]
    assert kinds(ranks | {"coin 6"}) == ["static", "coin"]
    assert kinds({"rank 1", "first 6"}) == ["first"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_of_dense_have_the_width_of_the_runs_numbers(dtype: str, tmp_path: Path) -> None:
    points = torch.randn(16, 4), torch.arange(16) % 2
    run = regimes.simulate(
        torch.nn.Linear(4, 2),
        points,
        points,
        out=tmp_path / "run",
        workers=2,
        batch_size=4,
        epochs=2,
        policy={"name": "static", "level": "high"},
        set={"dtype": dtype},
    )
    (row,) = tournament.entries([run]).to_dict("records")
    steps = sum(one["steps"] for one in run.rows)
    assert row["dense_floats"] == 10 * steps
    assert row["dense_bytes"] == 10 * steps * {"float32": 4, "float64": 8}[dtype]


def test_shares_where_no_dense_arm_was_run() -> None:
    """Of what dense would have sent, from the costs that the record has."""
    runs = [run for run in load_all(REFERENCE / "tournament-lm.tar.xz") if run.seed == 3000]
    shown = find_metric("bits per byte")
    whole = tournament.table(tournament.entries(runs), shown).set_index("arm")
    part = tournament.entries([run for run in runs if run.name != "dense"])
    found = tournament.table(part, shown).set_index("arm")
    for column in ("floats_of_dense", "bytes_of_dense"):
        assert found[column].to_dict() == pytest.approx(
            whole[column].drop("dense").to_dict(), rel=1e-3
        )
