"""How figures come out: files, fonts, width, text beside them (oracle: the files themselves)."""

from __future__ import annotations

import inspect
import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import drawn
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import regimes
from analysis.findings.sources import records
from analysis.paper import figure18_20
from regimes.base.errors import ConfigError
from regimes.plotting import canvas, looks, offered, style
from regimes.plotting.words import add_headline, label_ends

TITLE, CAPTION = "Rank 4 ends 0.2 bits lower", "Left: curves. Right: ends. Mean over n = 3 seeds."


def two_panels() -> Figure:
    with style.theme():
        fig = style.figure(3.3)
        left, right = fig.subplots(1, 2, sharey=True, width_ratios=[2, 1])
        left.plot([0, 1, 2], [1, 2, 3], label="rank 4")
        left.plot([0, 1, 2], [3, 1, 2], label="a schedule with a long name")
        right.errorbar([0.5], [2.0], [0.3])
        left.set_ylabel("test bits per byte")
        right.set_xlabel("floats sent")
        left.set_title("what all schedules have reached after each of the epochs", loc="left")
        fig.legend(loc="outside upper left", ncols=3)
        add_headline(fig, TITLE)
        style.add_caption(fig, CAPTION)
    return fig


def saved(folder: Path, **changes: Any) -> tuple[Figure, dict[str, bytes]]:
    with canvas.use_options(**{"formats": ("svg",), **changes}):
        fig = two_panels()
        paths = style.save(fig, folder / "shown", pd.DataFrame({"a": [1.0]}))
    return fig, {path.suffix: path.read_bytes() for path in paths}


def test_files_have_fonts_that_journals_take_and_text_as_text(tmp_path: Path) -> None:
    _, files = saved(tmp_path, formats=("png", "svg", "pdf"))
    assert files.keys() == {".png", ".svg", ".pdf", ".csv"}
    assert b"/Type3" not in files[".pdf"]
    assert b"/CIDFontType2" in files[".pdf"]  # TrueType: "Type 42"
    words = " ".join(re.findall(r"<text[^>]*>([^<]+)", files[".svg"].decode()))
    assert "test bits per byte" in words
    assert "rank 4" in words
    again = saved(tmp_path / "again", formats=("png", "svg"))[1]
    assert again == {kind: file for kind, file in files.items() if kind != ".pdf"}


def test_a_plain_figure_has_its_texts_beside_it(tmp_path: Path) -> None:
    fig, files = saved(tmp_path, plain=True)
    drawn = " ".join(text.get_text() for text in fig.findobj(Text))
    assert "Rank 4 ends" not in drawn
    assert "Mean over" not in drawn
    assert files[".txt"].decode() == f"{TITLE}\n\n{CAPTION}\n"
    assert ".txt" not in saved(tmp_path / "whole")[1]


def test_a_narrow_figure_stands_in_one_column_and_within_its_width(tmp_path: Path) -> None:
    fig, files = saved(tmp_path, width=3.3, plain=True)
    assert fig.get_figwidth() == 3.3
    assert fig.get_figheight() <= canvas.HIGHEST
    above, below = fig.axes
    assert below.get_position().y1 < above.get_position().y0
    assert below.get_ylabel() == above.get_ylabel()
    box = fig.get_tightbbox()
    assert box.x0 > -0.02
    assert box.x1 < 3.32
    assert files[".txt"].decode().startswith(f"{TITLE}\n\nAbove: curves. Below: ends.")


def one_panel(width: float, headline: str, caption: str) -> canvas.Canvas:
    with canvas.use_options(width=width), style.theme():
        fig = style.figure(3.0)
        fig.add_subplot().plot([0, 1], [0, 1])
        add_headline(fig, headline)
        style.add_caption(fig, caption)
        fig.draw_without_rendering()
    return fig


