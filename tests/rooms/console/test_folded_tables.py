"""Tables on terminals of any width (oracle: each number stands in the text as it was given)."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.box import SIMPLE_HEAD
from rich.console import Console

from regimes.base.console.tables import Table

WORDS = st.text("abcdefgh", min_size=1, max_size=30)
NUMBERS = st.sampled_from(["1", "-0.03 [-0.11, +0.05]", "× 1,082", "7.77e+03", "1234567890123"])


def printed(table: Table, width: int, **options: object) -> str:
    console = Console(width=width, file=StringIO(), color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(table.drawn(**options))
    return captured.get()


@st.composite
def tables(draw: st.DrawFn) -> Table:
    texts, numbers, ends = draw(st.integers(0, 2)), draw(st.integers(1, 8)), draw(st.integers(0, 1))
    kinds = [*[WORDS] * texts, *[NUMBERS] * numbers, *[WORDS] * ends]
    rows = draw(st.lists(st.tuples(*kinds), min_size=1, max_size=4))
    heads = [f"head {i}" for i in range(len(kinds))]
    return Table(heads, rows, "a note", "a title", texts=texts, ends=ends)


@pytest.mark.parametrize("options", [{}, {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "least": 5}])
@given(table=tables(), width=st.sampled_from([60, 80, 100, 200]))
def test_no_number_is_cut_and_no_line_is_too_long(
    table: Table, width: int, options: dict[str, object]
) -> None:
    text = printed(table, width, **options)
    assert max(map(len, text.splitlines())) <= width
    last = len(table.heads) - table.ends
    for row in table.rows:
        for cell in row[table.texts : last]:
            whole = re.findall(rf"(?<!\S){re.escape(cell)}(?!\S)", text)
            assert len(whole) >= row[table.texts : last].count(cell)
    assert text.count("a note") == 1


def test_what_does_not_fit_stands_below_beside_the_first_words() -> None:
    heads = ["method", "first", "second"]
    table = Table(heads, [("dense", "1" * 25, "2" * 25), ("topk", "3" * 25, "4" * 25)])
    lines = [line.split() for line in printed(table, 40).splitlines()]
    assert lines == [
        ["method", "first"],
        ["dense", "1" * 25],
        ["topk", "3" * 25],
        ["method", "second"],
        ["dense", "2" * 25],
        ["topk", "4" * 25],
    ]
    assert len(printed(table, 80).splitlines()) == 3
