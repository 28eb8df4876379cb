"""Regimes in the middle of a training (oracles: units counted by hand, runs, sums by hand)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import regimes
from analysis.common.names import EVENTS, spoken
from analysis.tournament import events as apart
from analysis.tournament import tournament, tournament_figure
from regimes.config import in_windows, override
from regimes.errors import RecordError
from regimes.plotting.looks import find_metric
from regimes.policies import check_levels, make_policy
from regimes.presets import get_grid
from regimes.records import load, load_all

GRIDS = ("shift-smoke", "restarts-smoke", "ramp-smoke", "pruned-smoke")
ACCURACY = find_metric("accuracy")


@pytest.mark.parametrize("name", GRIDS)
def test_arms_differ_in_their_policy_alone(name: str) -> None:
    grid = get_grid(name)
    first = next(iter(grid.values()))
    for arm, cell in grid.items():
        assert replace(cell, name="", policy=first.policy) == replace(first, name="")
        assert cell.name == arm
        check_levels(make_policy(cell.policy), cell.levels)
    assert {arm for arm, _ in apart.PAIRS} | {"event 12", "rank 4"} < set(grid)


@pytest.mark.parametrize("name", GRIDS)
def test_who_knows_the_event_spends_as_many_units_as_who_spends_first(name: str) -> None:
    grid = get_grid(name)
    starts = (0, 8, 16) if name == "restarts-smoke" else (12,)
    for share in (share for share in (6, 12, 18) if f"event {share}" in grid):
        spans = {kind: grid[f"{kind} {share}"].policy["windows"] for kind in ("event", "first")}
        units = {
            kind: {unit for unit in range(24) if in_windows(each, unit)}
            for kind, each in spans.items()
        }
        assert units["first"] == set(range(share))
        assert len(units["event"]) == share
        assert units["event"] >= set(starts)


@pytest.mark.slow
def test_something_happens_where_the_grids_say(tmp_path: Path) -> None:
    for name in GRIDS:
        cell = override(get_grid(name)["rank 1"], ["data.train_size=128", "data.test_size=32"])
        regimes.run(cell, tmp_path / name)
    rate = load(tmp_path / "restarts-smoke").epochs["lr"]
    assert rate[8] == rate[16] == rate[0] == rate.max()
    assert rate[7] == rate[15] < 0.05 * rate[0]
    ramp = load(tmp_path / "ramp-smoke").epochs
    assert ramp["floats"][11] == pytest.approx(4 * ramp["floats"][12])
    assert ramp["lr"][11] == ramp["lr"][12] == 10 * ramp["lr"][20]
    shift = load(tmp_path / "shift-smoke").epochs["train_loss"]
    assert shift[12] > 2 * shift[11]
    pruned = load(tmp_path / "pruned-smoke").epochs["train_loss"]
    assert pruned[12] > 1.1 * pruned[11]


def test_forced_follows_nothing_that_was_measured(tmp_path: Path) -> None:
    """With interval 3: the start and the first evaluation, after epoch 0, then no more, until the
    decay at 20 and the evaluation after epoch 21."""
    cell = override(
        get_grid("ramp-smoke")["forced 3"], ["data.train_size=128", "data.test_size=32"]
    )
    regimes.run(cell, tmp_path / "run")
    layers = load(tmp_path / "run").layers
    low = layers[layers["level"] == "r4"].groupby("epoch").size()
    assert [*low.index] == [0, 1, 2, 3, 20, 21]
    assert low.nunique() == 1


def test_the_event_is_held_against_controls_and_policies_against_it() -> None:
    rows = [
        {"name": name, "seed": seed, "floats": floats, "accuracy": reached + seed}
        for seed in range(3)
        for name, floats, reached in (
            ("event 6", 2.0, 90.0),
            ("event 12", 4.0, 92.0),
            ("first 6", 2.0, 80.0),
            ("first 12", 4.0, 84.0),
            ("accordion 1", 8**0.5, 93.0),
        )
    ]
    found = tournament.comparisons(pd.DataFrame(rows), ACCURACY).set_index(["arm", "control"])
    assert found["difference"].to_dict() == pytest.approx(
        {
            ("event 6", "first"): 10.0,
            ("event 12", "first"): 8.0,
            ("accordion 1", "first"): 11.0,
            ("accordion 1", "event"): 2.0,
        }
    )
    assert not {*EVENTS} & tournament_figure.CONTROLS


@pytest.mark.slow
def test_the_figure_of_an_event(tmp_path: Path) -> None:
    grid = get_grid("shift-smoke")
    for name in ("dense", "rank 1", "event 6", "event 12", "accordion 1"):
        short = override(grid[name], ["epochs=14", "data.train_size=32", "data.test_size=32"])
        regimes.run(short, tmp_path / "runs" / name)
    assert len(load_all(tmp_path / "runs")) == 5
    tournament.main(tmp_path / "runs", out=tmp_path / "out")
    svg = (tmp_path / "out" / "tournament.csv").read_text()
    assert "event 12" in svg


# -- settings beside each other --------------------------------------------------------------

SHIFT = Path(__file__).parents[2] / "data" / "reference" / "shift-smoke.tar.xz"


@pytest.mark.slow
def test_settings_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are those of the tournament, and a star is said by its corrected p."""
    runs = load_all(SHIFT)
    every = tournament.comparisons(tournament.entries(runs), ACCURACY)
    every = every.set_index(["arm", "control"])
    rows = apart.differences(runs)
    assert [*zip(rows["arm"], rows["control"], strict=True)] == [*apart.PAIRS]
    for row in rows.to_dict("records"):
        assert row["difference"] == every["difference"][row["arm"], row["control"]]
        assert row["p_holm"] == every["p_holm"][row["arm"], row["control"]]
    fig, _ = apart.figure({"shift-smoke": rows, "again": rows}, runs[0], ACCURACY)
    for ax in fig.axes:
        assert ax.get_xlabel() == f"difference, {ACCURACY.unit}\nright: better"
        drawn = [bar.lines[0].get_xydata().tolist() for bar in ax.containers]
        assert drawn == [[[value, place]] for place, value in enumerate(rows["difference"])]
    assert fig.axes[1].get_title(loc="left") == "again"
    labels = [label.get_text() for label in fig.axes[0].get_yticklabels()]
    assert labels == [spoken(arm) for arm, _ in apart.PAIRS]
    paths = apart.main((SHIFT,), tmp_path)
    assert {path.name for path in paths} == {"events.png", "events.svg", "events.csv", "events.md"}
    words = (tmp_path / "events.md").read_text()
    assert words.count("*") == (rows["p_holm"] < 0.05).sum() > 0
    assert "shift-smoke" in capsys.readouterr().out


def test_no_setting_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "load_all", lambda path: [None])
    monkeypatch.setattr(apart, "differences", lambda runs: None)
    with pytest.raises(RecordError, match="another of the settings is called mine, too"):
        apart.main((tmp_path / "a/mine", tmp_path / "b/mine"), tmp_path)


def test_a_setting_without_the_arms_is_one_sentence() -> None:
    runs = [run for run in load_all(SHIFT) if run.name != "forced 3" and run.seed < 6002]
    with pytest.raises(RecordError, match=r"no runs for forced 3 - static, forced 3 - first"):
        apart.differences(runs)
