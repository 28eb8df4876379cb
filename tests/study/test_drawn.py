"""Every figure that `regimes figure` offers, and every picture of a report, is what its table says:
made from committed records, and read again from what is drawn (`drawn`)."""

from __future__ import annotations

import inspect
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drawn
import numpy as np
import pandas as pd
import pytest
from drawn import Image, Shown, colour_alone, complaints, misplaced
from matplotlib.figure import Figure
from shown import (
    CASES,
    Frame,
    Made,
    curve_panels,
    detector_bands,
    fallen,
    layers_of,
    lemma,
    level_map,
)

from analysis.__main__ import commands, offers
from analysis.common import command
from analysis.common.compare import norms
from analysis.cost.whatif import PricedRuns, Settings
from analysis.lasso import lasso
from analysis.lasso.numbers import Setting
from analysis.notebook import explorer
from analysis.paper import figures
from analysis.rates import quadratic
from regimes.config import DENSE
from regimes.plotting import style
from regimes.plotting.curves import tabulate_curves, tabulate_ends
from regimes.plotting.looks import style_of
from regimes.plotting.panels import tabulate_levels
from regimes.plotting.words import names_of
from regimes.records import load, load_all
from regimes.report import content, pictures

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
SEEDS = 3  # the least that have an interval


# -- records and commands --------------------------------------------------------------------


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An archive's runs of the first seeds, as a folder of its name: a fifth of the time."""
    root = tmp_path_factory.mktemp("few")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            with tarfile.open(REFERENCE / f"{name}.tar.xz") as archive:
                members = archive.getmembers()
                seeds = sorted(
                    {int(found[1]) for m in members if (found := re.search(r"seed-(\d+)/", m.name))}
                )
                kept = [
                    m
                    for m in members
                    if int(m.name.split("seed-")[1].split("/")[0]) in seeds[:SEEDS]
                ]
                archive.extractall(root / name, members=kept, filter="data")
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

        monkeypatch.setattr(style, "save_figure", save)
        monkeypatch.setattr(quadratic, "table", fewer_limits)
        monkeypatch.setattr(
            command.Files, "table", lambda _, name, rows: tables.__setitem__(name, rows)
        )
        offers()[name].start([*([str(place)] if place else []), *words, "--out", str(tmp_path)])
        return made

    return call


# -- the figures -----------------------------------------------------------------------------


def check(shown: Shown) -> None:
    """It is drawn as its table says, and damages to it are seen."""
    wrong = "\n".join([*complaints(shown), *misplaced(shown.figure)])
    assert not wrong, wrong
    for words, do, undo in damages(shown):
        do()
        assert complaints(shown), f"{words}, which is not seen"
        undo()
    assert not complaints(shown)


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_is_the_table(name: str, make: Callable[..., list[Made]]) -> None:
    offer, source, words, expected = CASES[name]
    (made,) = (one for one in make(offer, source, *words) if one.name == name)
    check(expected(made))
    answers(name, made.figure)
    assert name in SHADED or colour_alone(made.figure) == []


NEUTRAL = {  # nothing in them is better or worse
    *("figure2a", "levels", "figure3-low", "figure4a-dense", "bands", "lasso", "signals"),
    *("criticality", "edge"),
}


SHADED = ("figure2a", "criticality")  # light to dark, in the order of layers or onsets


def answers(name: str, figure: Figure) -> None:
    """Its title is a sentence, and an axis says which way is better."""
    assert len(drawn.title(figure).split()) >= 6, f"{name}: {drawn.title(figure)!r} is no answer"
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


# -- damages ---------------------------------------------------------------------------------

Damage = tuple[str, Callable[[], object], Callable[[], object]]
EACH = 2  # artists of a kind in a figure that are damaged


def damages(shown: Shown) -> Iterator[Damage]:
    """What makes a figure lie, one at a time, and how it is undone."""
    axes = [ax for ax in shown.figure.axes if ax.get_label() != "<colorbar>"]
    parts = [part for part, ax in zip(shown.parts, shown.figure.axes, strict=True) if ax in axes]
    kinds = {
        kind.rstrip("s"): [part.artist for each in parts for part in getattr(each, kind)]
        for kind in ("lines", "bars", "bands")
    }
    kinds["image"] = [image for ax in axes for image in ax.images]
    along = [ax for ax in axes if shown.decays and drawn.along(ax, shown.unit)]
    kinds["decay"] = [line for ax in along for line in drawn.uprights(ax)]
    for kind, found in kinds.items():
        for one in found[:: math.ceil(len(found) / EACH) or 1]:
            yield f"a {kind} is gone", *hidden(one)
            if kind == "line":
                yield "a line is moved", *moved(one)
    for legend in drawn.legends(shown.figure)[:EACH]:
        first, *_, last = legend.get_texts() if len(legend.get_texts()) > 1 else (None, None)
        if first is not None:
            yield "two labels are swapped", *swapped(first, last)
            yield "a legend is gone", *hidden(legend)
    ends = drawn.names(shown.figure)
    if len(ends) > 1:
        yield "two names are swapped", *swapped(ends[0], ends[-1])
        yield "a name is gone", *hidden(ends[0])
    words = next(ax.get_xlabel() for ax in axes if ax.axison and ax.get_xlabel())
    alike = [ax.xaxis.label for ax in axes if ax.get_xlabel() == words]
    yield (
        "an axis has no label",
        lambda: [label.set_text("") for label in alike],
        lambda: [label.set_text(words) for label in alike],
    )


