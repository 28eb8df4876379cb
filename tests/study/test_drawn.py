"""Every figure that `regimes figure` offers, and every picture of a report, shows numbers of its
table, whose means lie within their intervals: made from committed records, and read again from what
is drawn (`drawn`)."""

from __future__ import annotations

import functools
import inspect
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import drawn
import numpy as np
import pandas as pd
import pytest
from drawn import Parts, colour_alone, complaints, misplaced
from intervals import interval_complaints
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.offsetbox import DrawingArea

from analysis.__main__ import commands, offers
from analysis.common import command
from analysis.cost.whatif import PricedRuns, Settings
from analysis.notebook import explorer
from analysis.paper import figures
from analysis.rates import quadratic
from regimes.base.config import DENSE
from regimes.cli.html_report import content, pictures
from regimes.plotting import canvas, style
from regimes.plotting.curves import tabulate_curves, tabulate_ends
from regimes.records import Record, archive, load, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
SEEDS = 3  # the least that have an interval
Frame = pd.DataFrame


@dataclass
class Made:
    """What a command has left: a figure with its table, and its other tables.

    Attributes:
        one: a run of those that it was made from; None: of none.
        configs: theirs, by schedule.
    """

    name: str
    figure: Figure
    table: Frame
    tables: dict[str, Frame] = field(default_factory=dict)
    one: Record = None  # type: ignore[assignment]
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)


def shares(made: Made) -> Frame:
    """Of layers at each level, of each seed and in the mean."""
    table = made.table
    found = [
        table.assign(of=level, share=100.0 * (table["level"] == level))
        .groupby(["of", "seed", "epoch"], as_index=False)["share"]
        .mean()
        for level in {*table["level"]} | {*made.one.config["levels"]}
    ]
    each = pd.concat(found)
    return pd.concat([each, each.groupby(["of", "epoch"], as_index=False)["share"].mean()])


def medians(made: Made) -> Frame:
    (steps,) = (rows for name, rows in made.tables.items() if name.endswith("-decided"))
    return steps.groupby(["schedule", "epoch"], as_index=False)[["batch", "lr"]].median()


def means(made: Made) -> Frame:
    return made.table.groupby(["rate", "arm", "epoch"], as_index=False)["product"].mean()


def percent(made: Made) -> Frame:
    return made.table.assign(value=100.0 * made.table["value"])


def ranges(made: Made) -> Frame:
    return made.tables["ranges"].melt("arm", ["usable_min", "best", "usable_max"])


SMALL = ("--dimension", "30", "--nonzero", "3", "--train", "200", "--draws", "3", "--trials", "50")
# name of the figure: its command, records, other words; what is drawn beside the rows of tables
CASES: dict[str, tuple[Any, ...]] = {
    "figure2a": ("2", "small"),
    "figure2b": ("2", "small"),
    "levels": ("levels", "small", (), shares),
    "figure3-low": ("3", "small-signals"),
    "figure4a-dense": ("4a", "small-overlap"),
    "figure5": ("5", "small-batch", (), medians),
    "figure8": ("8", "small-budget"),
    "figure11": ("11", "lstm-small"),
    "agreement": ("agreement", "detection-signals-smoke"),
    "controls": ("controls", "smoke-controls"),
    "cost": ("cost", "small"),
    "criticality": ("criticality", "harm-lm"),
    "curves": ("curves", "lm-demo"),
    "bands": ("detectors", "small-signals"),
    "equal-epochs": ("equal-epochs", None),
    "edge": ("edge", "rates-edge", (), means),
    "lasso": ("lasso", None, SMALL),
    "law": ("law", "harm-lm"),
    "mechanism": ("mechanism", "rates-lm", (), ranges),
    "narrowing": ("narrowing", "rates-when"),
    "quadratic": ("quadratic", None),
    "onset": ("onset", "harm-lm"),
    "published": ("published", None, (), percent),
    "rivals": ("rivals", "smoke-rivals"),
    "tournament": ("tournament", "falling-lm"),
    "signals": ("signals", "small-signals/low/seed-1000"),
}
WORDS = {"levels": (0,)}  # axes whose cells are words
TABLES = {  # that a command leaves beside the figure's
    **dict.fromkeys(("figure2a", "figure2b"), "differences table"),
    **{
        name: f"{name}-differences {name}-table"
        for name in ("figure8", "figure11", "controls", "curves")
    },
    "figure5": "figure5-differences figure5-table figure5-decided",
    "figure3-low": "figure3-low-detectors figure3-low-pairs",
    "agreement": "agreement-detectors agreement-pairs",
    "criticality": "criticality-against-dull criticality-onsets criticality-pulses "
    "criticality-recovery criticality-runs criticality-scores criticality-scores-by-seed",
    "equal-epochs": "equal-epochs-clocks",
    "law": "law-exponents law-pulses",
    "mechanism": "ranges",
    "narrowing": "largest",
    "tournament": "arms differences timings",
}


