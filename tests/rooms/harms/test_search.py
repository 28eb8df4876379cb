"""Searches for harm (oracles: differences of records, runs with the schedule from the start, the
same search without a stop, a law that a function follows)."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import searches
import torch
from configs import smoke, smoke_static
from hypothesis import strategies as st
from odd_values import odd, places, with_odd
from runs import same_bits, same_weights
from torch import Tensor, nn

import regimes
from analysis.criticality import measured
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.presets import get_grid
from regimes.presets.own import read_seeds
from regimes.records import load_all
from regimes.search.harms import ladder
from regimes.search.harms.evidence import Pulse
from regimes.search.harms.kinds import kinds_of, trunk_config
from regimes.search.rounds import LOG, read_log

UNITS = 4


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :3] ** 2).argmax(1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))


def searched(out: Path, **changes: Any) -> regimes.Harm:
    given: dict[str, Any] = {
        "runs": 12,
        "parts": 2,
        "epochs": UNITS,
        "workers": 2,
        "batch_size": 16,
        "optimizer": {"lr": 0.1, "schedule": "cosine"},
    }
    return regimes.harm(network, points(96, 0), points(64, 1), out=out, **{**given, **changes})


def seeds(found: regimes.Harm, pulse: Pulse) -> dict[int, float]:
    return {seed: harm for (own, seed), harm in found.known.harms.items() if own == pulse}


# -- records ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> regimes.Harm:
    return searched(tmp_path_factory.mktemp("search") / "whole")


def test_harm_is_the_difference_of_two_runs(whole: regimes.Harm) -> None:
    """Both trained by `simulate`, the one with the pulse as a policy of windows."""
    first, second = whole.known.rules.coarse("high")
    assert {*seeds(whole, first)} >= {0, 1, 2}
    assert whole.out is not None
    for pulse, windows in ((first, [[2, 4]]), (second, [[0, 2]])):
        ends = []
        for name, policy in (
            ("trunk", {"name": "static", "level": "low"}),
            ("windows", {"name": "windows", "windows": windows}),
        ):
            record = regimes.simulate(
                network,
                points(96, 0),
                points(64, 1),
                out=whole.out.parent / f"{name} {pulse.first}",
                epochs=UNITS,
                workers=2,
                batch_size=16,
                optimizer={"lr": 0.1, "schedule": "cosine"},
                policy=policy,
                seed=1,
            )
            ends.append((record.rows[-1]["metric"] or 0, record.epochs["bytes"].sum()))
        assert seeds(whole, pulse)[1] == pytest.approx(100 * (ends[0][0] - ends[1][0]), abs=1e-9)
        assert whole.saved[pulse] == pytest.approx(1 - ends[1][1] / ends[0][1])
    (each,) = {row["metric"] for row in [run.header for run in load_all(whole.out)]}
    assert each == "accuracy"
    assert whole.known.rules.grain == pytest.approx(100 / 64)


@pytest.mark.slow
def test_a_pulse_that_changes_nothing_harms_by_exactly_nothing(tmp_path: Path) -> None:
    found = searched(tmp_path, pulse="checkpoint_every=3")
    for pulse in found.known.windows("checkpoint_every=3"):
        assert {*seeds(found, pulse).values()} == {0.0}
        assert found.saved[pulse] == 0


def test_deletion_is_a_run_without_these_units(tmp_path: Path) -> None:
    given = {"set": {"data.reshuffle": False}, "optimizer": {"lr": 0.1}}
    found = searched(tmp_path / "search", pulse="deletion", **given)
    never = regimes.simulate(
        network,
        points(96, 0),
        points(64, 1),
        out=tmp_path / "never",
        epochs=UNITS - 2,
        workers=2,
        batch_size=16,
        policy="static",
        **given,
    )
    pulse = Pulse("deletion", ((2, 4),))
    trunk = regimes.load(tmp_path / "search/trunk/seed-0")
    expected = (trunk.rows[-1]["metric"] or 0) - (never.rows[-1]["metric"] or 0)
    assert seeds(found, pulse)[0] == pytest.approx(100 * expected, abs=1e-9)
    same_weights(tmp_path / "search/deletion, 2 units from 2/seed-0", never.folder)
    assert not found.ladders


def test_a_search_that_was_killed_ends_in_the_same_bytes(
    whole: regimes.Harm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after 1, 7, 17 and 25 units of training, all runs together."""
    from regimes.training import loop

    original = loop._train_unit
    for more in (1, 6, 10, 8):
        count = iter(range(more))

        def unit(*given: Any, count: Any = count) -> Any:
            if next(count, None) is None:
                raise KeyboardInterrupt
            return original(*given)

        monkeypatch.setattr(loop, "_train_unit", unit)
        with pytest.raises(KeyboardInterrupt):
            searched(tmp_path)
    monkeypatch.undo()
    found = searched(tmp_path)
    assert whole.out is not None
    folders, again = (
        sorted(run.folder.relative_to(out) for run in load_all(out))
        for out in (whole.out, tmp_path)
    )
    assert folders == again
    for folder in folders:
        same_bits(whole.out / folder, tmp_path / folder)
    logs = [read_log(out, lambda names, facts: names) for out in (whole.out, tmp_path)]
    assert logs[0].rounds == logs[1].rounds
    assert found.known.harms == whole.known.harms
    assert found.grid == whole.grid