def test_a_narrow_figure_grows_by_the_lines_of_its_texts_up_to_a_page() -> None:
    texts = "much is said " * 12, "and much explained " * 20
    narrow, wide = (one_panel(width, *texts) for width in (3.3, style.WIDTH))
    heights = [fig.axes[0].get_position().height * fig.get_figheight() for fig in (narrow, wide)]
    assert heights[0] == pytest.approx(heights[1], abs=0.2)
    assert wide.get_figheight() == 3.0 < narrow.get_figheight() < canvas.HIGHEST
    assert drawn.misplaced(narrow) == []
    few = one_panel(3.3, "a", "b")
    assert few.get_figheight() == 3.0
    few.make_room(1000, 7)
    assert few.get_figheight() == canvas.HIGHEST


def test_panels_that_share_their_columns_axis_stand_together_in_one_column() -> None:
    with canvas.use_options(width=3.3), style.theme():
        fig = style.figure(3.0)
        axes = fig.subplots(2, 2, sharex="col", sharey="row", height_ratios=[3, 1])
        for i, ax in enumerate(axes.flat):
            ax.plot([0, 1 + i % 2], [0, 1 + i])
        fig.draw_without_rendering()
    downwards = sorted(axes.flat, key=lambda ax: -ax.get_position().y0)
    assert downwards == [axes[0, 0], axes[1, 0], axes[0, 1], axes[1, 1]]
    assert axes[0, 0].get_ylim() == axes[0, 1].get_ylim() != axes[1, 0].get_ylim()
    assert axes[0, 0].get_xlim() == axes[1, 0].get_xlim() != axes[0, 1].get_xlim()
    assert axes[0, 0].get_position().height > 2 * axes[1, 1].get_position().height


def test_names_at_the_ends_of_lines_are_a_legend_where_panels_are_stacked() -> None:
    names = {"rank 4": 1.0, "a schedule whose name is longer than a column is wide, and more": 2.0}
    ends = [
        (1.0, y, name, looks.Look(name, "black", marker=m))
        for (name, y), m in zip(names.items(), "os", strict=True)
    ]
    for width, legends in ((3.3, 1), (7.2, 0)):
        with canvas.use_options(width=width), style.theme():
            fig = style.figure(3.0)
            ax = fig.add_subplot()
            ax.plot([0, 1], [1, 2])
            label_ends(ax, ends)
            assert len(fig.legends) == legends
            assert drawn.misplaced(fig) == []
        if legends:
            listed = [text.get_text() for text in fig.legends[0].get_texts()]
            assert [text.replace("\n", " ") for text in listed] == [*names][::-1]  # as the ends lie


@pytest.mark.parametrize("width", [None, 3.3])
def test_a_height_that_is_asked_for_stays(tmp_path: Path, width: float | None) -> None:
    fig, _ = saved(tmp_path, width=width, height=2.5)
    assert fig.get_figheight() == 2.5
    fig.make_room(100, 7)
    assert fig.get_figheight() == 2.5


@pytest.mark.parametrize("width", [None, 3.3])
def test_one_panel_alone_has_its_labels(tmp_path: Path, width: float | None) -> None:
    whole, _ = saved(tmp_path / "whole", width=width)
    labels = [(ax.get_xlabel(), whole.axes[0].get_ylabel()) for ax in whole.axes]
    for number in (1, 2):
        fig, _ = saved(tmp_path / str(number), width=width, panel=number)
        (ax,) = fig.axes
        assert (ax.get_xlabel(), ax.get_ylabel()) == labels[number - 1]
        assert points(ax) == points(whole.axes[number - 1])
        assert any(label.get_text() for label in ax.get_yticklabels())
        assert fig.get_figheight() <= whole.get_figheight()
    assert len(saved(tmp_path / "more", panel=3)[0].axes) == 2


def test_one_panel_alone_of_those_that_share_both_axes_has_both_labels(tmp_path: Path) -> None:
    for number in range(1, 5):
        with canvas.use_options(panel=number):
            fig = style.figure(3)
            axes = fig.subplots(2, 2, sharex="col", sharey="row")
            for i, ax in enumerate(axes.flat):
                ax.plot([0, 1], [0, i])
            for i in range(2):
                axes[1, i].set_xlabel(f"x of column {i}")
                axes[i, 0].set_ylabel(f"y of row {i}")
            style.save(fig, tmp_path / str(number), pd.DataFrame({"a": [1.0]}))
        (ax,) = fig.axes
        row, column = divmod(number - 1, 2)
        assert (ax.get_xlabel(), ax.get_ylabel()) == (f"x of column {column}", f"y of row {row}")


