"""The tournament, and rivals: other compressors on gradients of a run (oracles: sums by hand, a
naive interpolation of committed runs; TopK in numpy, the run that uses the compressor itself)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from configs import smoke as config

import regimes
from analysis.common.names import LADDERS
from analysis.findings.numbers import ladders
from analysis.plugins import rivals
from analysis.plugins.rivals import Rivals
from analysis.tournament import error_per_float, tournament, tournament_figure
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
from regimes.base.errors import ConfigError, RecordError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY, make_compressor
from regimes.instruments.base import MeasurementContext
from regimes.instruments.panel import choose_instruments
from regimes.plotting.looks import find_metric
from regimes.presets import get_grid
from regimes.records import load, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
ACCURACY = find_metric("accuracy")

# -- numbers by hand -------------------------------------------------------------------------


def runs(**arms: list[tuple[float, float]]) -> pd.DataFrame:
    """(floats, accuracy) by seed, for each arm."""
    rows = [
        (name.replace("_", " "), seed, 0.1, reached, sent, 4 * sent, 1.0)
        for name, each in arms.items()
        for seed, (sent, reached) in enumerate(each)
    ]
    columns = ["name", "seed", "rate", "accuracy", "floats", "bytes", "s"]
    return pd.DataFrame(rows, columns=columns)


def test_a_control_between_two_is_on_the_line_over_the_logarithm_of_the_floats() -> None:
    """2.5 % more than a control sends is as much; seeds are paired, and others left out."""
    each = runs(
        rank_1=[(100, 90), (100, 80)],
        rank_2=[(200, 92), (200, 90)],
        dense=[(1600, 98), (1600, 93)],
        mine=[(800, 97.0), (400, 90.0), (200, 0)],
        as_much=[(200, 95), (205, 95)],
    )
    for arm, arms, expected in (
        ("mine", each, {0: 97 - (92 + 6 * 2 / 3), 1: 90 - (90 + 3 / 3)}),
        ("as much", each.query("name != 'dense'"), {0: 3.0, 1: 5.0}),
    ):
        found = at_same_floats(arms, arm, LADDERS["static"], "accuracy")
        assert found.to_dict() == pytest.approx(expected)
    lone = each[(each["name"] != "mine") | (each["seed"] == 2)]
    with pytest.raises(RecordError, match="no seed in common"):
        at_same_floats(lone, "mine", LADDERS["static"], "accuracy")


@pytest.mark.parametrize("sent", [(90.0, 150.0), (150.0, 400.0)])
def test_beyond_the_controls_there_is_no_comparison(sent: tuple[float, float]) -> None:
    """Where not all seeds are within. A kind of which no arm was run is no control, and not drawn:
    ranks 1 and 4 throughout are the ends of "first" and "last" as well."""
    each = runs(rank_1=[(100, 90)] * 2, rank_4=[(300, 92)] * 2, mine=[(s, 91) for s in sent])
    assert at_same_floats(each, "mine", LADDERS["static"], "accuracy").empty
    more = runs(first_6=[(200, 92)] * 2)
    for arms, controls in ((each, ["static"]), (pd.concat([each, more]), ["static", "first"])):
        rows = comparisons(arms, ACCURACY)
        assert [*rows["control"]] == kinds({*arms["name"]}) == controls
    rows = rows[rows["control"] == "static"]
    assert rows["difference"].isna().all()
    assert (rows["n"] == 0).all()


def test_seeds_that_are_all_alike_have_no_interval() -> None:
    arms = {"rank_1": [(100, 90), (100, 91)], "rank_4": [(300, 92), (300, 93)]}
    rows = comparisons(runs(**arms, adaqs=arms["rank_1"]), ACCURACY)
    assert (rows["difference"] == 0).all()
    assert rows[["ci_low", "ci_high", "p", "p_holm"]].isna().all(axis=None)
    assert "[all alike]" in differences_as_text(rows, ACCURACY).markdown()


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
    seconds = entries(records).groupby("name")[[*tournament.NETWORKS]].mean()
    assert (seconds.diff(axis=1).iloc[:, 1:] > 0).all(axis=None)  # on slower networks
    assert (seconds.loc["rank 1"] < seconds.loc["rank 4"])[1:].all()


def _last(run) -> float:  # type: ignore[no-untyped-def]
    return 100 * sum(row["metric"] for row in run.rows[-3:]) / 3


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float64", 8)])
def test_bytes_of_dense_have_the_width_of_the_runs_numbers(
    dtype: str, width: int, tmp_path: Path
) -> None:
    points = torch.randn(16, 4), torch.arange(16) % 2
    size = {"workers": 2, "batch_size": 4, "epochs": 1, "out": tmp_path / "run"}
    high = {"name": "static", "level": "high"}
    model = torch.nn.Linear(4, 2)
    run = regimes.simulate(model, points, points, policy=high, set={"dtype": dtype}, **size)
    (row,) = tournament.entries([run]).to_dict("records")
    assert (row["dense_floats"], row["dense_bytes"]) == (10 * 2, width * 10 * 2)


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


# -- rivals: other compressors on a run's gradients ---------------------------------------

LAYERS = [Layer("matrix", (6, 8)), Layer("bias", (5,))]
WORKERS = 3
RIVALS: dict[str, list[Any]] = {}  # levels, by compressor
for name in ("smoke-rivals", "smoke-rivals-more"):
    for rival in get_grid(name)["dense"].instruments["rivals"]["tables"]:
        RIVALS.setdefault(rival["name"], []).append(rival["level"])


def context(union: bool = False) -> MeasurementContext:
    model = torch.nn.ParameterList([torch.zeros(6, 8), torch.zeros(5)]).double()
    world = World(WORKERS)
    world.meter.dtype = torch.float64

    def never(*_: Any) -> Any:
        raise AssertionError("rivals look at gradients only")

    return MeasurementContext(model, never, world, LAYERS, 0, union, never, never)


def gradients(steps: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, WORKERS, 53)) + 0.3


def naive_topk(given: np.ndarray, kept: int, feedback: bool) -> np.ndarray:
    """The updates of every step; the bias travels whole."""
    owed, found = np.zeros((WORKERS, 48)), []
    for step in given:
        sent = np.zeros((WORKERS, 48))
        for w in range(WORKERS):
            full = step[w, :48] + (owed[w] if feedback else 0)
            largest = np.argsort(-np.abs(full))[:kept]
            sent[w, largest] = full[largest]
            owed[w] = full - sent[w]
        found.append(np.concatenate([sent.mean(0), step[:, 48:].mean(0)]))
    return np.array(found)


@pytest.mark.parametrize("resumed", [False, True])
def test_topk_against_loops(resumed: bool) -> None:
    table = {"name": "topk", "level": 25}
    gauge = Rivals(tables=(table,)).start(context())
    given, kept = gradients(7), 12  # a quarter of 48
    mean = given.mean(1)
    for epoch in (0, 1):
        span = slice(0, 4) if epoch == 0 else slice(4, 7)
        if resumed:
            before, gauge = gauge, Rivals(tables=(table,)).start(context())
            gauge.load_state_dict(before.state_dict())
        for step in given[span]:
            gauge.step(torch.from_numpy(step), [])
        (found,) = gauge.read(epoch).detail["rivals"]
        lost = mean[span] - naive_topk(given, kept, feedback=False)[span]
        assert found["once"] == pytest.approx(
            np.linalg.norm(lost) / np.linalg.norm(mean[span]), rel=1e-12
        )
        so_far = slice(0, span.stop)
        lost = (mean - naive_topk(given, kept, feedback=True))[so_far].sum(0)
        whole = np.linalg.norm(mean[so_far].sum(0))
        assert found["summed"] == pytest.approx(np.linalg.norm(lost) / whole, rel=1e-12)
    made = make_compressor({"name": "topk"})
    costs = [made.cost(LAYERS[0], 25, WORKERS), made.cost(LAYERS[1], "dense", WORKERS)]
    assert found["floats"] == sum(c.floats for c in costs)
    assert found["bytes"] == sum(c.bytes for c in costs)


def test_what_a_threshold_sends_is_counted_by_hand() -> None:
    """Of the sum, also across a state: each worker's coordinates with their places, the most of any
    worker, and the bias."""
    table, level = {"name": "threshold", "level": 1.0}, 1.0
    gauge = Rivals(tables=(table,)).start(context())
    owed, floats, sent = np.zeros((WORKERS, 48)), 0, 0
    given = gradients(5)
    for t, step in enumerate(given):
        full = step[:, :48] + owed
        large = np.abs(full) >= level
        owed = np.where(large, 0, full)
        most = large.sum(1).max()
        floats += WORKERS * 2 * most + WORKERS + 5
        sent += most * (8 + 4) + 4 + 5 * 8
        gauge.step(torch.from_numpy(step), [])
        if t == 2:
            before, gauge = gauge, Rivals(tables=(table,)).start(context())
            gauge.load_state_dict(before.state_dict())
    (found,) = gauge.read(0).detail["rivals"]
    assert found["bytes"] == sent / 5
    lost = np.linalg.norm(owed.mean(0))
    assert found["summed"] == pytest.approx(lost / np.linalg.norm(given.mean(1).sum(0)), rel=1e-9)
    assert found["floats"] == pytest.approx(floats / 5)


def test_what_sends_all_loses_nothing_and_no_gradient_has_no_error() -> None:
    gauge = Rivals(tables=({"name": "topk", "level": 100},)).start(context())
    for step in gradients(2):
        gauge.step(torch.from_numpy(step), [])
    (found,) = gauge.read(0).detail["rivals"]
    assert (found["once"], found["summed"]) == pytest.approx((0, 0), abs=1e-15)
    fresh = Rivals(tables=({"name": "topk", "level": 100},)).start(context())
    fresh.step(torch.zeros(WORKERS, 53, dtype=torch.float64), [])
    (found,) = fresh.read(0).detail["rivals"]
    assert (found["once"], found["summed"]) == (None, None)


@pytest.mark.parametrize(
    "name", [name for name in RIVALS if name not in ("cast", "randomk", "threshold")]
)
def test_the_sum_is_that_of_a_run_with_the_compressor(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run's own compressor among the rivals: the same updates, bit for bit."""
    level, sums, step = RIVALS[name][0], [], rivals.RivalsGauge.step

    def watched(self, stack, updates):  # type: ignore[no-untyped-def]
        step(self, stack, updates)
        sums.append((torch.cat([u.flatten() for u in updates]), self.rivals[0].sum.clone()))

    monkeypatch.setattr(rivals.RivalsGauge, "step", watched)
    run = config(
        *("model.width=2", "union_pass=false", f"compressor={{name='{name}'}}"),
        *(f"levels={{low={level}}}", "policy={name='static', level='low'}"),
        epochs=1,
    )
    tables = [{"name": name, "level": level}]
    regimes.run(replace(run, instruments={"rivals": {"tables": tables}}), tmp_path / "run")
    total = torch.zeros_like(sums[0][1])
    for update, so_far in sums:
        total += update.double()
        assert torch.equal(total, so_far)


