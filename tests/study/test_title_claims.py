"""Titles of figures state no more than their numbers do.

Oracle: the numbers themselves, generated: one seed, two, equal ones, intervals around 0 or without
width, missing and infinite values. A title that says an effect without a hedge has an interval that
leaves it out, and one without an interval says that it is open; every number in a title is one; an
interval lies within what is possible.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic import make
from titled import groups

from analysis.common import paired
from analysis.common.estimates import estimate
from analysis.criticality import draw, law
from analysis.criticality import fit as laws
from analysis.detection import agreement, signals
from analysis.paper import curves, figure2, figure3
from analysis.rates import edge, narrowing, usable_figure
from analysis.tournament import tournament_figure
from regimes.base.errors import RecordError
from regimes.plotting import looks, style, words
from regimes.plotting.said import MeanInterval
from regimes.records import Record, load

NONE = math.nan
HEDGES = ("Open whether", "not shown", "None of", "No ", "?", "as far as is shown")
numbers = st.one_of(
    st.integers(-1_200_000, 1_200_000).map(lambda number: number / 1e6),
    st.sampled_from([0.0, -0.0, NONE, 0.004, -0.004, 1.0, -1.0]),
)
seeds = st.lists(numbers, min_size=1, max_size=5)
quick = settings(deadline=None, max_examples=30)


def check(title: str) -> str:
    """What no title may hold."""
    plain = title.replace("\xa0", " ")
    assert not re.search(r"\bnan\b|\binf\b|-0\.0+(?!\d)|\[\]|  | $", plain), title
    assert not re.search(r"pulse of (null|pulse)|1 / 0\.", plain), title
    for low, high in re.findall(r"\[([-+\d.]+), ([-+\d.]+)\]", plain):
        assert float(low) <= float(high), title
    return plain


def row(name: str, values: list[float], alone: bool = False) -> dict[str, Any]:
    """A row of a table of estimates, without missing values."""
    kept = [value for value in values if not math.isnan(value)]
    return {"n": len(kept), **estimate(kept, name, alone=alone)}


def interval(values: list[float]) -> tuple[float, float] | None:
    """Own: mean plus and minus the tabulated quantile; none of equal values, or fewer than 3."""
    kept = [value for value in values if math.isfinite(value)]
    if len(kept) < 3 or max(kept) - min(kept) < 1e-9:
        return None
    quantile = {3: 4.302653, 4: 3.182446, 5: 2.776445}[len(kept)]
    half = quantile * np.std(kept, ddof=1) / math.sqrt(len(kept))
    return float(np.mean(kept) - half), float(np.mean(kept) + half)


def verdict(values: list[float], base: float = 0.0) -> str:
    """What may be said of these values."""
    ends = interval(values)
    if ends is None:
        return "open"
    return "above" if ends[0] > base else "below" if ends[1] < base else "not shown"


def is_open(title: str) -> bool:
    return title.startswith("Open whether ")


# -- the shared machine ----------------------------------------------------------------------


@quick
@given(values=seeds)
def test_an_estimate_is_shown_only_by_an_interval_that_leaves_zero_out(values: list[float]) -> None:
    found, ends = MeanInterval.of(values), interval(values)
    assert found.n == sum(map(math.isfinite, values))
    if found.n == 0:
        return
    assert found.verdict() == verdict(values)
    assert found.is_above(0) == (verdict(values) == "above")
    assert found.is_below(0) == (verdict(values) == "below")
    text = check(found.text(".1f", "points"))
    assert ("[" in text) == (ends is not None)
    assert ("seed" in text) == (ends is None)


# -- curves ----------------------------------------------------------------------------------


@quick
@given(
    table=st.dictionaries(
        st.sampled_from(["low", "high", "accordion", "null", "pulse", "mid", "high-longer"]),
        st.tuples(seeds, st.sampled_from([0.0, 1.0, 100.0, 1e9])),
        min_size=1,
        max_size=4,
    ),
    metric=st.sampled_from(["accuracy", "bits per byte", "own"]),
    data=st.data(),
)
def test_the_title_of_curves(table: Any, metric: str, data: Any) -> None:
    found, shown = groups(table, metric), looks.find_metric(metric)
    baseline = data.draw(st.sampled_from([None, *table]))
    names = words.names_of(found)
    title = check(words.write_answer(found, shown, names, baseline))
    if not title or " ends at " in title:
        return
    assert baseline is None or names[baseline].lower() in title.lower()
    effect = re.search(r"(better than|loses|above|below|better$)", title)
    assert not effect or any(word in title for word in HEDGES) or "[" in title
    few = {name for name, (values, _) in table.items() if sum(map(math.isfinite, values)) < 3}
    assert is_open(title) or few != {*table}
    for low, high in re.findall(r"\[([-\d.]+), ([-\d.]+)\]", title):
        assert float(low) >= 0 or effect is None
        assert metric != "accuracy" or float(high) <= 100
    for name in few:  # of two seeds nothing is shown to be better besides
        assert f"; {names[name].partition(' (')[0]} is" not in title


def test_the_baseline_that_is_given_is_the_one_of_the_title(tmp_path: Any) -> None:
    runs = [load(make(tmp_path, n, seed)) for n in ("low", "high", "accordion") for seed in (0, 1)]
    for base in ("low", "high"):
        figure, _ = curves.figure(runs, baseline=base)
        title = figure.get_suptitle() or figure.legends[0].get_title().get_text()
        name = words.spoken_name(base, runs[0].config)
        assert name in " ".join(title.split()).partition(",")[0]
    with pytest.raises(RecordError, match="baseline mid: no such schedule"):
        curves.figure(runs, baseline="mid")


def test_a_longer_run_has_as_many_floats_only_where_it_has() -> None:
    for sent, said in ((103.0, "as many floats as low"), (39.0, "0.39 of low's floats")):
        found = groups({"low": ([0.9] * 3, 100.0), "high-longer": ([0.8] * 3, sent)})
        assert words.names_of(found)["high-longer"] == f"high compression, longer, {said}"
    assert "floats" not in words.names_of({"high-longer": found["high-longer"]})["high-longer"]


# -- figures 2 and 3 -------------------------------------------------------------------------


@quick
@given(start=st.floats(1e-3, 1e3), middle=st.floats(0, 1e3), end=st.floats(0, 1e3))
@example(start=1.0, middle=1.0, end=5e-324)
def test_the_norm_falls_only_where_it_does(start: float, middle: float, end: float) -> None:
    values = [start, middle, end]
    table = pd.DataFrame({"epoch": range(3), "layer": "a", "norm": values})
    title = check(figure2._fall(table, [[0, 1]], "epoch"))
    first = title.partition("\n")[0]
    if "falls to" in first:
        assert middle < start
    if "grows" in first:
        assert middle > start
    assert not re.search(r"1 / 1\.0(?!\d)|to 1\.0 times", title)
    table = pd.DataFrame({"epoch": range(5), "layer": "a", "norm": [32.0, 16.0, 8.0, 2.0, 4.0]})
    for windows, said in (
        ([[0, 2]], "1 / 4.0 in the first window,\nand falls to 1 / 2.0 after it"),
        ([[1, 3], [4, 5]], "1 / 8.0 in the first window,\nand grows to 2.0 times after it"),
        ([], "1 / 2.0 in the first epoch,\nand falls to 1 / 4.0 after it"),
    ):
        assert said in figure2._fall(table, windows, "epoch")


@quick
@given(values=seeds)
def test_the_windows_are_worth_what_is_shown(values: list[float]) -> None:
    gap = MeanInterval.at(row("difference", values, alone=True), "difference")
    if not gap.n:
        return
    title = check(
        words.describe_difference("A", "B", gap, looks.find_metric("accuracy"), beats=True)
    )
    said = {"open": "Open whether", "not shown": "not shown", "above": "better", "below": "loses"}
    ((found, _),) = [item for item in said.items() if item[1] in title]
    assert found == verdict(values)


@quick
@given(values=seeds)
def test_kappa(values: list[float]) -> None:
    clipped = [float(np.clip(v, -1, 1)) for v in values]
    table, ends = row("kappa", clipped), interval(clipped)
    frame = pd.DataFrame([{"a": figure3.NORM, "b": figure3.EVAL, **table}])
    control = pd.DataFrame([{"a": figure3.EVAL, "b": figure3.CONTROL, **row("kappa", [0.5, 0.5])}])
    gain = MeanInterval.of([value - 0.5 for value in clipped])
    title = check(figure3._title(pd.concat([frame, control]), gain))
    said = {"not shown": "is not shown", "above": "epochs better", "below": "epochs worse"}
    if not math.isnan(table["kappa"]):
        found = verdict([value - 0.5 for value in clipped])
        tie = found == "open" and gain.n >= 3 and abs(gain.value) < 1e-9
        assert ("as well as" if tie else said.get(found, "Open whether")) in title
        assert ("Open" in title) == (found == "open" and not tie)
    detectors = frame.assign(detector="x").set_index("detector")
    title = check(agreement._title(detectors, "norm"))
    assert title.startswith("Of 1 detectors x") == (ends is not None and ends[0] > 0)
    assert title.startswith("Open which of") == (ends is None and not math.isnan(table["kappa"]))


# -- harm ------------------------------------------------------------------------------------

TRUNK: Any = None


@pytest.fixture(scope="module", autouse=True)
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Record:
    global TRUNK
    TRUNK = load(make(tmp_path_factory.mktemp("trunk"), "trunk", 0))
    return TRUNK


@quick
@given(
    arms=st.dictionaries(
        st.sampled_from(["null", "pulse", "rank 1", "pulse-2"]),
        st.lists(seeds, min_size=1, max_size=4),
        min_size=1,
        max_size=2,
    )
)
def test_harm(arms: dict[str, list[list[float]]]) -> None:
    rows = [
        {"arm": arm, "onset": at, "left": 3 - at, "without": 3.0, **row("harm", values, alone=True)}
        for arm, by_onset in arms.items()
        for at, values in enumerate(by_onset)
    ]
    title = check(draw.worst(pd.DataFrame(rows), TRUNK))
    says = re.search(r"(harms most|is shown to harm) from unit (\d)", title)
    if says is None:
        assert title.startswith(("No ", "Open whether "))
        return
    (felt, by_onset), *_ = [
        item for item in arms.items() if np.nanmax(np.abs([0.0, *itertools.chain(*item[1])])) > 1e-9
    ]
    values = by_onset[int(says[2])]
    assert verdict(values) == "above"
    assert draw.worst_of(pd.DataFrame(rows))["onset"] == int(says[2])
    assert "pulse" in title
    assert felt in title or felt == "pulse"


def test_the_pulse_that_is_shaded_is_the_one_that_the_title_names() -> None:
    """A larger mean, from unit 1, has an interval around 0; the first arm changes nothing."""
    rows = [
        {"arm": arm, "onset": at, "left": 3, "without": 3.0, **row("harm", values, alone=True)}
        for arm, at, values in (
            ("same", 0, [0.0, 0.0, 0.0]),
            ("rank 1", 1, [0.0, 0.1, 3.0]),
            ("rank 1", 2, [0.5, 0.51, 0.52]),
            ("rank 1", 3, [0.2, 0.21, 0.22]),
        )
    ]
    curve = pd.DataFrame(rows)
    assert "is shown to harm from unit 2" in draw.worst(curve, TRUNK)
    assert draw.worst_of(curve)["onset"] == 2


# -- learning rates, signals, deficits -------------------------------------------------------


@quick
@given(first=seeds, last=seeds, p=st.sampled_from([NONE, 0.01, 0.3]))
def test_ranges_of_rates(first: list[float], last: list[float], p: float) -> None:
    def logs(values: list[float]) -> dict[str, Any]:
        kept = [value for value in values if not math.isnan(value)]
        return {"n": len(kept), **estimate(kept, "ratio", logs=True)}

    rows = [{"window": "A", **logs(first), "p": p}, {"window": "B", **logs(last), "p": NONE}]
    title = check(narrowing._title(pd.DataFrame(rows).assign(limit=narrowing.LOSSES[0])))
    if title.startswith("Rank 1 narrows"):
        assert p < 0.05
        assert "open" not in (verdict(first), verdict(last))
    kept = [value for value in first if not math.isnan(value)]
    of_dense = {"arm": "rank 1", "n": 3, **estimate(kept, "of_dense", logs=True)}
    title, ends = check(usable_figure._title(pd.DataFrame([of_dense]))), interval(first)
    if title.startswith("Compression narrows"):
        assert ends is not None
        assert ends[1] < 0


@quick
@given(values=st.lists(st.sampled_from([0.0, 1e-3, 0.97, 1.0, 7.0]), min_size=1, max_size=4))
def test_a_signal_falls_only_where_it_ends_lower(values: list[float]) -> None:
    title = check(signals._title(pd.DataFrame({next(iter(signals.FALLS.values())): values})))
    assert "falls:" not in title or values[-1] < max(values)


@quick
@given(rows=st.lists(seeds, min_size=1, max_size=4), metric=st.sampled_from(["accuracy", "loss"]))
def test_arms_against_controls(rows: list[list[float]], metric: str) -> None:
    """After correction a difference needs an interval, too, that leaves 0 out."""
    finite = {
        (f"arm {i}", "static"): [v for v in x if not math.isnan(v)] for i, x in enumerate(rows)
    }
    table, shown = paired.compare(finite), looks.find_metric(metric)
    for one, values in zip(paired.verdicts(table), finite.values(), strict=True):
        assert one in (verdict(values), "not shown")
        assert (one == "open") == (verdict(values) == "open")
    known = table[table["n"] > 0].reset_index(drop=True)
    if not len(known):
        return
    every = {verdict(values) for values in finite.values() if values}
    title = check(tournament_figure._title(known, shown, "the control"))
    assert title.startswith("Open whether") == (every == {"open"})
    if re.match("arm|[0-9]", title):  # one beats it
        better = "below" if shown.lower else "above"
        assert better in every


@quick
@given(rank=seeds, dense=seeds)
def test_a_level_trains_near_the_edge_as_far_as_is_shown(
    rank: list[float], dense: list[float]
) -> None:
    rows = [
        {"rate": 0.1, "arm": arm, "seed": seed, "product": abs(value)}
        for arm, values in (("rank 1", rank), ("dense", dense))
        for seed, value in enumerate(values)
        if not math.isnan(value)
    ]
    if not any(row["arm"] == "rank 1" for row in rows):
        return
    title = check(edge._title(pd.DataFrame(rows), 1.0))
    sizes = [abs(value) for value in rank]
    found = verdict(sizes, edge.NEAR)
    assert title.startswith("Rank 1 trains at") == (found == "above")
    if title.startswith("Open"):
        assert found == "open"
        assert np.nanmean(sizes) >= edge.NEAR


@quick
@given(value=numbers, half=st.sampled_from([NONE, 0.0, 0.1, 2.0]), n=st.integers(1, 4))
def test_the_law_is_shown_only_by_an_interval(value: float, half: float, n: int) -> None:
    exponent = laws.Exponent(value, value - half, value + half, n, "trunks")
    found = law._estimate(exponent).verdict()
    assert (found == "open") == (n < 3 or not half > 0 or math.isnan(value))
    if found == "above":
        assert value - half > 0


# -- captions --------------------------------------------------------------------------------


def test_a_caption_names_the_bands_and_bars_that_are_drawn() -> None:
    for counts, bands, bars, drawn in itertools.product(
        ([1], [2, 2], [3, 1], [5]), (True, False), (True, False), (1, 30)
    ):
        if not (bands or bars):
            continue
        text = style.intervals_in_words(counts, drawn, bands, bars or drawn > style.MANY)
        many = max(counts) >= 3
        assert ("bands" in text) == (many and bands and drawn == 1)
        assert ("bars" in text) == (many and (bars or drawn > style.MANY))
        assert ("95 %" in text) == many
