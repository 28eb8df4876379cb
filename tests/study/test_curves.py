"""The shared curves, the batch and level figures and the list of figures, against numbers
recomputed by hand from the rows (oracle: arithmetic, scipy)."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import EPOCHS, make

from analysis.common import command, compare
from analysis.paper import batch, curves, figure18_20, figures
from regimes.base.errors import ConfigError, RecordError
from regimes.plotting import looks, panels, style
from regimes.plotting.groups import find_decays
from regimes.plotting.looks import LEVELS, styles_of
from regimes.presets import GRIDS
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "small.tar.xz"


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return load_all(REFERENCE)


@pytest.fixture
def uneven(tmp_path: Path) -> list[Record]:
    """Two schedules; the longer one's seeds end after 6, 5 and 4 epochs, their budget spent."""
    for seed in (0, 1, 2):
        make(tmp_path, "low", seed)
        make(tmp_path, "high-longer", seed, epochs=EPOCHS - seed, header={"budget": 1})
    return load_all(tmp_path)


# -- numbers ---------------------------------------------------------------------------------


def test_curves_are_the_rows(runs: list[Record]) -> None:
    """Metric, floats and seconds of one epoch, by hand."""
    found = compare.group_runs(runs)
    row = curves.tabulate_curves(found).set_index(["schedule", "epoch"]).loc[("accordion", 7)]
    mine = [run for run in runs if run.name == "accordion"]
    metric = [100 * run.rows[7]["metric"] for run in mine]
    ends = stats.t.interval(0.95, 4, np.mean(metric), stats.sem(metric))
    got = row[["accuracy", "ci_low", "ci_high"]].to_list()
    assert got == pytest.approx([np.mean(metric), *ends])
    floats = [sum(r["floats"] for r in run.rows[:8]) for run in mine]
    assert row["floats"] == pytest.approx(np.mean(floats))
    clock = [run.epochs.loc[:7, list(curves.CLOCK)].to_numpy().sum() for run in mine]
    assert row["seconds"] == pytest.approx(np.mean(clock))


def test_a_curve_goes_as_far_as_all_seeds_and_the_end_is_each_seeds_own(
    uneven: list[Record],
) -> None:
    found = compare.group_runs(uneven)
    numbers, last = curves.tabulate_curves(found), curves.tabulate_ends(found).set_index("schedule")
    longer = [run for run in uneven if run.name == "high-longer"]
    assert numbers[numbers["schedule"] == "high-longer"]["epoch"].max() == 3
    assert (numbers["n"] == 3).all()
    ends = [100 * run.rows[-1]["metric"] for run in longer]
    sent = [sum(r["floats"] for r in run.rows) for run in longer]
    row = last.loc["high-longer"]
    assert row["accuracy"] == pytest.approx(np.mean(ends))
    oracle = stats.t.interval(0.95, 2, np.mean(sent), stats.sem(sent))
    assert [row["floats"], row["floats_ci_low"], row["floats_ci_high"]] == pytest.approx(
        [np.mean(sent), *oracle]
    )
    assert row["epoch"] == 4


def test_a_column_is_shown_in_the_unit_of_its_metric(tmp_path: Path) -> None:
    """Perplexity as it is, in figure and table; of the schedules that are asked for, of which
    others may be unfinished."""
    for name in ("low", "high"):
        for seed in (0, 1):
            make(tmp_path, name, seed, header={"metric": "perplexity"})
    runs = load_all(tmp_path)
    low = [run.rows for run in runs if run.name == "low"]
    last = [np.mean([row["metric"] for row in each[-3:]]) for each in low]
    table, _ = compare.table(runs, needed=())
    assert table.set_index("schedule").loc["low", "perplexity"] == pytest.approx(np.mean(last))
    make(tmp_path, "mid", 0, epochs=2)
    for column, key in ((None, "perplexity"), ("test_loss", "test_loss")):
        shown = {"schedules": ["low"], "x": ["epoch"], **({"column": column} if column else {})}
        _, numbers = curves.figure(load_all(tmp_path), **shown)
        assert {*numbers["schedule"]} == {"low"}
        row = numbers[(numbers["part"] == "curve") & (numbers["epoch"] == 2)].iloc[0]
        name = "metric" if key == "perplexity" else key
        assert row[key] == pytest.approx(np.mean([each[2][name] for each in low]))
        assert math.isnan(row["ci_low"])  # of two seeds
    with pytest.raises(RecordError, match="has 2 of"):
        curves.figure(load_all(tmp_path))