# -- records and commands --------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _runs_are_parsed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "load", functools.cache(archive.load))
        yield


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An archive's runs of the first seeds, as a folder of its name: a fifth of the time."""
    root = tmp_path_factory.mktemp("few")

    @functools.cache
    def folder(name: str) -> Path:
        with tarfile.open(REFERENCE / f"{name}.tar.xz") as packed:
            of = {m: int(found[1]) for m in packed if (found := re.search(r"seed-(\d+)/", m.name))}
            first = sorted({*of.values()})[:SEEDS]
            packed.extractall(root / name, [m for m in of if of[m] in first], filter="data")
        return root / name

    return folder


def fewer_limits() -> Frame:
    """Of `quadratic.table`, the rows of two momenta and two levels: a second in place of ten."""
    rows = pd.concat([quadratic.lines((0.0, 0.9), (1, 4)), quadratic.points((0.0, 0.9), (DENSE,))])
    rows = rows.reset_index(drop=True)
    return rows.assign(of_dense=quadratic.of_dense(rows))


@pytest.fixture
def make(
    few: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Made]]:
    """The figures of a command, in place of their files."""

    def call(name: str, source: str | None, *words: str) -> list[Made]:
        made: list[Made] = []
        tables: dict[str, Frame] = {}
        place = few(source.partition("/")[0]) / source.partition("/")[2] if source else None
        headers = sorted(place.rglob("run.json")) if place else []
        configs = [json.loads(path.read_text())["config"] for path in headers]
        known = {config["name"]: config for config in configs}
        one = load(headers[0].parent) if headers else None

        def save(figure: Figure, stem: Path, table: Frame) -> list[Path]:
            made.append(Made(stem.name, figure, table, tables, one, known))
            return []

        def keep(_: Any, name: str, rows: Frame) -> None:
            tables[name] = rows

        monkeypatch.setattr(style, "save", save)
        monkeypatch.setattr(quadratic, "table", fewer_limits)
        monkeypatch.setattr(command.Files, "table", keep)
        offers()[name].start([*([str(place)] if place else []), *words, "--out", str(tmp_path)])
        return made

    return call


# -- the figures -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_is_in_the_table(name: str, make: Callable[..., list[Made]]) -> None:
    """And a line whose last point is moved is seen."""
    offer, source, words, *more = (*CASES[name], ())[: max(3, len(CASES[name]))]
    (made,) = (one for one in make(offer, source, *words) if one.name == name)
    assert {*made.tables} == {*TABLES.get(name, "").split()}
    tables = [made.table, *made.tables.values(), *(also(made) for also in more)]
    assert complaints(made.figure, tables, WORDS.get(name, ())) == []
    assert [said for rows in tables for said in interval_complaints(rows)] == []
    assert misplaced(made.figure) == []
    answers(name, made.figure)
    assert name in SHADED or colour_alone(made.figure) == []
    for line in [line.artist for ax in made.figure.axes for line in Parts.of(ax).lines][:1]:
        x = np.array(line.get_xdata(), float)  # type: ignore[attr-defined]
        line.set_xdata([*x[:-1], x[-1] + 1e-3 * (abs(x[-1]) or 1.0)])  # type: ignore[attr-defined]
        assert complaints(made.figure, tables, WORDS.get(name, ()))


PLAIN = ("figure2b", "figure3-low", "figure5", "figure8", "figure11", "curves")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plain"), [*((n, False) for n in CASES), *((n, True) for n in PLAIN)]
)
def test_at_one_column_texts_have_room_and_lines_are_told_apart_in_grey(
    name: str, plain: bool, make: Callable[..., list[Made]]
) -> None:
    """Without its texts it is four inches high at most; a panel has room for two ticks."""
    offer, source, words, *_ = (*CASES[name], ())[: max(3, len(CASES[name]))]
    with canvas.use_options(width=3.3, plain=plain):
        (made,) = (one for one in make(offer, source, *words) if one.name == name)
        with style.theme():
            canvas.complete_labels(made.figure)
            assert misplaced(made.figure) == []
    width, height = made.figure.get_size_inches()
    assert width == 3.3
    assert height <= (canvas.PLAIN_HIGHEST if plain else canvas.HIGHEST)
    panels = [ax for ax in made.figure.axes if ax.get_label() != "<colorbar>"]
    assert min(ax.get_position().height for ax in panels) * height >= 0.35
    assert name in SHADED or colour_alone(made.figure) == []