@pytest.mark.slow
def test_runs_side_by_side_have_the_bytes_of_runs_in_turn(
    whole: regimes.Harm, tmp_path: Path
) -> None:
    """Model and data are sent to two processes, which stay from round to round."""
    found = searched(tmp_path, jobs=2)
    assert whole.out is not None
    assert found.known.harms.items() >= whole.known.harms.items()
    for run in load_all(whole.out):
        same_bits(run.folder, tmp_path / run.folder.relative_to(whole.out))


def test_the_study_reads_the_same_harms(whole: regimes.Harm) -> None:
    assert whole.out is not None
    each = measured.by_run(measured.by_unit(measured.pair_branches(load_all(whole.out))))
    known = {run: harm for run, harm in whole.known.harms.items() if run[0] is not None}
    assert len(each) == len(known)
    assert sorted(each["harm"]) == pytest.approx(sorted(known.values()))


def test_a_branch_that_was_never_tested_is_not_left_out(whole: regimes.Harm) -> None:
    pairs = measured.pair_branches(load_all(whole.out))
    run, trunk = pairs[0]  # broken off before it was tested
    rows = [{**row, "metric": None} for row in run.rows[:-1]]
    run.config["evaluate_every"] = 100
    with pytest.raises(RecordError, match="was tested in none of its units"):
        measured.by_unit([*pairs[1:], (replace(run, rows=rows), trunk)])


def test_a_larger_budget_goes_on(tmp_path: Path) -> None:
    few = searched(tmp_path, runs=7)
    before = {run.folder: run.rows for run in load_all(tmp_path)}
    more = searched(tmp_path, runs=11)
    assert few.known.harms.items() < more.known.harms.items()
    assert len(more.known.harms) <= 11
    after = {run.folder: run.rows for run in load_all(tmp_path)}
    assert all(after[folder] == rows for folder, rows in before.items())


