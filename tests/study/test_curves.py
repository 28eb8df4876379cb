"""The shared curves, the batch and level figures and the list of figures, against numbers
recomputed by hand from the rows (oracle: arithmetic, scipy)."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from scipy import stats
from synthetic import EPOCHS, make

from analysis.common import command, compare
from analysis.paper import batch, curves, figure18_20, figures
from regimes.base.errors import ConfigError, RecordError
from regimes.plotting import looks, panels, style
from regimes.plotting.groups import find_decays
from regimes.plotting.looks import LEVELS, styles_of
from regimes.plotting.words import spoken_name
from regimes.presets import GRIDS
from regimes.records import Record, load_all, read_lines

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "small.tar.xz"


def edit(folder: Path, **changes: Any) -> None:
    """Change a header, or a configuration in it."""
    path = folder / "run.json"
    header = json.loads(path.read_text())
    header["config"] |= changes.pop("config", {})
    path.write_text(json.dumps({**header, **changes}))


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return load_all(REFERENCE)


@pytest.fixture
def uneven(tmp_path: Path) -> list[Record]:
    """Two schedules; the longer one's seeds end after 6, 5 and 4 epochs, their budget spent."""
    for seed in (0, 1, 2):
        make(tmp_path, "low", seed)
        edit(make(tmp_path, "high-longer", seed, epochs=EPOCHS - seed), budget=1)
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
    fig, _ = curves.figure(uneven)
    text = fig._supxlabel.get_text().replace("\n", " ")  # type: ignore[attr-defined]
    low = [sum(r["floats"] for r in run.rows) for run in uneven if run.name == "low"]
    share = np.mean(sent) / np.mean(low)
    assert f"{share:.2f} of low's floats: 4 to 6 epochs; the curve goes as far" in text


def test_equal_runs_end_where_their_curve_does(runs: list[Record]) -> None:
    found = compare.group_runs(runs)
    last = curves.tabulate_curves(found).groupby("schedule").last()
    columns = ["accuracy", "ci_low", "ci_high", "floats", "seconds"]
    ends = curves.tabulate_ends(found).set_index("schedule").loc[last.index]
    pd.testing.assert_frame_equal(last[columns], ends[columns])
    assert ends.loc["dense-deleted", "epoch"] == 17  # of other lengths than the rest


def test_perplexity_is_shown_as_it_is(tmp_path: Path) -> None:
    """Everywhere: curves, table, Markdown, axis."""
    for name in ("low", "high"):
        for seed in (0, 1):
            edit(make(tmp_path, name, seed), metric="perplexity")
    runs = load_all(tmp_path)
    fig, numbers = curves.figure(runs)
    low = [run.rows[2]["metric"] for run in runs if run.name == "low"]
    drawn = numbers[(numbers["schedule"] == "low") & (numbers["epoch"] == 2)]
    assert drawn["perplexity"].iloc[0] == pytest.approx(np.mean(low))
    assert fig.axes[0].get_ylabel() == "test perplexity\nlower is better"
    rows, pairs = compare.table(runs, needed=())
    three = [np.mean([r["metric"] for r in run.rows[-3:]]) for run in runs if run.name == "low"]
    assert rows.set_index("schedule").loc["low", "perplexity"] == pytest.approx(np.mean(three))
    first, second = compare.as_text(rows, pairs)
    assert first.heads == ("schedule", "n", "perplexity", "floats (M)", "of low")
    assert second.heads[2] == "perplexity"


@pytest.mark.parametrize(("high", "scale"), [(900.0, "log"), (150.0, "linear")])
def test_a_wide_range_of_perplexities_is_logarithmic(high: float, scale: str) -> None:
    fig = style.figure(2)
    ax = fig.add_subplot()
    panels.set_limits(
        ax, pd.DataFrame({"perplexity": [100.0, high]}), looks.find_metric("perplexity")
    )
    assert ax.get_yscale() == scale