def test_bad_tables_are_one_sentence(tmp_path: Path) -> None:
    run = config("union_pass=false", epochs=1)
    for tables, sentence in (
        ([], "instruments.rivals.tables = []: expected one table or more"),
        ([{"name": "topk"}], "has no level"),
        ([{"name": "topk", "level": 0}], "level of TopK = 0"),
        ([{"name": "topc", "level": 1}], "did you mean 'topk'"),
        ([{"name": "topk", "level": 1, "share": 3}], "share"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            regimes.run(replace(run, instruments={"rivals": {"tables": tables}}), tmp_path / "run")
    with pytest.raises(ConfigError, match="union_pass"):  # which has no gradients of workers
        choose_instruments({"rivals": {}}, (), None, context(union=True))


def test_every_compressor_is_a_rival() -> None:
    own = {"dct-topk", "threshold"}
    assert set(RIVALS) == set(REGISTRY) - {"dense"} | own  # dense saves nothing
    for name, levels in RIVALS.items():
        for level in levels:
            make_compressor({"name": name}).check(level)


def geometric(values: list[float]) -> float:
    return float(np.prod(values) ** (1 / len(values)))


def test_the_figure_has_the_means_of_the_record(
    tmp_path: Path,
) -> None:
    tables = [{"name": "topk", "level": 5}, {"name": "acp-sgd", "iterations": 2, "level": 1}]
    static = ("policy={name='static', level='dense'}", "name=dense")
    run = config("model.width=2", "union_pass=false", *static, epochs=3)
    run = replace(run, instruments={"rivals": {"tables": tables}})
    for seed in (0, 1):
        regimes.run(replace(run, seed=seed), tmp_path / "runs" / f"seed-{seed}")
    runs = [load(tmp_path / "runs" / f"seed-{seed}") for seed in (0, 1)]
    rows = error_per_float.errors(runs).set_index("compressor")
    assert list(rows.index) == ["topk", "acp-sgd, iterations 2"]
    once = [[line["rivals"][0]["once"] for line in run.details] for run in runs]
    assert rows.loc["topk", "once"] == pytest.approx(geometric([np.mean(each) for each in once]))
    summed = [run.details[-1]["rivals"][1]["summed"] for run in runs]
    assert rows.loc["acp-sgd, iterations 2", "summed"] == pytest.approx(geometric(summed))
    share = runs[0].details[0]["rivals"][0]["bytes"] / runs[0].header["per_step"]["dense"]["bytes"]
    assert rows.loc["topk", "bytes"] == share
    runs[0].details.clear()
    with pytest.raises(RecordError, match="no readings of the instrument rivals"):
        error_per_float.errors(runs)
