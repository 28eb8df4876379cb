"""Figure 2 and its table, against numbers recomputed by hand from the rows (oracle: arithmetic,
scipy)."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy import stats
from synthetic import EPOCHS, POLICIES, make

from analysis.common import compare
from analysis.common.names import PAPER
from analysis.paper import figure2
from regimes.base.errors import RecordError
from regimes.plotting import canvas
from regimes.plotting.looks import LOOKS, find_metric, order_schedules, style_of
from regimes.plotting.schedules import tabulate_schedules
from regimes.records import load_all, read_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in POLICIES:
        for seed in (0, 1, 2):
            make(root, name, seed)
    make(root, "of-my-own", 0)
    return root


def rows(folder: Path, name: str) -> list[list[dict[str, Any]]]:
    return [read_lines(folder / name / f"seed-{s}" / "epochs.jsonl") for s in (0, 1, 2)]


def test_norms_are_the_means_of_the_statistic_of_the_compressed_layers(folder: Path) -> None:
    _, numbers = figure2.figure2a(load_all(folder))
    assert list(numbers["layer"].unique()) == ["conv.weight", "head.weight"]
    for row in numbers.to_dict("records"):
        index = {"conv.weight": 0, "head.weight": 2}[row["layer"]]
        values = [
            run[row["epoch"]]["statistics"]["norm:update"][index] for run in rows(folder, "low")
        ]
        assert row["norm"] == pytest.approx(statistics.mean(values), rel=1e-12)


def test_levels_are_those_of_the_rows(folder: Path) -> None:
    _, numbers = figure2.level_map(load_all(folder), seed=2)
    assert len(numbers) == 3 * EPOCHS * 2
    for row in numbers.to_dict("records"):
        index = {"conv.weight": 0, "head.weight": 2}[row["layer"]]
        written = rows(folder, "accordion")[row["seed"]][row["epoch"]]
        assert row["level"] == written["layers"]["level"][index]
    with pytest.raises(RecordError, match="no 'accordion' run of seed 7"):
        figure2.level_map(load_all(folder), seed=7)


def last_three(run: list[dict[str, Any]]) -> float:
    return 100 * statistics.mean(r["metric"] for r in run[-3:])


def test_each_row_of_panels_marks_the_decay(folder: Path) -> None:
    """Before epoch 4, the first at a lower rate."""
    fig, _ = figure2.figure2b(load_all(folder))
    for half in fig.subfigs:
        upright = {
            float(line.get_xdata()[0])
            for line in half.axes[0].lines
            if list(line.get_ydata()) == [0, 1]
        }
        assert upright == {3.5}


@pytest.mark.parametrize("lowest", [0.8, 0.1])
def test_the_caption_says_that_values_are_left_out_where_they_are(
    lowest: float, tmp_path: Path
) -> None:
    for i, name in enumerate(POLICIES):
        path = make(tmp_path, name, 0) / "epochs.jsonl"
        lines = [row | {"metric": 0.8 + 0.01 * i} for row in read_lines(path)]
        lines[0]["metric"] = lowest
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    fig, drawn = figure2.figure2b(load_all(tmp_path))
    outside = drawn["accuracy"].min() < fig.axes[0].get_ylim()[0]
    assert outside == (lowest < 0.8)
    assert ("leave out the first epochs" in " ".join(fig.get_supxlabel().split())) == outside


def test_table_is_arithmetic_over_the_last_three_epochs(folder: Path) -> None:
    table, pairs = compare.table(load_all(folder))
    table = table.set_index("schedule")
    values = [last_three(run) for run in rows(folder, "high")]
    assert table.loc["high", "accuracy"] == pytest.approx(statistics.mean(values))
    assert table.loc["high", "sd"] == pytest.approx(statistics.stdev(values))
    sent = {
        name: statistics.mean(sum(r["floats"] for r in run) for run in rows(folder, name))
        for name in ("high", "low")
    }
    assert table.loc["high", "of_low"] == pytest.approx(sent["high"] / sent["low"])
    first = pairs.iloc[0]
    assert first["comparison"] == "low - high"
    a, b = ([last_three(run) for run in rows(folder, name)] for name in ("low", "high"))
    oracle = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert [first["ci_low"], first["ci_high"]] == pytest.approx([oracle.low, oracle.high])
    assert first["traffic_ratio"] == pytest.approx(sent["low"] / sent["high"])
    assert len(pairs) == 5  # low-early was not run


def test_n_is_that_of_the_mean_where_a_seed_has_no_value(tmp_path: Path) -> None:
    """In both tables of schedules: of three seeds one has diverged."""
    for name in ("low", "high"):
        for seed in range(3):
            make(tmp_path, name, seed)
    path = tmp_path / "high" / "seed-1" / "epochs.jsonl"
    lines = read_lines(path)
    lines[-1]["metric"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    runs, each = load_all(tmp_path), rows(tmp_path, "high")
    studied, shown = compare.table(runs, ()), tabulate_schedules(runs)
    for table in (compare.as_text(*studied)[0], shown.table(("n", "metric"))):
        counts = {row[0]: row[list(table.heads).index("n")] for row in table.rows}
        assert counts == {"low": "3", "high": "2 of 3"}
    mean = statistics.mean(last_three(each[seed]) for seed in (0, 2))
    assert shown.frame.loc["high", "metric"] == pytest.approx(mean)
    row = studied[0].set_index("schedule").loc["high"]
    assert (row["accuracy"], row["logged"]) == (pytest.approx(mean), 2)


def test_a_tie_is_not_above() -> None:
    each = pd.DataFrame(
        {
            "name": ["a", "b"] * 3,
            "seed": [0, 0, 1, 1, 2, 2],
            "floats": [2, 4] * 3,
            "accuracy": [90, 90, 91, 90, 80, 90],
        }
    )
    row = compare.compare_pair(each, "a", "b", find_metric("accuracy"))
    assert (row["positive"], row["n"], row["traffic_ratio"]) == (1, 3, 0.5)
    assert row["difference"] == pytest.approx(-3)


def test_traffic_is_compared_over_the_seeds_of_the_difference() -> None:
    """A third seed of one arm alone, which sends ten times as much."""
    each = pd.DataFrame(
        {
            "name": ["a", "a", "a", "b", "b"],
            "seed": [0, 1, 2, 0, 1],
            "floats": [10, 20, 200, 20, 40],
            "accuracy": [91, 91, 10, 90, 90],
        }
    )
    row = compare.compare_pair(each, "a", "b", find_metric("accuracy"))
    assert (row["n"], row["difference"], row["traffic_ratio"]) == (2, 1.0, 0.5)


@pytest.mark.parametrize("draw", [figure2.figure2b, compare.table])
def test_refuses_to_guess(folder: Path, tmp_path: Path, draw: Any) -> None:
    runs = load_all(folder)
    with pytest.raises(RecordError, match="no run of schedule high; found"):
        draw([run for run in runs if run.name != "high"])
    make(tmp_path, "low", 9, epochs=4)
    with pytest.raises(RecordError, match="has 4 of 6 epochs: finish it"):
        draw(runs + load_all(tmp_path))
    with pytest.raises(RecordError, match="are both 'low' runs of seed 0"):
        draw([*runs, next(run for run in runs if run.name == "low")])
    other = make(tmp_path / "other", "low", 8, batch_size=16)
    with pytest.raises(RecordError, match=r"low \(batch_size=16\).*not of the same experiment"):
        draw(runs + load_all(other))


def test_what_there_is_is_drawn(folder: Path, tmp_path: Path) -> None:
    """Low and high compression are enough; a half without a comparison is left out."""
    runs = [run for run in load_all(folder) if run.name in ("low", "high", "low-in-critical")]
    fig, drawn = figure2.figure2b(runs)
    assert {*drawn["schedule"]} == {"low", "high", "low-in-critical"}
    assert len(fig.subfigs) == 1
    assert len(figure2.figure2b(load_all(folder))[0].subfigs) == 2
    for run in runs:
        target = tmp_path / "runs" / run.name / f"seed-{run.seed}"
        shutil.copytree(run.folder, target)
    names = {path.name for path in figure2.main(tmp_path / "runs", tmp_path / "out")}
    assert {"figure2a.png", "figure2b.png"} <= names
    assert not any(name.startswith("levels") for name in names)


def test_a_column_has_each_half_by_itself_and_no_more_than_four_inches(
    folder: Path, tmp_path: Path
) -> None:
    with canvas.use_options(width=3.3, plain=True, formats=("png",)):
        names = {path.name for path in figure2.main(folder, tmp_path)}
        assert {"figure2b.png", "figure2b-damage.png"} <= names
        for half in (figure2.RECOVER, figure2.DAMAGE):
            fig, _ = figure2.figure2b(load_all(folder), half)
            assert fig.get_figheight() <= 4
            assert len(fig.axes) == 2


def test_no_common_seed(tmp_path: Path) -> None:
    for name in POLICIES:
        make(tmp_path, name, 1 if name == "high" else 0)
    with pytest.raises(RecordError, match="low and high have no seed in common"):
        compare.table(load_all(tmp_path))


def test_every_schedule_looks_different_in_grey() -> None:
    looks = list(LOOKS.values())
    assert len({look.marker for look in looks}) == len(looks)
    assert len({(json.dumps(look.dash), look.width) for look in looks}) == len(looks)
    assert style_of("mine").label == "mine"
    assert order_schedules(["mine", "high", "dense"]) == ["dense", "high", "mine"]


def test_a_tournaments_arms_are_the_papers_schedules_each_at_its_own_rate(tmp_path: Path) -> None:
    for i, (arm, name) in enumerate(PAPER.items()):
        rate = {"lr": 0.1 if i % 2 else 0.2, "decay_epochs": [4], "decay_factor": 10.0}
        policy = POLICIES.get(name, {"name": "static"})
        for seed in (0, 1, 2):
            make(tmp_path, arm, seed, optimizer=rate, policy=policy)
    make(tmp_path, "coin 6", 0)
    arms = load_all(tmp_path)
    runs = compare.schedules(arms)
    assert {run.name for run in runs} == {*PAPER.values()}
    drawn, numbers = figure2.figure2b(runs)
    by_hand = [row["metric"] for row in rows(tmp_path, "rank 4")[0]]
    (low,) = (run for run in runs if (run.name, run.seed) == ("low", 0))
    assert low.epochs["metric"].to_list() == by_hand
    assert set(numbers["schedule"]) == {*PAPER.values()} - {"high-stretched"}
    words = " ".join(drawn.get_supxlabel().split())
    assert "Learning rates: 0.1 (low compression;" in words
    assert ", 0.2 (dense (no compression);" in words
    assert compare.schedules([*arms, low]) == [*arms, low]  # of both: nothing is left out
    assert compare.schedules([run for run in arms if run.name != "rank 1"]) == [
        run for run in arms if run.name != "rank 1"
    ]