@pytest.mark.slow
def test_spans_in_one_run_are_the_windows_of_the_schedule(tmp_path: Path) -> None:
    """A margin that nothing reaches makes all windows safe, so that they are tried together."""
    found = searched(tmp_path / "search", margin=1000.0, runs=40, parts=2)
    both = found.known.best("high")
    assert both == Pulse("high", ((0, UNITS),))
    record = regimes.simulate(
        network,
        points(96, 0),
        points(64, 1),
        out=tmp_path / "schedule",
        epochs=UNITS,
        workers=2,
        batch_size=16,
        optimizer={"lr": 0.1, "schedule": "cosine"},
        policy=found.kinds["high"].schedule(both.spans),
    )
    trunk = regimes.load(tmp_path / "search/trunk/seed-0")
    expected = 100 * ((trunk.rows[-1]["metric"] or 0) - (record.rows[-1]["metric"] or 0))
    assert seeds(found, both)[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_a_training_that_breaks_is_harm_without_end(tmp_path: Path) -> None:
    found = searched(tmp_path, pulse="optimizer.lr=1e30", runs=30)
    calls = [found.known.of(pulse) for pulse in found.known.windows("optimizer.lr=1e30")]
    assert {call.call for call in calls} == {"harmful"}
    assert {call.harm for call in calls} == {math.inf}
    assert "the training breaks: a loss is not finite" in str(found)
    again = searched(tmp_path, pulse="optimizer.lr=1e30", runs=30)
    assert str(again) == str(found)


def test_a_metric_that_is_not_finite_in_the_end_is_harm_without_end(tmp_path: Path) -> None:
    """A loss may be finite whose perplexity is not."""

    def harm(name: str, first: int, stop: int, seed: int) -> float:
        return math.nan if first == 0 else 0.0

    found = searches.Recorded(harm, {"runs": 9, "parts": 2}).decisions(tmp_path)
    assert found["calls"].keys() == {"high, 0-2", "high, 3-5", "high, 6-11"}, "halved: it harms"
    assert found["safe"] == {"high": "6-11"}


def test_another_search_is_refused(whole: regimes.Harm) -> None:
    assert whole.out is not None
    with pytest.raises(RecordError):
        searched(whole.out, optimizer={"lr": 0.2})
    with pytest.raises(RecordError, match="has pulses of 'high', too"):
        searched(whole.out, pulse="dense", runs=100)


def test_other_data_or_weights_do_not_join_a_search(whole: regimes.Harm) -> None:
    """They would train the trunks of further seeds, which no branch compares with the first."""
    assert whole.out is not None
    given = {"epochs": UNITS, "workers": 2, "batch_size": 16, "runs": 14, "parts": 2}
    given |= {"optimizer": {"lr": 0.1, "schedule": "cosine"}, "out": whole.out}
    before = {*whole.out.rglob("run.json")}

    def other() -> nn.Module:
        model = network()
        next(model.parameters()).data.mul_(2)
        return model

    other.__name__ = other.__qualname__ = network.__name__
    for model, train, said in (
        (network, points(96, 2), "trained on other data"),
        (other, points(96, 0), "other first weights: make the model after torch.manual_seed"),
    ):
        with pytest.raises(RecordError, match=said):
            regimes.harm(model, train, points(64, 1), **given)
    assert {*whole.out.rglob("run.json")} == before


# -- ladders ---------------------------------------------------------------------------------


def test_the_grid_has_a_ladder_at_the_bytes_of_the_safe_phases(
    tmp_path: Path,
) -> None:
    small = "data.train_size=64", "data.test_size=40"
    config = smoke("optimizer.decay_epochs=[]", "optimizer.schedule=cosine", "levels.low=8", *small)
    found = regimes.harm(config, runs=15, parts=2, margin=1e6, out=tmp_path / "search")
    found.save()
    grid = get_grid(str(tmp_path / "search/harm.toml"))
    assert {*grid} == {"trunk", "rate ladder"}
    expected = replace(config, name="trunk", seed=0, policy={"name": "static", "level": "low"})
    assert grid["trunk"] == expected
    assert read_seeds(str(tmp_path / "search/harm.toml")) == [3, 4, 5]
    sent = {}
    for name, cell in grid.items():
        record = regimes.run(cell, tmp_path / name)
        sent[name] = float(record.epochs["bytes"].sum())
    share = sent["rate ladder"] / sent["trunk"]
    assert share == pytest.approx(found.ladders["high"].bytes, rel=1e-6)
    best = found.known.best("high")
    assert best is not None
    assert abs(share - (1 - found.saved[best])) <= 0.5 * found.saved[best]


def test_the_bytes_of_a_ladder_are_those_of_runs_with_a_shorter_last_unit(tmp_path: Path) -> None:
    """Three units of three steps and one of a single step, in which the rate is lowest."""
    rates = "optimizer.schedule=cosine", "optimizer.warmup_epochs=1", "data.train_size=96"
    config = smoke_static("levels.low=8", "steps=10", "unit_steps=3", *rates)
    kind = kinds_of(["high"], [], trunk_config(config))["high"]

    def run(name: str, rule: Any) -> regimes.Record:
        return regimes.run(replace(config, policy=rule), tmp_path / name)

    trunk = run("trunk", {"name": "static", "level": "low"})
    spans = [(0, 2)]
    own = run("schedule", kind.schedule(spans)).epochs["bytes"].sum()
    whole = trunk.epochs["bytes"].sum()
    found = ladder._fit_ladder(kind, trunk, spans, float(1 - own / whole))
    assert found is not None
    sent = run("rate ladder", found.policy).epochs["bytes"].sum()
    assert sent / whole == pytest.approx(found.bytes, rel=1e-6)


def test_a_ladder_is_found_among_many_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine of 120 units has 120 rates between which it may change: of all shares the one with
    the nearest number of steps, without a replay for each."""
    cosine = [0.5 * (1 + math.cos(math.pi * unit / 120)) for unit in range(121)]
    rows = [{"lr": now, "next_lr": then, "steps": 1} for now, then in itertools.pairwise(cosine)]
    trunk: Any = SimpleNamespace(rows=rows)
    replayed: list[int] = []
    plain = ladder._steps_at

    def counted(*given: Any) -> int:
        replayed.append(plain(*given))
        return replayed[-1]

    monkeypatch.setattr(ladder, "_steps_at", counted)
    for steps in (0, 1, 50, 119):
        rule = ladder._nearest_table(trunk, "high", "low", steps)
        assert rule is not None
        below = sum(rate < rule["shares"][0] for rate in cosine[:120])
        assert plain(rule, "high", trunk) == below
        assert abs(below - steps) <= 1
    assert len(replayed) < 4 * 40


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "period": ({"pulse": "period=2"}, "sync_policy"),
    "batch": ({"pulse": "batch=2"}, "batch_policy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_longer_periods_and_larger_batches_save_what_a_policy_of_them_saves(
    name: str, tmp_path: Path
) -> None:
    """What a run with the change in the safe phases sends is what the search says."""
    changes, field = OTHERS[name]
    found = searched(tmp_path / "search", margin=1000.0, runs=12, **changes)
    best = found.known.best(found.known.rules.arms[0])
    assert best is not None
    kind = found.kinds[best.arm]
    record = regimes.simulate(
        network,
        points(96, 0),
        points(64, 1),
        out=tmp_path / "schedule",
        epochs=UNITS,
        workers=2,
        batch_size=16,
        optimizer={"lr": 0.1, "schedule": "cosine"},
        policy="static",
        set={field: kind.schedule(best.spans), **kind.setup},
    )
    trunk = regimes.load(tmp_path / "search/trunk/seed-0")
    saved = 1 - record.epochs["bytes"].sum() / trunk.epochs["bytes"].sum()
    assert saved == pytest.approx(found.saved[best], rel=0.02)


def test_the_file_of_several_ladders_says_the_bytes_of_each() -> None:
    shares = {"high in 0.*": 0.25, "high in 2.*": 0.5}
    by_policy = SimpleNamespace(field="policy")
    rule = {"name": "static", "level": "high"}
    answer: Any = SimpleNamespace(
        ladders={arm: SimpleNamespace(policy=rule, bytes=share) for arm, share in shares.items()},
        kinds=dict.fromkeys(shares, SimpleNamespace(setup={}, by_policy=by_policy)),
        sentences=list,
    )
    lines = [line for line in ladder.grid_toml(answer, smoke(), 2).splitlines() if "Bytes" in line]
    assert lines == [
        f"# Bytes, of those of the trunk ({arm}): rate ladder {share:.2f}."
        for arm, share in shares.items()
    ]


@pytest.mark.slow
def test_groups_of_layers_are_tried_by_themselves(tmp_path: Path) -> None:
    found = searched(tmp_path, groups=["0.*", "2.*"], margin=1000.0, runs=15)
    assert found.known.rules.arms == ("high in 0.*", "high in 2.*")
    run = regimes.load(tmp_path / "high in 0.*, 2 units from 2/seed-0")
    levels = dict(
        zip(
            [layer["name"] for layer in run.header["layers"]],
            run.rows[2]["layers"]["level"],
            strict=True,
        )
    )
    assert (levels["0.weight"], levels["2.weight"]) == ("high", "low")
    assert {each.policy["name"] for each in found.ladders.values()} == {"by-layer"}


# -- a function ------------------------------------------------------------------------------


def law(pulse: Pulse | None, seed: int) -> float:
    """A loss that pulses of the first half raise by 0.2 a unit."""
    harmed = (
        sum(unit < 6 for first, stop in pulse.spans for unit in range(first, stop)) if pulse else 0
    )
    random = np.random.default_rng([seed, harmed, *(sum(pulse.spans, ()) if pulse else ())])
    return 1.0 + 0.2 * harmed + 0.001 * float(random.standard_normal()) + 0.1 * seed


def test_a_function_that_trains_is_searched_alike(tmp_path: Path) -> None:
    found = regimes.harm(law, units=12, runs=200, out=tmp_path, margin=0.05)
    table = found.table.set_index(["first", "last"])["call"].to_dict()
    harmful = [(0, 2), (3, 3), (4, 4), (5, 5)]  # halved beside what is safe
    assert table == {**dict.fromkeys(harmful, "harmful"), (6, 8): "safe", (9, 11): "safe"}
    assert found.known.best("high") == Pulse("high", ((6, 12),))
    text = str(found)
    assert "epochs 6-8   safe        harm < 0.0500 loss (95 %)" in text
    calls: list[Any] = []

    def counted(pulse: Pulse | None, seed: int) -> float:
        calls.append(pulse)
        return law(pulse, seed)

    assert str(regimes.harm(counted, units=12, runs=200, out=tmp_path, margin=0.05)) == text
    assert not calls, "all results are in the log"


def test_an_accuracy_falls_where_a_pulse_harms(tmp_path: Path) -> None:
    found = regimes.harm(
        lambda pulse, seed: 1.2 - 0.4 * law(pulse, 0),
        units=12,
        runs=60,
        out=tmp_path,
        metric="accuracy",
    )
    assert found.known.rules.margin == 1.0
    first = found.known.of(found.known.windows("high")[0])
    assert first.harm == pytest.approx(100 * 0.4 * 0.6, abs=0.5)


def test_a_trunk_that_ends_at_zero_has_no_default_margin(tmp_path: Path) -> None:
    """2 % of its metric are 0, and no harm is below that. With a margin the same search goes on."""
    calls: list[Any] = []

    def reward(pulse: Pulse | None, seed: int) -> float:
        calls.append((pulse, seed))
        return 0.0 if pulse is None else 0.1 + 0.01 * seed

    words: dict[str, Any] = {"units": 12, "runs": 15, "out": tmp_path}
    with pytest.raises(ConfigError, match="expected one of your own") as caught:
        regimes.harm(reward, **words)
    assert "\n" not in str(caught.value)
    assert {pulse for pulse, _ in calls} == {None}
    found = regimes.harm(reward, **words, margin=1.0)
    assert len(set(calls)) == len(calls), "each run is trained once"
    assert set(found.table["call"]) == {"safe"}


# -- what is refused -------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "word": ({"pulse": "hihg"}, "did you mean 'high'"),
    "own level": ({"pulse": "low"}, "another level than the trunk's, low"),
    "twice": ({"pulse": ["high", "high"]}, "each once"),
    "no pulse": ({"pulse": []}, "a level, or one of"),
    "field": ({"pulse": "optimizer.lrr=1"}, "optimizer.lrr"),
    "period": ({"pulse": "period=1"}, "a whole number above 1"),
    "group": ({"pulse": "deletion", "groups": ["0.*"]}, "a level with groups"),
    "minutes": ({"minutes": 0.0, "runs": None}, "above 0"),
    "typo": ({"groups": ["0.*", "typo*"]}, "no compressed layer matches 'typo\\*'"),
    "forever": ({"minutes": math.inf, "runs": None}, "above 0, and finite"),
    "margin": ({"margin": 0.0}, "above 0"),
    "no margin": ({"margin": math.inf}, "above 0, and finite"),
    "parts": ({"parts": 1}, "2 or more"),
    "jobs": ({"jobs": 0}, "at least 1"),
    "argument": ({"epoch": 3}, "no argument of a training. did you mean 'epochs'"),
    "seed": ({"pulse": "seed=3"}, "pulse 'seed=3': seed = 3"),
    "data": ({"pulse": "data.batch_size=3"}, "data.batch_size"),
    "level": ({"pulse": "levels.high=0"}, "levels.high"),
    "epochs": ({"epochs": 1}, "two units or more"),
    "unsent": ({"jobs": 2, "loss": lambda a, b: a.sum()}, "cannot be sent to another process"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_searched_is_one_sentence(name: str, tmp_path: Path) -> None:
    changes, why = WRONG[name]
    with pytest.raises(RegimesError, match=why) as caught:
        searched(tmp_path / "search", **changes)
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.rglob("*.jsonl")], "nothing is trained"


@pytest.mark.parametrize("parts", [5, 10**6, 10**12])
def test_there_are_no_more_parts_than_units(parts: int, tmp_path: Path) -> None:
    few, many = (
        regimes.harm(law, units=12, runs=40, out=tmp_path / str(n), parts=n) for n in (12, parts)
    )
    if parts > 12:
        assert many.table.equals(few.table)
    assert len(many.table) <= 12
    searched(tmp_path / "records", parts=parts, runs=1)  # whose trunk keeps a state per window


def test_arguments_are_of_a_model_a_preset_or_a_function(tmp_path: Path) -> None:
    beside = "expected none beside 'smoke'"
    for trains, given, said in (
        ("smoke", {"epochs": 3}, f"epochs: {beside}"),
        ("smoke", {"units": 4}, "^units = 4: expected none, unless a function trains"),
        ("smoke", {"lower": True}, "^lower = True: expected none, unless a function trains"),
        (network, {}, "expected both, beside a model"),
        (law, {"units": 12, "metric": "mine"}, "is less mine better"),
        (law, {"units": 12, "pulse": []}, "a word that the function knows"),
        (law, {"units": 12, "pulse": ["x", "x"]}, "each once"),
    ):
        with pytest.raises(ConfigError, match=said):
            regimes.harm(trains, out=tmp_path, **given)


NO_METRIC = [10**400, 10**5000, True, np.bool_(True), torch.tensor(True), "0.5", b"1", None, 1j, {}]
NO_METRIC += [[1.0], torch.zeros(3), np.zeros(2)]


def test_what_is_no_metric_is_one_sentence(tmp_path: Path) -> None:
    for value in NO_METRIC:
        with pytest.raises(ConfigError, match=r"^the function returned .*, expected a number$"):
            regimes.harm(lambda pulse, seed, value=value: value, units=12, out=tmp_path)


@pytest.mark.parametrize("value", [3, 0.5, np.float32(2), torch.tensor(1.5), torch.ones(1)])
def test_a_number_of_any_kind_is_a_metric(value: Any, tmp_path: Path) -> None:
    found = regimes.harm(lambda pulse, seed: value, units=12, runs=1, out=tmp_path)
    assert found.known.rules.margin == pytest.approx(0.02 * float(value))


def test_a_metric_around_zero_needs_a_margin(tmp_path: Path) -> None:
    """2 % of a mean that is smaller than its spread over seeds says nothing."""
    given: dict[str, Any] = {"units": 12, "runs": 15, "out": tmp_path}

    def around(pulse: Pulse | None, seed: int) -> float:
        return (-1) ** seed * 0.2 + 0.01

    with pytest.raises(ConfigError, match=r"close to 0, at 0\.21, -0\.19") as told:
        regimes.harm(around, **given)
    assert "\n" not in str(told.value)
    assert set(regimes.harm(around, **given, margin=1.0).table["call"]) == {"safe"}
    with pytest.raises(ConfigError, match="what change of reward counts as none is not known"):
        regimes.harm(law, units=12, metric="reward", lower=False, out=tmp_path / "other")


# -- the log ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("log")
    regimes.harm(law, units=12, runs=12, out=folder)
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@hypothesis.given(data=st.data())
def test_a_damaged_log_is_one_sentence(data: st.DataObject, log: list[Any]) -> None:
    """Another value at any place of any line."""
    line = data.draw(st.integers(0, len(log) - 1))
    at = data.draw(st.sampled_from([*places(log[line])]))
    with tempfile.TemporaryDirectory() as folder:
        changed = [*log[:line], with_odd(log[line], at, data.draw(odd)), *log[line + 1 :]]
        Path(folder, LOG).write_text("".join(json.dumps(each) + "\n" for each in changed))
        with contextlib.suppress(RegimesError):
            regimes.harm(law, units=12, runs=12, out=folder)


@pytest.mark.parametrize("value", [None, True, "7", -1, 1.5, -1e300, 10**400, []], ids=str)
def test_a_damaged_log_names_its_line(value: Any, log: list[Any], tmp_path: Path) -> None:
    """A seed, a span's end and seconds that are none; in each line that has them."""
    for number, line in enumerate(log, start=1):
        if "runs" in line:
            names = [("facts", "runs", 0, 1), ("runs", 0)]
            names += [("facts", "runs", -1, 0, 1, 0, 1)] if line["facts"]["runs"][-1][0] else []
        else:
            names = [("seconds",), ("run",)]
        for at in names:
            if value in (1.5, "7") and at[0] in ("seconds", "run", "runs"):
                continue  # seconds; another name, which is another search
            changed = [*log[: number - 1], with_odd(line, at, value), *log[number:]]
            (tmp_path / LOG).write_text("".join(json.dumps(each) + "\n" for each in changed))
            with pytest.raises(RecordError, match=rf"{LOG}, line {number} is damaged") as told:
                regimes.harm(law, units=12, runs=12, out=tmp_path)
            assert "\n" not in str(told.value)


def test_a_log_of_an_earlier_version_goes_on(log: list[Any], tmp_path: Path) -> None:
    """It has what is asked in each round, not in a table of the first one."""
    lines: list[Any] = [dict(line) for line in log]
    for line in lines:
        if "facts" in line:
            own = {key: line["facts"][key] for key in ("runs", "parts")}
            line["facts"] = {**own, "units": 12, "metric": "loss"}
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = (tmp_path / LOG).read_bytes()
    regimes.harm(law, units=12, runs=12, out=tmp_path)
    assert (tmp_path / LOG).read_bytes() == before, "nothing is trained again"
    with pytest.raises(RecordError, match="holds a search with units 12, not 24"):
        regimes.harm(law, units=24, runs=12, out=tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"units": 24}, "holds a search with units 12, not 24"),
        ({"metric": "accuracy"}, "holds a search with metric 'loss', not 'accuracy'"),
        ({"first_seed": 5}, "holds another search"),
    ],
    ids=str,
)
@pytest.mark.parametrize("runs", [1, 8])
def test_another_search_of_a_function_is_refused(
    runs: int, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"units": 12, "runs": runs, "out": tmp_path}
    before = str(regimes.harm(law, **given))
    with pytest.raises(RecordError, match=said):
        regimes.harm(law, **{**given, **changes})
    assert str(regimes.harm(law, **given)) == before


def test_the_folder_of_another_kind_of_search_is_refused(tmp_path: Path) -> None:
    facts = {"probes": [["dense", 16, 0.0, 0]], "question": {}}
    line = {"runs": ["dense/16 steps/rate +0/seed-0"], "facts": facts}
    (tmp_path / LOG).write_text(json.dumps(line) + "\n")
    said = "holds another search: choose another folder"
    with pytest.raises(RecordError, match=said):
        regimes.harm(law, units=12, out=tmp_path)
    with pytest.raises(RecordError, match=said):
        searched(tmp_path)


@pytest.mark.parametrize(
    "given",
    [{"train_data": 1}, {"test_data": 1}, {"set": {"a": 1}}, {"groups": ["0.*"]}, {"jobs": 2}],
    ids=lambda given: next(iter(given)),
)
def test_what_a_function_cannot_use_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(given))} .* beside a function"):
        regimes.harm(law, units=12, out=tmp_path, **given)
