"""Replay against the run itself, agreement against scikit-learn, the bench against its parts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from scipy import stats
from sklearn.metrics import cohen_kappa_score, jaccard_score

from analysis.detection.detectors import bands
from analysis.plugins.detectors import TraceCusum
from regimes import policies
from regimes.base import statistics
from regimes.base.config import override
from regimes.base.errors import ConfigError, RecordError
from regimes.policies import Accordion, ByLayer, Detected, PastEpoch, Static, Windows
from regimes.policies.detectors import (
    EigenvalueChange,
    FirstShare,
    FixedWindows,
    NormChange,
    RelativeChange,
)
from regimes.policies.history import History
from regimes.policies.replay import compare, detect, replay
from regimes.presets import get_preset
from regimes.records import Record, RecordWriter, load, read_lines
from regimes.training.loop import run

EPOCHS, STEPS = 12, 10
LAYERS = [("a.weight", [4, 3], True), ("a.bias", [4], False), ("b.weight", [2, 4], True)]
COSTS = {"low": [14.0, 4.0, 12.0], "high": [7.0, 4.0, 6.0], "dense": [12.0, 4.0, 8.0]}


def make(
    folder: Path,
    seed: int = 0,
    name: str = "low",
    old: bool = False,
    level: str = "low",
    every: int = 2,
    decays: tuple[int, ...] = (6,),
    policy: dict[str, object] | None = None,
) -> Record:
    """A synthetic run with norms each epoch and curvature every so many; ``old``: no costs per
    layer in the header."""
    draw = np.random.default_rng(seed)
    config = {
        "name": name,
        "seed": seed,
        "epochs": EPOCHS,
        "workers": 4,
        "batch_size": 8,
        "data": {"name": "digits"},
        "model": {"name": "vgg7"},
        "compressor": {"name": "powersgd"},
        "levels": {"low": 2, "high": 1},
        "policy": policy or {"name": "static", "level": level},
        "optimizer": {"lr": 0.4, "decay_epochs": list(decays), "decay_factor": 10.0},
        "signal": "update",
        "instruments": {},
    }
    per_step: dict[str, dict[str, Any]] = {
        n: {"floats": sum(c), "bytes": 4 * sum(c), "layers": c} for n, c in COSTS.items()
    }
    for cost in per_step.values() if old else ():
        del cost["layers"]
    layers = [{"name": n, "shape": s, "compressed": c} for n, s, c in LAYERS]
    header = plain.header(config, per_step=per_step, steps_per_epoch=STEPS, layers=layers)
    writer = RecordWriter.create(folder, header)
    for epoch in range(EPOCHS):
        lr, next_lr = (0.4 * 0.1 ** sum(e >= d for d in decays) for e in (epoch, epoch + 1))
        floats = [COSTS[level if c else "dense"][i] * STEPS for i, (_, _, c) in enumerate(LAYERS)]
        measured = epoch % every == 0
        row = plain.row(epoch) | {
            "lr": lr,
            "next_lr": next_lr,
            "steps": STEPS,
            "floats": sum(floats),
            "bytes": 7,
            "layers": {
                "level": [level if c else "dense" for _, _, c in LAYERS],
                "floats": floats,
                "bytes": [4, 5, 6],
                "why": [None, None, None],
            },
            "statistics": {"norm:update": draw.uniform(0.1, 2, 3).tolist()}
            | ({"hessian_trace": draw.uniform(1, 2, 3).tolist()} if measured else {}),
            "model": {"eigenvalue": float(draw.uniform(1, 9))} if measured else {},
        }
        clock = {
            "compute": 0.6,
            "compress": 0.3,
            "communicate": 0.1,
            "instruments": 0.05,
            "evaluate": 5.0,
        } | ({"curvature": 2.0} if measured else {})
        writer.epoch(row, clock)
    writer.close()
    return load(folder)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return make(tmp_path_factory.mktemp("run") / "run")


# -- live == replay --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        '{name="accordion", interval=2}',
        '{name="detected", detector={name="norm-change", interval=2, statistic="norm*lr"}}',
        '{name="detected", detector={name="change", interval=1, direction="decay", eta=0.1}}',
        '{name="detected", detector={name="random-windows", epochs=6, share=0.5, seed=3}}',
    ],
)
def test_replay_decides_as_the_run_did(policy: str, tmp_path: Path) -> None:
    short = [
        "epochs=6",
        "data.train_size=100",
        "data.test_size=50",
        "model.width=4",
        "workers=2",
        "optimizer.decay_epochs=[3]",
        f"policy={policy}",
    ]
    config = override(get_preset("smoke"), short)
    trained = run(config, tmp_path / "run")
    again = replay.replay_rule(trained, policies.make_policy(config.policy))
    compressed = [layer["name"] for layer in trained.header["layers"] if layer["compressed"]]
    said = trained.layers[trained.layers["layer"].isin(compressed)].reset_index(drop=True)
    assert again["level"].tolist() == said["level"].tolist()
    assert again["why"].tolist() == said["why"].where(said["why"].notna(), None).tolist()
    assert replay.replay_traffic(trained, again) == trained.epochs["floats"].sum()


def test_a_detector_is_the_policy_that_spends_where_it_says(record: Record) -> None:
    one = replay.replay_rule(record, NormChange(interval=2))
    two = replay.replay_rule(record, Accordion(interval=2, decay_rule=False))
    pd.testing.assert_frame_equal(one, two)
    spent = replay.replay_rule(record, Accordion(interval=2))
    assert spent[spent["epoch"] == 6]["critical"].all()  # the decay rule


def test_replay_by_hand(record: Record) -> None:
    """A whole-model statistic measured every second epoch; decisions hold for the epoch after."""
    values = [row["model"].get("eigenvalue") for row in read_lines(record.folder / "epochs.jsonl")]
    expected, level = [True], True
    for epoch in range(EPOCHS - 1):
        if epoch % 2 == 0 and epoch:
            level = (values[epoch - 2] - values[epoch]) / values[epoch - 2] >= 0.2
        expected.append(level)
    frame = replay.replay_rule(record, EigenvalueChange(eta=0.2, interval=2))
    for _, rows in frame.groupby("layer"):
        assert rows["critical"].tolist() == expected
    evaluated = frame.loc[frame["score"].notna(), "epoch"].unique().tolist()
    assert evaluated == [3, 5, 7, 9, 11]


# -- traffic ---------------------------------------------------------------------------------


def test_traffic_by_hand(record: Record) -> None:
    mixed = replay.replay_rule(record, Static("high"))
    mixed.loc[(mixed["epoch"] == 3) & (mixed["layer"] == "b.weight"), "level"] = "low"
    assert replay.replay_traffic(record, mixed) == STEPS * (EPOCHS * 17 + 6)
    assert (
        replay.replay_traffic(record, replay.replay_rule(record, Static("dense")))
        == STEPS * EPOCHS * 24
    )


@pytest.mark.parametrize(
    "changes",
    [
        ["start_compressing_after=0"],
        ["sync_policy={name='static', level='4'}"],
        ["sync_policy={name='post-local', before='1', after='4'}"],
        ["sync_policy={name='windows', windows=[[0, 1], [2, 3]], inside='5', outside='2'}"],
        ["start_compressing_after=5"],
        ["start_compressing_after=5", "sync_policy={name='static', level='2'}"],
    ],
)
def test_traffic_of_a_runs_own_decisions_is_what_it_sent(
    changes: list[str], tmp_path: Path
) -> None:
    """Each step exchanges once, or each round of local steps; the first may be uncompressed."""
    short = ["epochs=4", "data.train_size=100", "data.test_size=50", "model.width=4", "workers=2"]
    short += ["optimizer.decay_epochs=[1]", "policy={name='windows', windows=[[1, 3]]}"]
    trained = run(override(get_preset("smoke"), [*short, *changes]), tmp_path / "run")
    own = policies.make_policy(trained.config["policy"])
    told = compare.compare_rules(trained, {"own": own, "low": Static("low")}).detectors
    sent = trained.epochs["floats"].sum()
    assert told["floats"][0] == sent
    if trained.config["start_compressing_after"] == 0:
        assert told["of_low"][1] == 1
    exchanged = sum(row["sync"].get("rounds", row["steps"]) for row in trained.rows)
    low = trained.header["per_step"]["low"]["floats"] * exchanged
    assert told["of_low"][0] == pytest.approx(sent / low, rel=1e-12)


def test_an_older_record_prices_what_it_can(tmp_path: Path) -> None:
    older = make(tmp_path / "old", old=True)
    whole = replay.replay_rule(older, Windows(((0, 4),)))
    assert replay.replay_traffic(older, whole) == STEPS * (
        4 * 30 + 8 * 17
    )  # all layers alike: totals
    single = replay.replay_rule(older, Static("low"))
    single.loc[3, "level"] = "dense"
    with pytest.raises(RecordError, match=r"older record.*level 'dense' for all layers together"):
        replay.replay_traffic(older, single)
    path = tmp_path / "old" / "epochs.jsonl"
    rows = read_lines(path)
    rows[0]["layers"] |= {"level": ["high", "dense", "high"], "floats": [70, 40, 60]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    single.loc[3, "level"] = "high"  # a level that some epoch of the run has used
    assert replay.replay_traffic(load(tmp_path / "old"), single) == STEPS * (EPOCHS * 30 - 6)


def test_what_a_signal_costs(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay_provides(), "eigenvalue", "curvature")
    assert replay.signal_cost(record, NormChange()) == pytest.approx((0.05, 0.05))
    assert replay.signal_cost(record, EigenvalueChange()) == pytest.approx((1.0, 1.0))
    assert replay.signal_cost(record, FirstShare(epochs=3)) == (0.0, 0.0)


def replay_provides() -> dict[str, str]:
    from regimes.policies.detectors.statistics import INSTRUMENT

    return INSTRUMENT


# -- agreement -------------------------------------------------------------------------------

CALLS = st_numpy.arrays(bool, st.tuples(st.integers(1, 30), st.integers(1, 4)))


@given(st.data())
def test_agreement_against_scikit_learn(data: st.DataObject) -> None:
    a = data.draw(CALLS)
    b = data.draw(st_numpy.arrays(bool, a.shape))
    x, y = a.ravel(), b.ravel()
    if (x | y).any():
        assert statistics.jaccard(a, b) == pytest.approx(jaccard_score(x, y))
    else:
        assert math.isnan(statistics.jaccard(a, b))
    if x.all() == y.all() and x.any() == y.any() and (x.all() or not x.any()):
        assert math.isnan(statistics.kappa(a, b))
    else:
        oracle = cohen_kappa_score(x, y, labels=[False, True])
        assert statistics.kappa(a, b) == pytest.approx(oracle, abs=1e-12)


@given(st.sets(st.integers(6, 24), min_size=1, max_size=6), st.integers(-5, 5))
def test_lag_finds_the_shift(epochs: set[int], shift: int) -> None:
    a, b = np.zeros(31, bool), np.zeros(31, bool)
    a[list(epochs)] = b[[e + shift for e in epochs]] = True
    found, best = compare.find_lag(a, b)
    assert best == 1
    assert abs(found) <= abs(shift)
    if len(epochs) == 1:
        assert found == shift
    assert all(math.isnan(x) for x in compare.find_lag(a & False, b & False))


@pytest.mark.parametrize(
    ("others", "shift"), [((8, 12), -2), ((9, 12), -1), ((8, 11), 1), ((10, 11), 0)]
)
def test_of_equal_lags_the_smallest_and_of_opposite_ones_the_lead(
    others: tuple[int, int], shift: int
) -> None:
    """``b`` meets the one call of ``a`` at two shifts, half as large as both calls."""
    a, b = np.zeros(31, bool), np.zeros(31, bool)
    a[10] = b[list(others)] = True
    assert compare.find_lag(a, b) == (shift, 0.5)


def test_a_number_that_one_seed_lacks() -> None:
    """A detector's is undefined; a pair's is that of the other seeds, and says how many."""
    nan, keys = math.nan, {"schedule": "low", "detector": "d", "a": "x", "b": "y"}
    names = [name for part in detect.NUMBERS.values() for name in part]
    rows = [
        {**keys, "granularity": "epoch", "seed": seed, **dict.fromkeys(names, value)}
        for seed, value in enumerate((1.0, nan, 3.0, 5.0))
    ]
    one = detect.over_seeds(pd.DataFrame(rows), "detectors").iloc[0]
    assert one["n"] == 4
    assert np.isnan([one["of_low"], one["of_low_ci_low"], one["of_low_ci_high"]]).all()
    two = detect.over_seeds(pd.DataFrame(rows), "pairs").iloc[0]
    assert (two["n"], two["kappa_n"], two["kappa"]) == (4, 3, 3.0)
    half = stats.t.ppf(0.975, 2) * 2 / math.sqrt(3)
    assert (two["kappa_ci_low"], two["kappa_ci_high"]) == pytest.approx((3 - half, 3 + half))


def test_what_stands_behind_plus_and_minus() -> None:
    row = {"x": 0.25, "x_ci_high": 0.375, "y": 2.0, "y_ci_high": math.nan, "z": math.nan}
    assert detect._cell(row, "x") == "0.25 ± 0.12"
    assert detect._cell(row, "x", 1, 100) == "25.0 ± 12.5"
    assert detect._cell(row, "y") == "2.00"
    assert detect._cell({**row, "z_ci_high": math.nan}, "z") == "-"


def test_lag_keeps_to_a_quarter_of_a_short_run() -> None:
    a, b = np.array([1, 0, 0, 0, 0, 0], bool), np.array([0, 0, 0, 0, 0, 1], bool)
    assert compare.find_lag(a, b)[0] in (-1, 0, 1)


def test_interval_against_scipy() -> None:
    values = [0.3, 0.1, 0.25, 0.2]
    ends = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert statistics.t_interval(values) == pytest.approx((np.mean(values), *ends))
    for few_or_alike in ([1.0], [0.5, 0.7], [0.3] * 4, [0.3, 0.3, 0.3 + 1e-17]):
        mean, *ends = statistics.t_interval(few_or_alike)
        assert mean == pytest.approx(np.mean(few_or_alike))
        assert np.isnan(ends).all(), few_or_alike
    assert statistics.t_interval([1.0, 2.0])[0] == 1.5
    assert np.isnan(statistics.t_interval([1.0, 2.0])[1:]).all()  # 1.5 ± 6.4 would say nothing


def test_pairs_by_epoch_or_by_epoch_and_layer(record: Record) -> None:
    rules = {"n": NormChange(interval=2), "t": TraceCusum(warmup=2), "w": FixedWindows(((0, 3),))}
    result = compare.compare_rules(record, rules)
    pairs = result.pairs.set_index(["a", "b"])
    assert pairs["granularity"].tolist() == ["epoch x layer", "epoch", "epoch"]
    frames = {name: replay.replay_rule(record, rule) for name, rule in rules.items()}
    n, t, w = (frames[name]["critical"].to_numpy() for name in "ntw")
    assert pairs["kappa"]["n", "t"] == pytest.approx(cohen_kappa_score(n, t))
    half = frames["n"].groupby("epoch")["critical"].mean() >= 0.5
    assert pairs["jaccard"]["n", "w"] == pytest.approx(jaccard_score(half, w[::2]))
    one = result.detectors.set_index("detector")
    assert one["critical"]["w"] == 3 / EPOCHS
    assert one["of_low"]["w"] == pytest.approx((3 * 30 + 9 * 17) / (EPOCHS * 30))
    assert result.epochs.query("detector == 'w'")["critical"].tolist() == [1.0] * 3 + [0.0] * 9


# -- what is missing -------------------------------------------------------------------------


def test_a_run_without_the_signal_is_one_sentence(record: Record, tmp_path: Path) -> None:
    words = r"recorded no 'hessian_trace' for the whole model \(it has eigenvalue, hessian_trace"
    with pytest.raises(RecordError, match=words):
        replay.replay_rule(record, TraceCusum(per_layer=False))
    with pytest.raises(RecordError, match="recorded no 'fisher_trace'"):
        detect.bench_detectors([record], ["fisher-change"])
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, **record.header}))
    with pytest.raises(RecordError, match="has no complete epoch"):
        replay.replay_rule(load(tmp_path), NormChange())


@pytest.mark.parametrize("texts", [[], ["first-share"], ["accordion"], ["norm-change"]])
def test_a_run_that_compresses_nothing_is_one_sentence(record: Record, texts: list[str]) -> None:
    """A model with vectors alone: there is no layer to decide for."""
    layers = [{**layer, "compressed": False} for layer in record.header["layers"]]
    whole = replace(record, header={**record.header, "layers": layers})
    with pytest.raises(RecordError, match="compresses no layer: there is nothing to decide"):
        detect.bench_detectors([whole], texts)


def test_a_signal_of_one_layer_alone_was_recorded(record: Record) -> None:
    """A statistic may be undefined in the first layer, such as a cosine of a gradient of zero."""
    past = History([PastEpoch(0.1, 0.1, {"cosine": [None, 0.5]}, ["low"] * 2)] * EPOCHS)
    rule = RelativeChange(statistic="cosine", interval=1)
    again = replay.replay_over(past, record, rule)
    assert again["level"].tolist() == ["low"] * 4 + ["low", "high"] * (EPOCHS - 2)
    none = History([PastEpoch(0.1, 0.1, {"cosine": [None, None]}, ["low"] * 2)] * EPOCHS)
    with pytest.raises(RecordError, match="recorded no 'cosine' per layer"):
        replay.replay_over(none, record, rule)


def test_a_policy_within_another_reads_what_the_model_has(record: Record) -> None:
    """The eigenvalue is of the whole model, and no layer has one."""
    rule = EigenvalueChange(interval=2)
    alone = replay.replay_rule(record, rule)
    assert alone["level"].nunique() == 2
    within = replay.replay_rule(record, ByLayer(otherwise=Detected(rule)))
    assert within["level"].tolist() == alone["level"].tolist()


def test_a_level_that_the_run_does_not_have_has_no_price(record: Record) -> None:
    words = "has no level 'mid', only low, high, dense: give the policy levels of the run"
    with pytest.raises(RecordError, match=words):
        replay.replay_traffic(record, replay.replay_rule(record, Static("mid")))


# -- the bench -------------------------------------------------------------------------------


def test_texts_name_detectors(record: Record) -> None:
    assert detect.make_rule("norm-change:interval=3,statistic=norm*lr", record) == NormChange(
        interval=3, statistic="norm*lr"
    )
    assert detect.make_rule("fixed-windows:windows=[[0, 2],[4,5]]", record) == FixedWindows(
        ((0, 2), (4, 5))
    )
    assert detect.make_rule("first-share:share=0.5", record) == FirstShare(0.5, EPOCHS)
    assert detect.make_rule("accordion:interval=2", record) == Accordion(interval=2)
    own = detect.make_rule("regimes.policies.detectors.change:NormChange:eta=0.2", record)
    assert own == NormChange(eta=0.2, interval=1)
    assert detect.short_labels(["norm-change", "norm-change:eta=0.4", "msdr-fall:fall=0.3"]) == {
        "norm-change": "norm-change",
        "norm-change:eta=0.4": "norm-change eta=0.4",
        "msdr-fall:fall=0.3": "msdr-fall",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norm-chagne", "did you mean 'norm-change'"),
        ("norm-change:0.5", "needs the form NAME:key=value"),
        ("norm-change:eta=0.3,eta=0.5", "it has eta twice"),
        ("norm-change:name=random-windows", "it has name twice"),
        ("norm-change:eat=1", "unknown key 'detector.eat'"),
        ("no.such:Class", "cannot import the detector 'no.such:Class'"),
    ],
)
def test_bad_texts_are_one_sentence(text: str, message: str, record: Record) -> None:
    with pytest.raises(ConfigError, match=message):
        detect.make_rule(text, record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in ("low", "high"):
        for seed in range(3):
            make(root / name / f"seed-{seed}", seed, name, level=name)
    return root


def test_means_and_intervals_over_seeds(folder: Path) -> None:
    runs = detect.read_runs([folder / "low", folder / "high", folder / "low"])
    assert len(runs) == 6
    texts = ["norm-change:interval=2", "eigenvalue-change:interval=2"]
    result = detect.bench_detectors(runs, texts)
    each = result.detectors.query("schedule == 'low' and detector == 'norm-change'")["critical"]
    mine = detect.over_seeds(result.detectors, "detectors").query(
        "schedule == 'low' and detector == 'norm-change'"
    )
    ends = stats.t.interval(0.95, 2, each.mean(), stats.sem(each))
    assert mine["n"].tolist() == [3]
    found = mine[["critical_ci_low", "critical_ci_high"]].to_numpy()[0]
    assert found == pytest.approx(ends)


def test_default_controls_are_as_long_as_the_norm_rule(folder: Path) -> None:
    runs = detect.read_runs([folder / "low"])
    texts = detect.default_rules(runs)
    assert [t.partition(":")[0] for t in texts] == [
        "norm-change",
        "norm-change",
        "accordion",
        "eigenvalue-change",
        "first-share",
        "random-windows",
    ]
    result = detect.bench_detectors(runs, texts)
    share = result.detectors.groupby("detector", sort=False)["critical"].mean()
    assert share["random-windows"] == share["first-share"]
    assert abs(share["random-windows"] - share.iloc[0]) < 1 / EPOCHS
    windows = result.epochs.query("detector == 'random-windows'")
    assert windows.groupby("seed")["critical"].apply(tuple).nunique() > 1  # each seed its own


@pytest.mark.parametrize(
    ("epochs", "own", "interval"),
    [(4, None, 1), (24, None, 3), (300, None, 10), (24, 4, 4), (24, 0, 3)],
)
def test_the_interval_of_the_defaults(
    epochs: int, own: int | None, interval: int, record: Record
) -> None:
    """The policy's; else ten epochs, but at most an eighth of what was trained and at least one."""
    rows = [{**record.rows[i % len(record.rows)], "epoch": i} for i in range(epochs)]
    policy = {"name": "static"} if own is None else {"name": "accordion", "interval": own}
    config = {**record.config, "policy": policy, "epochs": epochs}
    run = replace(record, rows=rows, header={**record.header, "config": config, "units": epochs})
    assert detect.interval_of(run)[0] == interval
    assert detect.make_rule("norm-change", run) == NormChange(interval=interval)
    assert detect.make_rule("norm-change:interval=2", run) == NormChange(interval=2)


