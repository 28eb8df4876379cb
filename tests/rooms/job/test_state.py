"""Saved states: residuals on other workers, and states that this version cannot read.

Oracles: conservation (the mean over all workers is that of before), reduction (as many workers:
each its own rows, bit for bit).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import states
import torch
from hypothesis import given
from hypothesis import strategies as st

from regimes import TopK
from regimes.base.errors import ConfigError
from regimes.compression import make_compressor
from regimes.job.fit_state import respell_compressor
from regimes.job.move_residuals import (
    average_residuals,
    on_processes,
    residuals_for,
)
from regimes.job.state import FORMAT, by_layer, check_format, join_states, of_workers, with_owed


def divided(count: int, cuts: set[int], means: bool = False) -> list[dict[str, Any]]:
    """``count`` workers on processes that begin at these cuts, with residuals of two layers, of
    which one is never compressed; ``means``: one row for all workers of a process."""
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < count), count]
    generator = torch.Generator().manual_seed(count)
    parts = []
    for first, stop in itertools.pairwise(edges):
        rows = torch.randn(1 if means else stop - first, 2, 3, generator=generator).double()
        table = by_layer(residual={"a": rows, "b": None})
        parts.append({"workers": [*range(first, stop)], "layers": table, "sums": {}})
    return parts


def mean_of(parts: list[dict[str, Any]]) -> torch.Tensor:
    """Over workers, of which a single row for several counts for each."""
    rows = [
        row if len(row) == len(part["workers"]) else row.repeat(len(part["workers"]), 1, 1)
        for part in parts
        for row in [states.column(part, "residual")["a"]]
    ]
    return torch.cat(rows).mean(0)


CUTS = st.sets(st.integers(1, 7), max_size=4)


@given(old=st.integers(1, 8), new=st.integers(1, 8), cuts=CUTS, others=CUTS, means=st.booleans())
def test_what_is_owed_on_average_stays(
    old: int, new: int, cuts: set[int], others: set[int], means: bool
) -> None:
    saved = divided(old, cuts, means)
    found = []
    for part in divided(new, others):
        own = residuals_for(part["workers"], new, saved, old, ["a", "b"])
        assert own["b"] is None
        found.append({**part, "layers": by_layer(residual=own)})
    torch.testing.assert_close(mean_of(found), mean_of(saved), rtol=0, atol=1e-14)


@given(count=st.integers(1, 8), cuts=CUTS, others=CUTS)
def test_as_many_workers_have_what_they_had(count: int, cuts: set[int], others: set[int]) -> None:
    saved = torch.cat([states.column(part, "residual")["a"] for part in divided(count, cuts)])
    for part in divided(count, others):
        own = residuals_for(part["workers"], count, divided(count, cuts), count, ["a"])["a"]
        assert torch.equal(own, saved[part["workers"]])


@given(each=st.integers(1, 4), processes=st.integers(1, 3), means=st.booleans())
def test_one_row_for_all_and_back(each: int, processes: int, means: bool) -> None:
    parts = divided(each * processes, {each * i for i in range(1, processes)}, means)
    before = mean_of(parts)
    average_residuals(parts, to_one=not means)
    torch.testing.assert_close(mean_of(parts), before, rtol=0, atol=1e-14)
    rows = [len(states.column(part, "residual")["a"]) for part in parts]
    assert rows == [len(part["workers"]) if means else 1 for part in parts]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_worker_that_lacks_is_no_silent_zero(count: int) -> None:
    """Unless its part overlaps with none of those asked for."""
    half = divided(4, {2})[:1]
    with pytest.raises(LookupError):
        residuals_for(range(count), count, half, 4, ["a"])
    for worker in range(count // 2):
        found, whole = (
            residuals_for([worker], count, parts, 4, ["a"])["a"]
            for parts in (half, divided(4, {2}))
        )
        assert torch.equal(found, whole)


@pytest.mark.parametrize("local", [False, True])
def test_what_is_owed_is_put_also_where_a_layer_has_nothing_yet(local: bool) -> None:
    owing = {"layers": {"a": {"memory": 1}}}
    part = {"outer": {"momentum": 3, **owing}} if local else owing
    (found,) = with_owed({"parts": [part]}, {"a": 2.0, "b": 4.0})["parts"]
    table = {"a": {"memory": 1, "residual": 2.0}, "b": {"residual": 4.0}}
    assert found == ({"outer": {"momentum": 3, "layers": table}} if local else {"layers": table})


def test_a_state_of_each_process_is_the_state_of_all() -> None:
    parts = divided(3, {1, 2})
    whole = {"format": FORMAT, "processes": 3, "layers": {"a": {}, "b": {}}, "parts": parts}
    each = on_processes(whole, 3)
    assert join_states(each) == whole
    assert [part["workers"] for state in each for part in state["parts"]] == [[0], [1], [2]]


def test_entries_of_workers_are_found_on_any_process() -> None:
    parts = [{"workers": [0, 2], "hidden": ["a", "c"]}, {"workers": [1], "hidden": ["b"]}]
    assert of_workers(parts, "hidden", [1, 2]) == ["b", "c"]
    assert of_workers([{"workers": [0, 1], "hidden": []}], "hidden", [0]) == []


@pytest.mark.parametrize(
    ("saved", "compressor", "fits"),
    [
        ("TopK(error_feedback=True)", TopK(), True),  # without the fields that came later
        (repr(TopK(error_feedback=0.5)), TopK(error_feedback=0.5), True),
        ("TopK(error_feedback=0.5)", TopK(error_feedback=0.5), True),
        ("TopK(error_feedback=True)", TopK(error_feedback=0.5), False),
        ("TopK(error_feedback=True)", TopK(residual="update"), False),
        ("RandomK(error_feedback=True)", TopK(), False),
        ("TopK(error_feedback=True, gone=1)", TopK(), False),
    ],
)
def test_a_compressor_of_before_has_defaults_for_later_fields(
    saved: str, compressor: TopK, fits: bool
) -> None:
    assert (respell_compressor(saved, compressor) == repr(compressor)) is fits


@pytest.mark.parametrize("value", ["None", "'compiled'"])
@pytest.mark.parametrize("name", ["quantise", "quantised-all-reduce"])
def test_a_field_of_0_4_that_has_left_is_no_difference(name: str, value: str) -> None:
    compressor = make_compressor({"name": name})
    saved = repr(compressor).replace("stochastic=True", f"stochastic=True, kernels={value}")
    assert "kernels" in saved
    assert respell_compressor(saved, compressor) == repr(compressor)


def test_a_state_of_a_later_version_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="the state has the format 5, this version reads 4"):
        check_format({"format": 5})


@pytest.mark.parametrize(
    "old",
    [
        {"own": {}, "workers": [0], "shared": {}},  # a file of a run
        {"worker": 0, "workers": 2, "shapes": {}, "residuals": {}, "rows": []},  # of a hook
        {"processes": [{}, {}]},  # of all processes
        {"process": [0, 2], "layers": [], "common": []},  # of local steps
    ],
    ids=lambda old: next(iter(old)),
)
def test_a_state_of_0_3_or_before_is_one_sentence(old: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"saved by version 0\.3 or before: load it with version"):
        check_format(old)
