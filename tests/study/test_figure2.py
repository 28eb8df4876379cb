"""Figure 2 and its table, against numbers recomputed by hand from the rows (oracle: arithmetic,
scipy)."""

from __future__ import annotations

import itertools
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from drawn import uprights
from matplotlib.figure import Figure
from scipy import stats
from synthetic import EPOCHS, POLICIES, make

from analysis.common import compare
from analysis.common.names import PAPER
from analysis.paper import figure2
from regimes.base.errors import RecordError
from regimes.plotting import canvas, style
from regimes.plotting.looks import find_metric
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
    for name, seed in itertools.product(("low", "high"), range(3)):
        lost = EPOCHS - 1 if (name, seed) == ("high", 1) else None
        broken = {"change": lambda row, at=lost: {"metric": None} if row["epoch"] == at else {}}
        make(tmp_path, name, seed, **broken)
    runs, each = load_all(tmp_path), rows(tmp_path, "high")
    studied, shown = compare.table(runs, ()), tabulate_schedules(runs)
    for table in (compare.as_text(*studied)[0], shown.table(("n", "metric"))):
        counts = {row[0]: row[list(table.heads).index("n")] for row in table.rows}
        assert counts == {"low": "3", "high": "2 of 3"}
    mean = statistics.mean(last_three(each[seed]) for seed in (0, 2))
    assert shown.frame.loc["high", "metric"] == pytest.approx(mean)
    row = studied[0].set_index("schedule").loc["high"]
    assert (row["accuracy"], row["logged"]) == (pytest.approx(mean), 2)


def test_a_pair_is_of_the_common_seeds_and_a_tie_is_not_above() -> None:
    """A third seed of one arm alone sends ten times as much."""
    for names, seeds, floats, accuracy, expected in (
        ("ababab", (0, 0, 1, 1, 2, 2), [2, 4] * 3, [90, 90, 91, 90, 80, 90], (1, 3, 0.5, -3)),
        ("aaabb", (0, 1, 2, 0, 1), [10, 20, 200, 20, 40], [91, 91, 10, 90, 90], (2, 2, 0.5, 1)),
    ):
        columns = {"name": [*names], "seed": seeds, "floats": floats, "accuracy": accuracy}
        row = compare.compare_pair(pd.DataFrame(columns), "a", "b", find_metric("accuracy"))
        found = row["positive"], row["n"], row["traffic_ratio"], row["difference"]
        assert found == pytest.approx(expected)


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


def test_what_there_is_is_drawn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low and high compression are enough; a half without a comparison is left out. In a column
    each half stands by itself, no higher than four inches."""
    drawn: dict[str, Figure] = {}

    def save(figure: Figure, stem: Path, table: pd.DataFrame) -> list[Path]:
        drawn[stem.name] = figure
        return []

    monkeypatch.setattr(style, "save", save)
    names = ["low", "high", "low-in-critical"]
    runs = [run for run in load_all(folder) if run.name in names]
    for run in runs:
        shutil.copytree(run.folder, tmp_path / run.name / f"seed-{run.seed}")
    figure2.main(tmp_path, tmp_path)
    assert {*drawn} == {"figure2a", "figure2b"}
    assert len(drawn["figure2b"].subfigs) == 1
    for lowest in (0.8, 0.1):  # in the first epoch
        each = []
        for run in runs:
            metrics = [lowest, *[0.8 + 0.01 * names.index(run.name)] * (EPOCHS - 1)]
            rows = [row | {"metric": x} for row, x in zip(run.rows, metrics, strict=True)]
            each.append(replace(run, rows=rows))
        figure, table = figure2.figure2b(each)
        assert {*table["schedule"]} == {*names}
        outside = 100 * lowest < figure.axes[0].get_ylim()[0]
        assert outside == (lowest == 0.1)
        assert ("leave out the first epochs" in " ".join(figure.get_supxlabel().split())) == outside
        marked = [float(line.get_xdata()[0]) for line in uprights(figure.axes[0])]
        assert marked == [3.5]  # before epoch 4, the first at a lower rate
    with canvas.use_options(width=3.3, plain=True):
        figure2.main(folder, tmp_path)
    for name in ("figure2b", "figure2b-damage"):
        assert drawn[name].get_figheight() <= 4
        assert len(drawn[name].axes) == 2


def test_a_tournaments_arms_are_the_papers_schedules_each_at_its_own_rate(tmp_path: Path) -> None:
    for i, (arm, name) in enumerate(PAPER.items()):
        rate = {"lr": 0.1 if i % 2 else 0.2, "decay_epochs": [4], "decay_factor": 10.0}
        make(tmp_path, arm, 0, optimizer=rate, policy=POLICIES.get(name, {"name": "static"}))
    make(tmp_path, "coin 6", 0)
    arms = load_all(tmp_path)
    runs = compare.schedules(arms)
    assert {run.name for run in runs} == {*PAPER.values()}
    (low,) = (run for run in runs if run.name == "low")
    written = read_lines(tmp_path / "rank 4" / "seed-0" / "epochs.jsonl")
    assert low.epochs["metric"].to_list() == [row["metric"] for row in written]
    drawn, numbers = figure2.figure2b(runs)
    assert {*numbers["schedule"]} == {*PAPER.values()} - {"high-stretched"}
    words = " ".join(drawn.get_supxlabel().split())
    assert "Learning rates: 0.1 (low compression;" in words
    for others in ([*arms, low], [run for run in arms if run.name != "rank 1"]):
        assert compare.schedules(others) == others  # of both, or not all: nothing is left out