def test_what_cannot_be_drawn(runs: list[Record], tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no 'f1': choose one of accuracy, train_loss, test_loss"):
        curves.figure(runs, column="f1")
    with pytest.raises(RecordError, match="no run of schedule adaqs; found dense, low, high, acc"):
        curves.figure(runs, schedules=["low", "adaqs"])
    with pytest.raises(ConfigError, match="no figure '4': did you mean '4"):
        figures.main("4")
    with pytest.raises(ConfigError, match="seeds 5`, then `regimes figure 8 runs/small-budg"):
        figures.main("8")
    with pytest.raises(RecordError, match="no run of schedule high-longer; found dense"):
        figures.main("8", (REFERENCE,))
    places = [tmp_path / place / "runs" for place in ("a", "b")]  # would be one file
    for place in places:
        make(place, "accordion", 0)
    with pytest.raises(RecordError, match="another of the records is called runs, too"):
        figures.main("18", (*places,), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_name_of_an_archive_is_without_its_kind_alone(tmp_path: Path) -> None:
    for file in ("small.tar.xz", "v0.4.tar.xz", "v0.4.tgz", ".small.tar", "small"):
        (tmp_path / file).write_text("")
    found = [command.name_of(path) for path in sorted(tmp_path.iterdir())]
    assert found == [".small", "small", "small", "v0.4", "v0.4"]
    (tmp_path / "folder.of.runs").mkdir()
    assert command.name_of(tmp_path / "folder.of.runs") == "folder.of.runs"


def test_the_limits_of_an_axis_hold_what_is_drawn() -> None:
    """An interval that is wider than all curves; not a number that no axis has room for; a wide
    range of perplexities is logarithmic."""
    last = pd.DataFrame({"accuracy": [51.0], "ci_low": [40.0], "ci_high": [60.0]})
    for metric, values, ends, scale in (
        ("accuracy", [50.0, 51.0, 52.0], last, "linear"),
        ("test_loss", [50.0, 52.0], last.rename(columns={"accuracy": "test_loss"}), "linear"),
        ("accuracy", [50.0, math.inf], None, "linear"),
        ("perplexity", [100.0, 900.0], None, "log"),
        ("perplexity", [100.0, 150.0], None, "linear"),
    ):
        ax = style.figure(2).add_subplot()
        panels.set_limits(ax, pd.DataFrame({metric: values}), looks.find_metric(metric), ends)
        bottom, top = ax.get_ylim()
        assert np.isfinite([bottom, top]).all()
        assert ends is None or bottom < 40 < 60 < top
        assert ax.get_yscale() == scale


def test_records_of_before_and_after_a_new_default_are_of_one_setting(tmp_path: Path) -> None:
    """A field of the data that an old record does not have yet is as its default."""
    make(tmp_path, "low", 0)
    make(tmp_path, "high", 0, data={"name": "digits", "sequence": 35, "augment": False})
    assert len(compare.group_runs(load_all(tmp_path))) == 2
    make(tmp_path / "other", "dense", 0, data={"name": "digits", "augment": True})
    with pytest.raises(RecordError, match="differ in data"):
        compare.group_runs(load_all(tmp_path))


def test_everything_is_compared_once(tmp_path: Path) -> None:
    """The pairs of the paper first, then all others; of more than six schedules, each with the
    baseline."""
    names = ["rank 4", "rank 2", "rank 1", "accordion 4-1", "accordion 4-2"]
    for name in names:
        make(tmp_path, name, 0)
    rows, pairs = compare.table(load_all(tmp_path), needed=(), all_pairs=True)
    paper = ["accordion 4-1 - rank 2", "accordion 4-2 - accordion 4-1"]
    assert list(pairs["comparison"])[:2] == paper
    assert len({frozenset(text.split(" - ")) for text in pairs["comparison"]}) == len(pairs) == 10
    assert rows.set_index("schedule").loc["rank 4", "of_low"] == 1.0
    assert compare.as_text(rows, pairs)[0].heads[-1] == "of rank 4"
    for name in ("a", "b"):
        make(tmp_path, name, 0)
    _, pairs = compare.table(load_all(tmp_path), needed=(), all_pairs=True)
    base = [f"{name} - rank 4" for name in (*names[1:], "a", "b")]
    assert sorted(pairs["comparison"]) == sorted([*paper, *base])
    _, pairs = compare.table(load_all(tmp_path), needed=(), baseline="a")
    assert sorted(pairs["comparison"]) == sorted(f"{name} - a" for name in (*names, "b"))


MANY = {"harm-cyclic", "harm-cyclic-1800k", "harm-cyclic-460k", "harm-dip", "harm-dip-460k"}
MANY |= {"lost-time-lm", "lost-time-sgd", "lost-time-cosine", "switch-lm"}


def test_schedules_of_one_grid_look_different() -> None:
    """In colour and marker, so in grey as well; also those that the table does not know."""
    for grid in sorted(g for g in GRIDS if not g.startswith("rates-")):
        looks = list(styles_of(GRIDS[grid]()).values())
        if grid in MANY:  # more than there are looks: their figures draw some, by --where and --arm
            assert len(looks) > 22
            continue
        assert len({str(look.marker) for look in looks}) == len(looks), grid
        assert len({look.label for look in looks}) == len(looks), grid


# -- batch sizes and levels ------------------------------------------------------------------


def test_batch_sizes_are_those_of_all_workers(tmp_path: Path) -> None:
    """And runs that start with another batch size are of one setting."""
    for name, first, rule, later in (
        ("small-batch", 8, "static", 8),
        ("smith", 10, "smith", 50),
    ):
        policy = {"policy": {"name": "static", "level": "dense"}, "batch_policy": {"name": rule}}
        sizes = {"batch_size": first, "batch_levels": {"x1": first}}
        by_row = {"change": lambda row, of=(first, later): {"batch_size": of[row["epoch"] >= 4]}}
        make(tmp_path, name, 0, **sizes, **policy, **by_row)
    batches = load_all(tmp_path)
    fig, numbers = batch.figure(batches)
    steps = batch.decided(compare.group_runs(batches))
    assert steps[steps["schedule"] == "smith"]["batch"].tolist() == [40] * 4 + [200] * 2
    assert {*steps[steps["schedule"] == "small-batch"]["batch"]} == {32}
    assert {*numbers["part"]} == {"curve", "end"}
    labels = [label.get_text() for label in fig.axes[2].get_yticklabels()]
    assert labels == ["32", "200"]  # 40 has no room


def test_the_thick_line_of_a_batch_is_the_median_of_its_seeds() -> None:
    """In the committed records all seeds decide alike."""
    sizes = {0: (8, 8, 8), 1: (8, 32, 128)}  # of an epoch, by seed
    rows = [
        ("smith", seed, epoch, size)
        for epoch, each in sizes.items()
        for seed, size in enumerate(each)
    ]
    ax = style.figure(2).add_subplot()
    batch._step(ax, pd.DataFrame(rows, columns=["schedule", "seed", "epoch", "batch"]), "batch")
    *thin, thick = [list(line.get_ydata()) for line in ax.lines]
    assert (thin, thick) == ([[8, 8], [8, 32], [8, 128]], [8, 32])


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"workers": 8}, "workers"),
        ({"compressor": {"name": "topk"}, "levels": {"low": 99, "high": 25}}, "compressor"),
        ({"sync_policy": {"name": "static", "level": "h"}, "sync_levels": {"h": 4}}, None),
        ({"batch_size": 4, "batch_policy": {"name": "smith"}}, None),  # decided, beside a fixed one
        ({"batch_size": 16}, "batch_size"),
        ({"model": {"name": "other"}}, "model"),
    ],
    ids=str,
)
def test_schedules_that_differ_in_method_are_arms_unless_a_figure_needs_some(
    changed: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    """Of other data or models they are refused either way."""
    make(tmp_path, "low", 0)
    make(tmp_path, "high", 0, **changed)
    runs = load_all(tmp_path)
    if refused != "model":
        assert {*compare.group_runs(runs)} == {"low", "high"}
    if refused:
        with pytest.raises(RecordError, match=f"differ in {refused}"):
            compare.group_runs(runs, ["low", "high"])
    else:
        assert {*compare.group_runs(runs, ["low", "high"])} == {"low", "high"}
    header = runs[0].header | {"data": {**runs[0].header["data"], "digest": "0" * 8}}
    with pytest.raises(RecordError, match=r"differ in (data|model)"):
        compare.group_runs([replace(runs[0], header=header), *runs[1:]])


def test_a_ladder_of_levels_is_coloured_by_what_it_sends(tmp_path: Path) -> None:
    """Light to dark."""
    per_step = {n: {"floats": k, "bytes": 4 * k} for n, k in {"a": 9, "b": 1, "c": 3}.items()}
    levels = {"a": 4, "b": 1, "c": 2}
    make(tmp_path, "adaqs", 0, levels=levels, header={"per_step": per_step})
    run = load_all(tmp_path)[0]
    colours = figure18_20.level_palette(run, ["a", "b", "c"])
    assert list(colours) == ["b", "c", "a"]
    assert len(set(colours.values())) == 3
    two = figure18_20.level_palette(run, ["low", "high"])
    assert two == {"high": LEVELS["high"], "low": LEVELS["low"]}


# -- the list of figures ---------------------------------------------------------------------


def test_every_figure_of_the_paper_is_listed_with_grids_that_have_its_schedules() -> None:
    paper = ["1", "2", "3", "4a", "4b", *map(str, range(5, 21))]
    assert [number for number in figures.FIGURES if number[0].isdigit()] == paper
    for number, figure in figures.FIGURES.items():
        known = {grid: {*GRIDS[grid]()} for grid in figure.small + figure.paper}
        assert all({*figure.schedules} <= names for names in known.values()), number
        assert {*figure.also} <= {name for names in known.values() for name in names}, number
        module = importlib.import_module(f"analysis.paper.{figure.module}")
        takes = inspect.signature(module.main).parameters
        assert {*figure.options, *(["schedules"] if figure.schedules else [])} <= {*takes}, number


def test_decays_in_one_epoch_are_one(runs: list[Record]) -> None:
    run = copy.deepcopy(runs[0])
    optimizer = run.header["config"]["optimizer"]
    for epochs, expected in (
        ([12, 12, 20], [(12, 100.0), (20, 10.0)]),
        ([1] * 1000, [(1, math.inf)]),
    ):
        optimizer["decay_epochs"] = epochs
        assert find_decays(run) == expected
    optimizer["decay_factor"] = None  # as a stranger's record may have it
    assert find_decays(run) == [(1, 1.0)]