@pytest.mark.parametrize("name", ["norm-change", "accordion", "random-windows"])
def test_one_name_has_one_answer_for_a_run(name: str, folder: Path, tmp_path: Path) -> None:
    """In a folder beside a run whose policy has an interval, alone, and named."""
    make(tmp_path / "grid/accordion", 0, "accordion", policy={"name": "accordion", "interval": 2})
    make(tmp_path / "grid/low", 0, "low", level="low")
    answers = []
    for place, texts in (("grid", ()), ("grid/low", ()), ("grid/low", (name,)), ("grid", (name,))):
        result = detect.bench_detectors(detect.read_runs([tmp_path / place]), texts)
        mine = result.detectors.query(f"schedule == 'low' and detector == '{name}'")
        answers.append(tuple(mine[["critical", "interval"]].iloc[0]))
    assert len({*answers}) == 1
    titles = [table.title for table in detect.format_tables(result) if table.title]
    if name in ("norm-change", "accordion"):
        assert "accordion, 1 seed; interval 2 (of the run's policy)" in titles
        assert f"low, 1 seed; interval 1 (an eighth of {EPOCHS} units)" in titles


def test_two_runs_of_one_seed_are_refused(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "twin", seed=1)
    with pytest.raises(RecordError, match="both 'low' runs of seed 1"):
        detect.read_runs([folder, tmp_path])
    with pytest.raises(RecordError, match="no run in or under"):
        detect.read_runs([tmp_path / "nowhere"])
    with pytest.raises(RecordError, match="at least one run"):
        detect.read_runs([])