def test_options_end_with_their_block(tmp_path: Path) -> None:
    saved(tmp_path, width=3.3)
    assert canvas.current_options() == canvas.Options()
    assert two_panels().get_figwidth() == style.WIDTH


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--width", "wide"], "--width = 'wide'"),
        (["--width", "0.5"], "--width = 0.5"),
        (["--format", "gif"], "--format = 'gif'"),
        (["--height", "0.5"], "--height = 0.5"),
        (["--panel", "two"], "--panel = 'two'"),
        (["--panel", "0"], "--panel = 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        canvas.Options(**offered.take_print_options(words)[0])


def points(ax: Axes) -> list[Any]:
    return [np.asarray(line.get_xydata()).tolist() for line in ax.lines]


@pytest.mark.parametrize("options", [{}, {"column": "train_loss", "against": "floats"}])
def test_curves_are_drawn_into_axes_of_ones_own(options: dict[str, Any]) -> None:
    done_runs = records("lm-demo")
    fig, (first, second) = plt.subplots(1, 2)
    assert regimes.plot(done_runs, ax=second, **options) is fig
    assert not first.lines
    alone = regimes.plot(done_runs, **options).axes[0]
    assert points(second) == points(alone)
    assert second.get_legend() is not None
    plt.close(fig)


def test_a_figure_has_its_numbers_and_saves_itself(tmp_path: Path) -> None:
    """`regimes.plot` returns matplotlib's figure, the study's functions a pair as before."""
    plot = regimes.plot(records("lm-demo"))
    fig, numbers = drawing = figure18_20.level_map(records("lm-demo"))
    assert (drawing.figure, drawing.data) == (fig, numbers)
    assert drawing._repr_png_().startswith(b"\x89PNG")
    with canvas.use_options(formats=("svg",)):
        for one in (plot, drawing):
            paths = one.save(tmp_path / "mine")  # type: ignore[attr-defined]
            assert [path.name for path in paths] == ["mine.svg", "mine.csv"]
            assert len(pd.read_csv(paths[-1])) == len(one.data)  # type: ignore[attr-defined]
    (alone,) = drawing.save(tmp_path / "own.pdf")
    assert alone.read_bytes().startswith(b"%PDF")
    assert {*plot.data["schedule"]} == {run.name for run in records("lm-demo")}  # type: ignore[attr-defined]


@pytest.mark.parametrize("height", [1.2, 6.0])
@pytest.mark.parametrize("decades", [0.5, 1.5, 3.0, 11.0])
def test_ticks_of_a_logarithmic_axis_are_several_and_apart(height: float, decades: float) -> None:
    fig = style.figure(height)
    ax = fig.add_subplot()
    ax.plot([0, 1], [0.03, 0.03 * 10**decades])
    style.log_axis(ax)
    fig.draw_without_rendering()
    low, high = ax.get_ylim()
    ticks = [tick for tick in ax.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [tick.label1.get_window_extent() for tick in ticks]
    assert len(boxes) >= (2 if decades > 0.5 else 1)
    for below, above in pairwise(boxes):
        assert below.y1 <= above.y0


def test_a_saved_picture_has_200_pixels_an_inch() -> None:
    """As users get it: ``conftest`` lets all other tests draw coarser ones."""
    fig = style.figure(1.5)
    fig.add_subplot()
    render = inspect.unwrap(style.render_figure)
    with Image.open(io.BytesIO(render(fig, "png"))) as picture:
        assert picture.width == pytest.approx(200 * fig.get_size_inches()[0], abs=1)
        assert picture.info["dpi"][0] == pytest.approx(200, rel=1e-3)
