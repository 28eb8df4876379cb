"""Where figures mark that the learning rate falls, and critical windows (oracle: the rates of the
rows, arithmetic)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from synthetic import make

import regimes
from analysis.findings.sources import records
from regimes.base.config import OptimizerConfig, to_dict
from regimes.plotting import style
from regimes.plotting.groups import critical_windows, find_decays, group_runs
from regimes.records import Record, load_all
from regimes.training.learning_rate import LearningRate


@pytest.fixture
def run() -> Record:
    """24 epochs, decays at 12 and 20."""
    return copy.deepcopy(records("small")[0])


def axes() -> Axes:
    return style.figure(3).add_subplot()


def places(ax: Axes) -> list[float]:
    """Of the dotted lines that can be seen."""
    low, high = sorted(ax.get_xlim())
    dotted = [line for line in ax.lines if len({*line.get_xdata()}) == 1]
    found = [float(line.get_xdata()[0]) for line in dotted if line.get_visible()]
    return [x for x in found if low <= x <= high]


def words(ax: Axes) -> dict[float, str]:
    """What stands above them."""
    return {text.get_position()[0]: text.get_text() for text in ax.texts if text.get_visible()}


def curve(ax: Axes, first: int = 0, units: int = 24) -> None:
    ax.plot(range(first, units), range(first, units))


def image(ax: Axes) -> None:
    ax.imshow([list(range(24))], aspect="auto")


@pytest.mark.parametrize("draw", [curve, image])
@pytest.mark.parametrize("before", [True, False])
def test_every_decay_has_its_line_whenever_it_is_marked(
    run: Record, draw: Callable[[Axes], None], before: bool
) -> None:
    ax = axes()
    steps = [lambda: style.mark_decays(ax, run), lambda: draw(ax)]
    for step in steps if before else steps[::-1]:
        step()
    assert places(ax) == [11.5, 19.5]
    assert words(ax) == {11.5: "lr ÷ 10", 19.5: "lr ÷ 10"}


def test_a_decay_before_the_first_or_behind_the_last_measured_unit_has_its_line(
    run: Record,
) -> None:
    run.header["config"]["optimizer"]["decay_epochs"] = [2, 23]
    for before in (True, False):
        ax = axes()
        if before:
            style.mark_decays(ax, run)
        curve(ax, 6, 20)  # the readings of an instrument
        if not before:
            style.mark_decays(ax, run)
        assert places(ax) == [1.5, 22.5]


def test_a_decay_that_is_still_to_come_does_not_stretch_the_axis(run: Record) -> None:
    del run.rows[15:]
    for before in (True, False):
        ax = axes()
        if before:
            style.mark_decays(ax, run)
        curve(ax, units=15)
        if not before:
            style.mark_decays(ax, run)
        ax.figure.draw_without_rendering()
        assert places(ax) == [11.5]
        assert [*words(ax)] == [11.5]
        assert ax.get_xlim()[1] < 16


def test_a_factor_is_written_where_the_one_before_leaves_room(run: Record) -> None:
    run.header["config"]["optimizer"]["decay_epochs"] = [4, 6, 12]
    for before in (True, False):
        ax = axes()
        if before:
            style.mark_decays(ax, run)
        curve(ax)
        if not before:
            style.mark_decays(ax, run)
        ax.figure.draw_without_rendering()
        assert places(ax) == [3.5, 5.5, 11.5]
        assert [*words(ax)] == [3.5, 11.5]
    ax.set_xlim(3, 8)  # by hand: there is room for both
    assert [*words(ax)] == [3.5, 5.5]
    assert places(ax) == [3.5, 5.5]


@given(st.data())
def test_a_decay_is_marked_before_the_first_unit_that_begins_at_the_lower_rate(
    data: st.DataObject,
) -> None:
    """Also one within a unit, and one at the beginning of an epoch within it."""
    per_epoch = data.draw(st.integers(1, 12), "steps per epoch")
    unit = data.draw(st.none() | st.integers(1, 9), "steps per unit")
    size = unit or per_epoch
    inside = {"decay_steps": 23 * size, "decay_epochs": 23 * size // per_epoch}
    asked = {
        name: tuple(data.draw(st.lists(st.integers(1, most), max_size=3), name)) if most else ()
        for name, most in inside.items()
    }
    optimizer = OptimizerConfig(lr=1.0, per="step", decay_factor=2.0, **asked)
    rate = LearningRate(optimizer, per_epoch, total=24 * size)
    rates = [rate(size * i) for i in range(24)]  # the rows have that of a unit's first step
    fallen = {i: rates[i - 1] / rates[i] for i in range(1, 24) if rates[i] < rates[i - 1]}
    one = copy.deepcopy(records("small")[0])
    one.header["steps_per_epoch"] = per_epoch
    one.header["config"] |= {"optimizer": to_dict(optimizer), "unit_steps": unit}
    assert dict(find_decays(one)) == fallen


def test_decays_behind_the_end_of_a_run_are_none(run: Record) -> None:
    run.header["config"]["optimizer"] |= {"decay_epochs": [], "decay_steps": [12, 10**300]}
    run.header["config"]["unit_steps"] = 5
    assert find_decays(run) == [(3, 10.0)]


@pytest.mark.parametrize(
    "change", [{}, {"batch_policy": None}, {"batch_policy": {"name": "static"}}]
)
def test_the_name_of_a_schedule_alone_makes_no_window(change: Any, tmp_path: Path) -> None:
    for name in ("low", "small-in-critical"):
        make(tmp_path, name, 0, **change)
    assert critical_windows(group_runs(load_all(tmp_path))) == []


def test_critical_windows_are_grey_where_the_axis_has_units(tmp_path: Path) -> None:
    windows = [[0, 2], [4, 5]]
    for name in ("low", "low-in-critical"):
        make(tmp_path, name, 0, policy={"name": "windows", "windows": windows})
    runs = load_all(tmp_path)
    for against, wanted in (("epoch", [(-0.5, 1.5), (3.5, 4.5)]), ("floats", [])):
        (ax,) = regimes.plot(runs, against=against).axes
        spans = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
        assert [(round(s.x0, 6), round(s.x1, 6)) for s in spans] == wanted