def test_another_column(runs: list[Record]) -> None:
    fig, numbers = curves.figure(runs, column="test_loss", schedules=["low", "high"], x=["floats"])
    row = numbers[(numbers["schedule"] == "high") & (numbers["epoch"] == 3)].iloc[0]
    values = [run.rows[3]["test_loss"] for run in runs if run.name == "high"]
    assert row["test_loss"] == pytest.approx(np.mean(values))
    assert set(numbers["schedule"]) == {"low", "high"}
    assert [ax.get_ylabel() for ax in fig.axes] == ["test loss (nats)\nlower is better"]


def test_what_cannot_be_drawn(runs: list[Record]) -> None:
    with pytest.raises(RecordError, match="no 'f1': choose one of accuracy, train_loss, test_loss"):
        curves.figure(runs, column="f1")
    with pytest.raises(RecordError, match="no run of schedule adaqs; found dense, low, high, acc"):
        curves.figure(runs, schedules=["low", "adaqs"])


def test_other_schedules_may_be_unfinished(tmp_path: Path) -> None:
    make(tmp_path, "low", 0)
    make(tmp_path, "high", 0, epochs=2)
    runs = load_all(tmp_path)
    assert set(curves.figure(runs, schedules=["low"])[1]["schedule"]) == {"low"}
    with pytest.raises(RecordError, match="has 2 of"):
        curves.figure(runs)


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
MANY |= {"lost-time-lm", "lost-time-sgd", "lost-time-cosine"}


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


@pytest.fixture
def batches(tmp_path: Path) -> list[Record]:
    for name, first in (("small-batch", 8), ("smith", 10)):
        for seed in (0, 1):
            rule = {"name": "smith" if name == "smith" else "static"}
            dense = {"name": "static", "level": "dense"}
            folder = make(
                tmp_path,
                name,
                seed,
                batch_size=first,
                batch_levels={"x1": first},
                batch_policy=rule,
                policy=dense,
            )
            lines = read_lines(folder / "epochs.jsonl")
            for row in lines:
                row["batch_size"] = first * (5 if name == "smith" and row["epoch"] >= 4 else 1)
            text = "".join(json.dumps(row) + "\n" for row in lines)
            (folder / "epochs.jsonl").write_text(text)
    return load_all(tmp_path)