def hidden(artist: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: artist.set_visible(False), lambda: artist.set_visible(True)


def moved(line: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Its last point, by a thousandth."""
    before = np.array(line.get_ydata(), float)
    last = np.flatnonzero(np.isfinite(before))[-1]
    after = before.copy()
    after[last] += 1e-3 * (abs(after[last]) or 1.0)
    return lambda: line.set_ydata(after), lambda: line.set_ydata(before)


def swapped(a: Any, b: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    first, second = a.get_text(), b.get_text()
    return (
        lambda: (a.set_text(second), b.set_text(first)),
        lambda: (a.set_text(first), b.set_text(second)),
    )


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
    one, metric = study.example, study.metric
    for title, against, shown in (
        ("Test accuracy against epoch", "epoch", metric),
        ("Test accuracy against floats", "floats", metric),
        ("Traffic per epoch", "epoch", pictures.TRAFFIC),
    ):
        figure, words = kept[title]
        parts = {
            "curve": tabulate_curves(study.groups, shown),
            "end": tabulate_ends(study.groups, shown),
        }
        table = pd.concat([rows.assign(part=part) for part, rows in parts.items()])
        check(
            Shown(
                figure,
                table,
                curve_panels(table, (against,), names=names_of(study.groups)),
                words,
                ["n = 3 seeds"],
                decays=fallen(one),
                cut=(0,),
            )
        )
    for title in maps:
        figure, words = kept[title]
        name = next(
            n for n in study.groups if style_of(n).label == title.removeprefix("Levels of ")
        )
        made = Made(title, figure, tabulate_levels(study.groups[name]), one=study.groups[name][0])
        check(level_map(made, words=words, says=["n = 3 seeds"]))
    figure, words = kept["What detectors say"]
    names = ("low", *pictures.adaptive_schedules(study))
    runs = [run for name in study.groups for run in study.groups[name] if name in names]
    table = pictures.draw_detectors(runs, pictures.detect.bench(runs))[1]
    made = Made("bands", figure, table, one=one)
    check(detector_bands(made, words=words, says=["replayed over the runs"]))


def test_the_picture_of_the_explorer_is_its_answer(few: Callable[[str], Path]) -> None:
    study = PricedRuns(load_all(few("small-adaqs")))
    seed = min(seed for name, seed in study.runs if name == "accordion")
    chosen = Settings("accordion", seed)
    answer = study.answer(chosen)
    run = study.runs["accordion", seed]
    names = {layer["name"]: words for layer, words in layers_of(run)}
    made = Made("explorer", explorer.figure(study, chosen, answer), answer.levels, one=run)
    check(
        made.shown(
            [
                Image(0, lambda _: answer.bands),
                Image(1, lambda table: table, names.__getitem__, "{} compression".format),
            ],
            says=["n = 1", f"accordion, seed {seed}"],
        )
    )


# -- a network, and a reading ----------------------------------------------------------------


def test_a_network_below_the_lasso_is_its_rows(
    few: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made readings: no committed record has any."""
    values = np.random.default_rng(0).uniform(0.1, 0.9, (len(SERIES), 24))
    rows = [
        ("moments", name, epoch, 3, x, x - 0.05, x + 0.1)
        for name, line in zip(SERIES, values, strict=True)
        for epoch, x in enumerate(line)
    ]
    network = pd.DataFrame(rows, columns=["panel", "series", "x", "n", "mean", "ci_low", "ci_high"])
    monkeypatch.setattr(lasso, "network", lambda runs: network)
    runs = [run for run in load_all(few("small-adaqs")) if run.name == "low"]
    runs[0].details.append({"family": "moments", "gradients": 12, "gradient": "batch of 16"})
    figure, table = lasso.lasso(Setting(30, 3, train=200, draws=3, trials=50), runs)
    check(lemma(Made("lasso", figure, table, one=runs[0])))


SERIES = (*lasso.SHARES, *lasso.PLACES)


def test_the_norm_rises_after_each_decay_as_notebook_2_reads_it(few: Callable[[str], Path]) -> None:
    """In each layer, by a third at least, and falls in the epoch behind it."""
    runs = [run for run in load_all(few("small")) if run.name == "low"]
    norm = norms(runs).pivot(index="epoch", columns="layer", values="norm")
    assert fallen(runs[0]) == [12, 20]
    for first in fallen(runs[0]):
        assert (norm.loc[first] > 1.3 * norm.loc[first - 1]).all()
        assert (norm.loc[first + 1] < norm.loc[first]).all()
    notebook = (REFERENCE.parents[1] / "notebooks" / "2-critical-regimes.ipynb").read_text()
    assert "and *rises* after each decay" in notebook
