"""How often training collapses (oracles: counts by hand, intervals in closed form, the file)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.common import estimates
from analysis.rates import collapse
from regimes.base.errors import RecordError
from regimes.records import load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def each(**schedules: list[float]) -> pd.DataFrame:
    """Accuracies by seed; below 50 is collapsed."""
    return pd.DataFrame(
        [
            {"name": name, "seed": seed, "accuracy": value, "collapsed": not value >= 50}
            for name, values in schedules.items()
            for seed, value in enumerate(values)
        ]
    )


def test_shares_have_their_exact_interval() -> None:
    for n in (1, 5, 30):
        assert estimates.exact(0, n) == pytest.approx((0, 1 - 0.025 ** (1 / n)))
        assert estimates.exact(n, n) == pytest.approx((0.025 ** (1 / n), 1))


def test_only_seeds_that_tell_two_schedules_apart_decide() -> None:
    rows = collapse.table(
        each(low=[95, 96, 94, 95, 40, 95, 95, 95], high=[10, 20, 30, 10, 20, 90, math.nan, 10])
    ).set_index("schedule")
    assert list(rows["collapsed"]) == [1, 7]
    assert rows.loc["high", "p"] == pytest.approx(2 / 2**6)  # six of six; the fifth is in both
    assert math.isnan(rows.loc["low", "p"])
    assert rows.loc["high", "accuracy"] == 90


def test_alike_schedules_have_no_p_and_holm_is_over_the_others() -> None:
    rows = collapse.table(each(low=[95] * 6, mid=[94] * 6, high=[10] * 6, worse=[9] * 6))
    rows = rows.set_index("schedule")
    assert math.isnan(rows.loc["mid", "p"])
    assert rows.loc["high", "p_holm"] == pytest.approx(2 * 2 / 2**6)


def test_nearer_to_guessing_than_to_the_best_median_is_collapsed() -> None:
    runs = load_all(REFERENCE / "smoke-quirks-topk.tar.xz")
    found = collapse.entries(runs)
    best = found.loc[found["name"] == "low", "accuracy"].median()
    assert best == found.groupby("name")["accuracy"].median().max()
    for row in found.to_dict("records"):
        assert row["collapsed"] == (abs(row["accuracy"] - 10) < abs(row["accuracy"] - best))
    assert found["collapsed"].any()


def test_as_near_to_guessing_as_to_the_best_is_not_collapsed() -> None:
    """Ten classes, best median 90: the middle is 50."""
    run = load_all(REFERENCE / "smoke-quirks-topk.tar.xz")[0]
    found = collapse.entries(
        [
            replace(
                run,
                header=run.header | {"config": run.config | {"name": str(metric)}},
                rows=[{**row, "metric": metric} for row in run.rows],
            )
            for metric in (0.9, 0.5, 0.4375)
        ]
    )
    assert dict(zip(found["accuracy"], found["collapsed"], strict=True)) == {
        90.0: False,
        50.0: False,
        43.75: True,
    }


def test_a_run_that_is_not_tested_in_each_unit_has_not_collapsed() -> None:
    run = load_all(REFERENCE / "smoke-quirks-topk.tar.xz")[0]
    units = len(run.rows)
    rows = [
        {**row, "metric": 0.9 if unit % 3 == 2 or unit == units - 1 else None}
        for unit, row in enumerate(run.rows)
    ]
    config = run.config | {"evaluate_every": 3}
    found = collapse.entries([replace(run, header=run.header | {"config": config}, rows=rows)])
    assert found[["accuracy", "collapsed"]].to_numpy().tolist() == [[90.0, False]]


def test_the_best_schedule_is_the_one_of_the_table() -> None:
    """Of "lucky" one run of three is finite: its median is 0, and the limit is of "low", 35."""
    run = load_all(REFERENCE / "smoke-quirks-topk.tar.xz")[0]
    metrics = {"lucky": (None, 0.95, None), "low": (0.6, 0.6, 0.4)}
    found = collapse.entries(
        [
            replace(
                run,
                header=run.header | {"config": run.config | {"name": name, "seed": seed}},
                rows=[{**row, "metric": metric} for row in run.rows],
            )
            for name, values in metrics.items()
            for seed, metric in enumerate(values)
        ]
    )
    assert found["collapsed"].to_list() == [True, False, True, False, False, False]
    assert collapse.table(found)["schedule"].to_list() == ["low", "lucky"]


def test_images_without_classes_are_refused() -> None:
    run = load_all(REFERENCE / "smoke-quirks-topk.tar.xz")[0]
    data = {**run.header["data"], "classes": []}
    with pytest.raises(RecordError, match="counted of accuracies"):
        collapse.entries([replace(run, header=run.header | {"data": data})])


def test_other_metrics_are_refused() -> None:
    with pytest.raises(RecordError, match="counted of accuracies"):
        collapse.entries(load_all(REFERENCE / "lm-small-tuned.tar.xz"))


def test_the_command_leaves_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = collapse.main(REFERENCE / "smoke-quirks-topk.tar.xz", out=tmp_path)
    assert {path.name for path in paths} == {"collapse.csv", "collapse.md"}
    assert "the rest's accuracy" in capsys.readouterr().out