def test_batch_sizes_are_those_of_all_workers(batches: list[Record]) -> None:
    """And runs that start with another batch size are of one setting."""
    fig, numbers = batch.figure(batches)
    steps = batch.decided(compare.group_runs(batches))
    smith = steps[(steps["schedule"] == "smith") & (steps["seed"] == 1)]
    assert smith["batch"].tolist() == [40] * 4 + [200] * 2
    assert set(steps[steps["schedule"] == "small-batch"]["batch"]) == {32}
    assert list(steps.index) == list(range(len(steps)))
    assert [ax.get_ylabel() for ax in fig.axes][2:] == ["samples per step", "learning rate"]
    labels = [label.get_text() for label in fig.axes[2].get_yticklabels()]
    assert labels == ["32", "200"]  # 40 has no room
    assert set(numbers["part"]) == {"curve", "end"}
    text = fig._supxlabel.get_text().replace("\n", " ")  # type: ignore[attr-defined]
    assert "Smith et al. (2017): batch per worker (x1\xa0=\xa010), no compression" in text


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
    "changed",
    [
        {"batch_size": 16},
        {"workers": 8},
        {"compressor": {"name": "topk"}, "levels": {"low": 99, "high": 25}},
        {"sync_policy": {"name": "static", "level": "h"}, "sync_levels": {"h": 4}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_schedules_that_differ_in_method_are_arms_unless_a_figure_needs_some(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path, "low", 0)
    make(tmp_path, "high", 0, **changed)
    assert {*compare.group_runs(load_all(tmp_path))} == {"low", "high"}
    if "sync_levels" not in changed:
        with pytest.raises(RecordError, match=f"differ in {next(iter(changed))}"):
            compare.group_runs(load_all(tmp_path), ["low", "high"])


@pytest.mark.parametrize("table", ["data", "model"])
def test_schedules_of_other_data_or_models_are_refused(table: str, tmp_path: Path) -> None:
    make(tmp_path, "low", 0)
    path = make(tmp_path, "high", 0) / "run.json"
    header = json.loads(path.read_text())
    changed = {"data": {"digest": "0" * 8}, "model": {"name": "other"}}[table]
    (header["data"] if table == "data" else header["config"]["model"]).update(changed)
    path.write_text(json.dumps(header))
    with pytest.raises(RecordError, match=f"differ in {table}"):
        compare.group_runs(load_all(tmp_path))


def test_a_fixed_batch_stands_beside_a_decided_one_but_not_beside_another_fixed_one(
    tmp_path: Path,
) -> None:
    make(tmp_path, "accordion", 0, batch_size=4, batch_policy={"name": "smith"})
    make(tmp_path, "low", 0)
    found = compare.group_runs(load_all(tmp_path), ["accordion", "low"])
    assert {*found} == {"accordion", "low"}
    make(tmp_path, "high", 0, batch_size=16)
    with pytest.raises(RecordError, match=r"(high|low)/seed-0 differ in batch_size"):
        compare.group_runs(load_all(tmp_path), ["accordion", "low", "high"])


def test_a_ladder_of_levels_is_coloured_by_what_it_sends(tmp_path: Path) -> None:
    """Light to dark; the bottom panel has a line for each level but the first."""
    per_step = {n: {"floats": k, "bytes": 4 * k} for n, k in {"a": 9, "b": 1, "c": 3}.items()}
    edit(make(tmp_path, "adaqs", 0, levels={"a": 4, "b": 1, "c": 2}), per_step=per_step)
    run = load_all(tmp_path)[0]
    colours = figure18_20.level_palette(run, ["a", "b", "c"])
    assert list(colours) == ["b", "c", "a"]
    assert len(set(colours.values())) == 3
    two = figure18_20.level_palette(run, ["low", "high"])
    assert two == {"high": LEVELS["high"], "low": LEVELS["low"]}
    fig, numbers = figure18_20.level_map(load_all(tmp_path), "adaqs")
    assert len(numbers) == 2 * EPOCHS
    words = [text.get_text() for text in fig.legends[0].get_texts()]
    assert words[:1] == ["high compression"]
    assert {"b (rank 1)", "c (rank 2)", "a (rank 4)"} < set(words)


# -- the list of figures ---------------------------------------------------------------------

PAPER = ["1", "2", "3", "4a", "4b", *map(str, range(5, 21))]


def test_every_figure_of_the_paper_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [number for number in figures.FIGURES if number[0].isdigit()] == PAPER
    assert figures.main() == []
    printed = capsys.readouterr().out
    assert all(f"\n{number} " in printed for number in PAPER)


@pytest.mark.parametrize("number", figures.FIGURES)
def test_its_grids_exist_and_have_its_schedules(number: str) -> None:
    figure = figures.FIGURES[number]
    for grid in figure.small + figure.paper:
        assert grid in GRIDS, f"figure {number} names the grid {grid}, which presets do not have"
        assert set(figure.schedules) <= set(GRIDS[grid]()), grid
    known = {name for grid in figure.small + figure.paper for name in GRIDS[grid]()}
    assert set(figure.also) <= known
    module = importlib.import_module(f"analysis.paper.{figure.module}")
    takes = inspect.signature(module.main).parameters
    assert {*figure.options, *(["schedules"] if figure.schedules else [])} <= set(takes)


def test_many_curves_are_thin_and_without_bands(runs: list[Record]) -> None:
    """Nine against six; the intervals stand at their ends in both."""
    names = list(compare.group_runs(runs))
    widths = {}
    for chosen, bands in ((names, 0), (names[:6], 6)):
        fig, _ = curves.figure(runs, schedules=chosen, x=("epoch",))
        ax = fig.axes[0]
        assert len([c for c in ax.collections if isinstance(c, PolyCollection)]) == bands
        assert len(ax.containers) == len(chosen)  # bars
        widths[len(chosen)] = {line.get_label(): line.get_linewidth() for line in ax.lines}
        words = " ".join(fig.get_supxlabel().split())
        assert ("; bars: 95 % t interval" in words) == (not bands)
        assert ("; bands and bars: 95 % t interval" in words) == bool(bands)
    label = spoken_name(names[0], next(run for run in runs if run.name == names[0]).config)
    assert widths[9][label] < widths[6][label]


def test_two_seeds_have_no_interval_in_figure_or_text(runs: list[Record]) -> None:
    two = [run for run in runs if run.seed < min(run.seed for run in runs) + 2]
    fig, numbers = curves.figure(two, schedules=["low", "high"])
    assert numbers[numbers["part"] == "curve"]["n"].unique().tolist() == [2]
    assert numbers["ci_low"].isna().all()
    assert "fewer than three seeds, so no interval" in fig.get_supxlabel().replace("\n", " ")


def test_bad_figures() -> None:
    with pytest.raises(ConfigError, match="no figure '4': did you mean '4"):
        figures.main("4")
    with pytest.raises(
        ConfigError,
        match="seeds 5`, then `regimes figure 8 runs/small-budg",
    ):
        figures.main("8")
    with pytest.raises(RecordError, match="no run of schedule high-longer; found dense"):
        figures.main("8", (REFERENCE,))


def test_figures_of_two_records_of_one_name_are_not_written_over_each_other(tmp_path: Path) -> None:
    for place in ("a", "b"):
        make(tmp_path / place / "runs", "accordion", 0)
    places = [tmp_path / place / "runs" for place in ("a", "b")]
    with pytest.raises(RecordError, match="another of the records is called runs, too"):
        figures.main("18", (*places,), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("small.tar.xz", "small"),
        ("v0.4.tar.xz", "v0.4"),
        ("v0.4.tgz", "v0.4"),
        (".small.tar", ".small"),
        ("small", "small"),
    ],
)
def test_the_name_of_an_archive_is_without_its_kind_alone(
    file: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("")
    assert command.name_of(tmp_path / file) == name
    (tmp_path / "folder.of.runs").mkdir()
    assert command.name_of(tmp_path / "folder.of.runs") == "folder.of.runs"


def test_the_caption_names_the_schedules_trained_at_another_rate() -> None:
    runs = load_all(REFERENCE.with_name("lm-small-tuned.tar.xz"))
    fig, _ = curves.figure(runs, schedules=("dense", "low", "high"))
    said = " ".join(fig.get_supxlabel().split())
    assert "rank 4 and rank 1: learning rate 0.003, in place of 0.006." in said


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


@pytest.mark.parametrize("metric", ["accuracy", "test_loss", "perplexity"])
def test_an_interval_that_is_wider_than_all_curves_is_inside(metric: str) -> None:
    fig, ax = plt.subplots()
    last = pd.DataFrame({metric: [51.0], "ci_low": [40.0], "ci_high": [60.0]})
    numbers = pd.DataFrame({metric: [50.0, 51.0, 52.0]})
    assert not panels.set_limits(ax, numbers, looks.find_metric(metric), last)
    bottom, top = ax.get_ylim()
    assert bottom < 40
    assert top > 60
    plt.close(fig)


def test_a_number_that_no_axis_has_room_for_is_left_to_the_axis() -> None:
    fig, ax = plt.subplots()
    panels.set_limits(ax, pd.DataFrame({"accuracy": [50.0, math.inf]}), looks.METRICS["accuracy"])
    assert np.isfinite(ax.get_ylim()).all()
    plt.close(fig)