def test_the_command(folder: Path, tmp_path: Path, command: Any) -> None:
    words = ["detect", str(folder / "low")]
    done = command(*words, "--out", "tables")
    assert done.returncode == 0, done.stderr
    assert "low, 3 seeds" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    counts = {"detectors": 6, "pairs": 15, "epochs": 6 * 3 * EPOCHS}
    for name, count in counts.items():
        assert len(pd.read_csv(tmp_path / "tables" / f"{name}.csv")) == count
    done = command(*words, "--detectors", "fisher-change", "msdr-fall")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "recorded no 'fisher_trace' for the whole model" in done.stderr


def test_the_figure_has_one_band_per_detector(folder: Path) -> None:
    runs = detect.read_runs([folder])
    result = detect.bench_detectors(runs)
    fig, numbers = bands(runs, result)
    panels = [ax for ax in fig.axes if ax.images]
    interval = f"interval 1 (an eighth of {EPOCHS} units)"
    titles = [f"{level} compression; {interval}" for level in ("low", "high")]
    assert [ax.get_title(loc="left") for ax in panels] == titles
    for ax in panels:
        assert ax.images[0].get_array().shape == (result.detectors["detector"].nunique(), EPOCHS)
    shown = numbers.query("schedule == 'low' and detector == 'eigenvalue-change'")["critical"]
    assert panels[0].images[0].get_array()[3].tolist() == shown.tolist()


def test_what_no_run_could_compute_is_said_once_for_each(tmp_path: Path) -> None:
    """Two older records without costs per layer, by two detectors: a sentence per record."""
    runs = [make(tmp_path / str(seed), seed, old=True) for seed in (0, 1)]
    result = detect.bench_detectors(runs, ["norm-change:interval=2", "norm-change:interval=3"])
    assert len(result.notes) == 2
    for older, said in zip(runs, result.notes, strict=True):
        assert said.startswith(
            f"{older.folder} is an older record that knows the traffic of level "
        )
    assert result.detectors["floats"].isna().all()
    new = [make(tmp_path / "new")]
    assert detect.bench_detectors(new, ["norm-change:interval=2"]).notes == ()
