"""Titles and names of figures (oracle: differences of a few written numbers)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st
from titled import LEVELS, groups

from regimes.plotting import looks, style, words
from regimes.plotting.said import MeanInterval
from regimes.records import RecordWriter, load_all

BITS = looks.find_metric("bits per byte")
POINTS = looks.find_metric("accuracy")


def said(found: Any, shown: looks.Metric) -> str:
    return words.write_answer(found, shown, words.names_of(found)).replace("\xa0", " ")


@pytest.mark.parametrize(
    ("every", "metrics", "ends"),
    [
        (1, [0.1, 0.2, 0.3, 0.4], "30.0 %"),
        (2, [None, 0.2, None, 0.4, None, 0.6, None, 0.8], "70.0 %"),
        (1, [0.5, 0.6, 0.7, None, None], None),  # not finite in the end
    ],
)
def test_a_title_is_of_the_tests_that_the_table_is_of(
    every: int, metrics: list[float | None], ends: str | None, tmp_path: Path
) -> None:
    config = {"epochs": len(metrics), "evaluate_every": every}
    writer = RecordWriter.create(tmp_path, plain.header(config))
    for epoch, metric in enumerate(metrics):
        writer.epoch(plain.row(epoch, metric=metric), {"compute": 1.0})
    writer.close()
    text = said({"low": load_all(tmp_path)}, POINTS)
    assert text == (f"Rank 2 ends at {ends}" if ends else "")


def test_accordion_is_held_against_the_best_that_sends_no_more() -> None:
    """`low` is better and sends more: it is named last."""
    found = groups(
        {
            "low": ([0.99, 0.98, 0.99], 100.0),
            "high": ([0.70, 0.71, 0.70], 20.0),
            "accordion": ([0.90, 0.91, 0.92], 40.0),
        }
    )
    text = said(found, POINTS)
    assert text.startswith("ACCORDION (rank 4 or 1) is 20.7 points [17.8, 23.5] better than rank 1")
    assert text.endswith("than rank 1, which sends 50 % of its floats; rank 4 is 7.7 points better")


def test_a_gap_smaller_than_its_interval_is_not_shown() -> None:
    found = groups({"high": ([0.9, 0.8, 0.7], 20.0), "accordion": ([0.8, 0.9, 0.7], 20.0)})
    text = said(found, POINTS)
    assert "is not shown to beat rank 1, which sends 100 % of its floats" in text


def test_less_is_better_turns_the_sign() -> None:
    found = groups(
        {"low": ([3.0, 3.1, 3.2], 100.0), "high": ([3.5, 3.62, 3.7], 25.0)}, "bits per byte"
    )
    text = said(found, BITS)
    assert text.startswith("Rank 1 loses 0.51 bits per byte [0.48, 0.54] to rank 4")
    assert text.endswith("and sends 25 % of its floats")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("low-first", "rank 4 first, then 1"),
        ("low-last", "rank 1 first, then 4"),
        ("accordion", "ACCORDION (rank 4 or 1)"),
        ("mid", "middle compression"),  # the configuration has no such level
        ("mine", "mine"),
    ],
)
def test_names_say_what_levels_mean(name: str, text: str) -> None:
    assert words.spoken_name(name, LEVELS).replace("then rank", "then") == text


def test_names_at_the_ends_do_not_overlap() -> None:
    with style.theme():
        fig = style.figure(3.0)
        ax = fig.add_subplot()
        ends = [(1.0, 0.5 + 0.001 * i, f"name {i}", looks.LOOKS["low"]) for i in range(6)]
        ax.plot([0, 1], [0, 1])
        words.label_ends(ax, ends)
        fig.draw_without_rendering()
    boxes = [text.get_bbox_patch() or text for text in ax.texts]
    heights = sorted(text.xyann[1] for text in boxes)  # type: ignore[union-attr]
    inches = ax.get_position().height * 3.0
    assert (np.diff(heights) * inches > 0.1).all()  # seven points


def test_a_title_stands_above_a_legend() -> None:
    with style.theme():
        fig = style.figure(3.0)
        ax = fig.add_subplot()
        ax.plot([0, 1], [0, 1], label="a line")
        words.add_headline(fig, "alone")
        assert fig.get_suptitle() == "alone"
        fig.suptitle("")
        fig.legend(loc="outside upper center")
        words.add_headline(fig, "above it")
    assert fig.legends[0].get_title().get_text() == "above it"
    assert not fig.get_suptitle()


@pytest.mark.parametrize("width", [3.3, 5.0, 7.2])
def test_no_line_of_a_title_ends_between_a_number_and_its_unit(width: float) -> None:
    text = " ".join(["rank 4 takes", *(f"{x / 7:.1f} {u}" for x in range(20) for u in ("s", "%"))])
    with style.theme():
        fig = style.figure(3.0, width)
        words.add_headline(fig, text)
    lines = fig.get_suptitle().splitlines()
    assert len(lines) > 2
    assert not any(line.startswith(("s ", "%")) for line in lines)
    assert " ".join(lines).replace("\u00a0", " ") == text


@given(st.floats(-5, 5), st.floats(0.001, 5))
def test_an_end_of_an_effect_that_is_shown_is_not_written_as_zero(low: float, width: float) -> None:
    high = low + width
    known = MeanInterval(low + width / 2, low, high, 5)
    ends = known.numbers(".1f").partition("[")[2].rstrip("]").split(", ")
    for text, end in zip(ends, (low, high), strict=True):
        assert float(text) == pytest.approx(end, abs=0.0501)
        if known.verdict() in ("above", "below") and abs(end) > 1e-5:
            assert float(text) != 0
