"""low <= mean <= high wherever an interval stands (oracle: order), and its ends have one name:
`ci_low` and `ci_high`, in a table of several means after the mean's name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intervals import interval_complaints

from analysis.common.estimates import WITHIN, estimate, over_seeds
from analysis.paper import figure3
from regimes.base.errors import RecordError
from regimes.plotting.curves import tabulate_curves, tabulate_ends
from regimes.plotting.groups import group_runs
from regimes.plotting.said import MeanInterval
from regimes.plotting.schedules import compare
from regimes.policies.replay import detect
from regimes.records import Record, find_runs, load, unpack_records

DATA = Path(__file__).parents[2] / "data" / "reference"
FIRST = ("small-signals", "smoke-signals", "small", "lm-demo", "paper-cifar10-short")
FEW_SEEDS, SCHEDULES = 3, 3  # of an archive: a fifth of the time
values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(values=values, name=st.sampled_from(["own", "share_of_training", *sorted(WITHIN)]))
def test_a_mean_lies_between_its_ends_whatever_the_values(values: list[float], name: str) -> None:
    """Values outside of a range show that it is not theirs."""
    frame = pd.DataFrame({"arm": "a", name: values})
    tables = [
        pd.DataFrame([estimate(values, name)]),
        pd.DataFrame([estimate(values, name, alone=True)]),
        over_seeds(frame, ["arm"], [name]),
    ]
    assert [interval_complaints(table) for table in tables] == [[], [], []]
    found = MeanInterval.of(values, (0.0, 1.0))
    assert math.isnan(found.low) or found.low <= found.value <= found.high
    if name in WITHIN:
        low, high = WITHIN[name]
        kept = [min(max(value, low), high) for value in values]
        ends = [estimate(kept, name)[f"{name}_ci_{end}"] for end in ("low", "high")]
        alike = max(kept) - min(kept) <= 1e-9 * max(1.0, *map(abs, kept))
        if len(kept) >= 3 and not alike:
            assert low <= ends[0] <= ends[1] <= high


def test_what_is_wrong_is_seen() -> None:
    table = pd.DataFrame({"x": [2.5], "ci_low": [2.3], "ci_high": [1.0]})
    table = table.assign(of_low=0.5, y_low=0.0, y_high=1.0)
    assert interval_complaints(table) == ["y_low: not ci_low", "x: [2.3, 2.5, 1.0]"]


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(path, marks=() if name in FIRST else pytest.mark.slow, id=name)
        for path in sorted(DATA.glob("*.tar.xz"))
        if (name := path.name.partition(".")[0])
    ],
)
def test_of_every_committed_archive(archive: Path) -> None:
    """In the tables of curves, ends, differences, detectors and, where eigenvalues were measured,
    of Figure 3."""
    with unpack_records(archive) as root:
        runs = _few(root)
        made = dict(_tables(runs))
    assert "curves" in made or "quirks" in archive.name  # several settings, which no table has
    assert {name: said for name, rows in made.items() if (said := interval_complaints(rows))} == {}


def _few(root: Path) -> list[Record]:
    schedules: dict[Path, list[Path]] = {}
    for folder in find_runs(root):
        schedules.setdefault(folder.parent, []).append(folder)
    chosen = [*schedules.values()][:SCHEDULES]
    return [load(folder) for seeds in chosen for folder in seeds[:FEW_SEEDS]]


def _tables(runs: list[Record]) -> Iterator[tuple[str, pd.DataFrame]]:
    found = detect.bench_detectors(runs, detect.default_rules(runs))
    yield "detectors", detect.over_seeds(found.detectors, "detectors")
    yield "pairs", detect.over_seeds(found.pairs, "pairs")
    wanted: dict[str, Callable[[], pd.DataFrame]] = {
        "curves": lambda: tabulate_curves(group_runs(runs)),
        "ends": lambda: tabulate_ends(group_runs(runs)),
        "differences": lambda: compare(runs),
        "signals": lambda: figure3.agreement(runs, 3, 0.5)[0],
        "agreement": lambda: figure3.agreement(runs, 3, 0.5)[1],
    }
    for name, make in wanted.items():
        try:
            yield name, make()
        except RecordError:  # one schedule, several settings, or no eigenvalue
            continue


def test_of_every_number_of_the_findings() -> None:
    numbers = json.loads((DATA.parents[1] / "docs/findings/numbers.json").read_text())
    found = [*_intervals(numbers)]
    assert len(found) > 300
    for mean, low, high, *_ in found:
        assert low is None or low <= mean <= high, (mean, low, high)


def _intervals(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, dict):
        if "interval" in value:
            yield value["interval"]
        for part in value.values():
            yield from _intervals(part)
    elif isinstance(value, list):
        for part in value:
            yield from _intervals(part)