def test_one_drawing_is_read_back(make: Callable[..., list[Made]]) -> None:
    """Each layer's rows are a line that looks as the legend says of its name; the decays of the
    rate and the hand-made window stand where the record has them."""
    (made,) = (one for one in make("2", "small") if one.name == "figure2a")
    (ax,), table = made.figure.axes, made.table[made.table["norm"] > 0]
    looks = {
        text.get_text(): drawn.entry(box.get_children())
        for legend in drawn.legends(made.figure)
        for text, box in zip(legend.get_texts(), legend.findobj(DrawingArea), strict=True)
    }
    layers = [layer for layer in made.one.header["layers"] if layer["compressed"]]
    lines = Parts.of(ax).lines
    assert len(layers) == len(lines) == len({*table["layer"]}) > 3
    for layer in layers:
        words = f"{layer['name'].removesuffix('.weight')}  {'×'.join(map(str, layer['shape']))}"
        (line,) = (one for one in lines if looks[words].fits(one.seen))
        rows = table[table["layer"] == layer["name"]][["epoch", "norm"]]
        np.testing.assert_allclose(line.points, rows.sort_values("epoch"), rtol=1e-9)
    marked = [float(line.get_xdata()[0]) for line in drawn.uprights(ax)]  # type: ignore[index]
    assert marked == [first - 0.5 for first in fallen(made.one)] != []
    shaded = [
        patch.get_path().transformed(patch.get_patch_transform()).get_extents().intervalx
        for patch in ax.patches
        if to_hex(patch.get_facecolor()) == "#ececec"
    ]
    windows = made.configs["low-in-critical"]["policy"]["windows"]
    np.testing.assert_allclose(shaded, [[a - 0.5, b - 0.5] for a, b in windows])


def fallen(run: Record) -> list[int]:
    """The units that are the first at a lower rate, by the rates of its rows after the warm-up."""
    rates = [row["lr"] for row in run.rows]
    return [i for i in range(1, len(rates)) if rates[i] < 0.9 * rates[i - 1]]


NEUTRAL = {  # nothing in them is better or worse
    *("figure2a", "levels", "figure3-low", "figure4a-dense", "bands", "lasso", "signals"),
    *("criticality", "edge"),
}


SHADED = ("figure2a", "criticality")  # light to dark, in the order of layers or onsets


def answers(name: str, figure: Figure) -> None:
    """An axis says which way is better."""
    labels = [f"{ax.get_xlabel()} {ax.get_ylabel()}" for ax in figure.axes]
    said = " ".join([*labels, figure.get_supylabel()])
    assert name in NEUTRAL or re.search(r"better|agrees more", said), f"{name}: which is better?"


@pytest.mark.slow
def test_every_offered_figure_is_one_of_these() -> None:
    """Numbers of the paper by the module and the options that draw them."""
    ways = {name: (command.module.partition(".")[2],) for name, command in commands().items()}
    ways |= {number: (f.module, *f.options) for number, f in figures.FIGURES.items()}
    tested = {ways[offer] for offer, *_ in CASES.values()}
    for way in {ways[offer] for offer in offers()}:
        module = next(c for c in commands().values() if c.module.endswith(f".{way[0]}"))
        if "files.figure(" in inspect.getsource(inspect.getmodule(module.main)):
            assert way in tested or way in {one[:1] for one in tested}


# -- reports and the explorer ----------------------------------------------------------------


@pytest.mark.slow
def test_the_pictures_of_a_report_are_the_curves(
    few: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their captions are text of the page."""
    kept: dict[str, tuple[Figure, str]] = {}

    def keep(figure: Figure, title: str, caption: str) -> pictures.Picture:
        kept[title] = figure, caption
        return pictures.Picture(title, caption)

    monkeypatch.setattr(pictures, "_draw_picture", keep)
    study = content.read_study(few("small-adaqs"), few("small-adaqs"))
    pictures.draw_pictures(study)
    maps = [title for title in kept if title.startswith("Levels of")]
    assert {*kept} - {*maps} == {
        "Test accuracy against epoch",
        "Test accuracy against floats",
        "Traffic per epoch",
        "What detectors say",
    }
    for title, shown in (
        ("Test accuracy against epoch", study.metric),
        ("Test accuracy against floats", study.metric),
        ("Traffic per epoch", pictures.TRAFFIC),
    ):
        figure, words = kept[title]
        tables = [make(study.groups, shown) for make in (tabulate_curves, tabulate_ends)]
        assert complaints(figure, tables) == misplaced(figure) == []
        assert "n = 3 seeds" in " ".join(words.split())
    names = ("low", *pictures.adaptive_schedules(study))
    runs = [run for name in study.groups for run in study.groups[name] if name in names]
    table = pictures.draw_detectors(runs, pictures.detect.bench_detectors(runs))[1]
    figure, words = kept["What detectors say"]
    assert complaints(figure, [table]) == []
    assert "replayed over the runs" in " ".join(words.split())


def test_the_picture_of_the_explorer_is_its_answer(few: Callable[[str], Path]) -> None:
    study = PricedRuns(load_all(few("small-adaqs")))
    seed = min(seed for name, seed in study.runs if name == "accordion")
    chosen = Settings("accordion", seed)
    answer = study.answer(chosen)
    figure = explorer.figure(study, chosen, answer)
    assert complaints(figure, [answer.bands], (1,)) == []  # the cells of the other are words
    words = " ".join(figure.get_supxlabel().split())
    assert "n = 1" in words
    assert f"accordion, seed {seed}" in words
