"""Usable rates by window (oracles: sums by hand, runs)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import regimes
from analysis import narrowing
from analysis.narrowing import excesses, largest, table
from regimes.config import in_windows
from regimes.errors import RecordError
from regimes.presets import get_grid
from regimes.presets.mechanism import AT, RATES, WINDOWS
from regimes.records import load_all

GRID = get_grid("rates-when")


def test_rank_1_is_in_its_window_and_the_rate_is_constant() -> None:
    assert len(GRID) == (1 + len(WINDOWS)) * len(RATES)
    for name, cell in GRID.items():
        arm, _, rate = name.rpartition(AT)
        assert f"{cell.optimizer.lr:g}" == rate
        assert (cell.optimizer.schedule, cell.optimizer.decay_epochs) == ("constant", ())
        assert cell.epochs == 20
        if arm != "dense":
            first, last = map(int, arm.removeprefix("rank 1 in ").split("-"))
            inside = {e for e in range(20) if in_windows(cell.policy["windows"], e)}
            assert inside == set(range(first, last + 1))
            assert (cell.policy["inside"], cell.policy["outside"]) == ("level", "dense")
            assert first >= cell.optimizer.warmup_epochs


def _made() -> pd.DataFrame:
    """Early the excess is 0.2, 1.2, 2.2 + seed at three rates; late never above 0.2."""
    rows = [
        {"window": window, "first": first, "seed": seed, "rate": rate, "dense": 1.0, "loss": 1 + x,
         "excess": x}
        for window, first, excess in (("epochs 2-7", 2, (0.2, 1.2, 2.2)),
                                      ("epochs 8-13", 8, (0.0, 0.1, 0.2)))
        for seed in range(3) for rate, x in zip((0.1, 0.2, 0.4), excess, strict=True)
    ]  # fmt: skip
    each = pd.DataFrame(rows)
    each.loc[(each["first"] == 2) & (each["rate"] == 0.4), "excess"] += each["seed"]
    return each


def test_the_range_ends_where_the_line_leaves_the_limit() -> None:
    found = largest(_made()).set_index(["limit", "window", "seed"])["largest"]
    assert found[0.3, "epochs 2-7", 0] == pytest.approx(0.1 * 2**0.1)
    assert found[1.0, "epochs 2-7", 2] == pytest.approx(0.1 * 2**0.8)
    assert found[0.3, "epochs 8-13", 1] == math.inf


def test_a_seed_without_a_range_is_left_out() -> None:
    each = _made()
    each.loc[(each["first"] == 2) & (each["seed"] == 0) & (each["rate"] == 0.1), "excess"] = 0.5
    rows = table(each).set_index(["limit", "window"])
    assert rows.loc[(0.3, "epochs 2-7"), "n"] == 2
    assert rows.loc[(0.3, "epochs 8-13"), "n"] == 3
    assert rows.loc[(0.3, "epochs 8-13"), "beyond"] == 3
    assert rows.loc[(0.3, "epochs 8-13"), "largest"] == pytest.approx(0.4)


def test_windows_are_compared_by_seed() -> None:
    each = _made()
    late = each["first"] == 8
    each.loc[late & (each["rate"] == 0.4), "excess"] = 0.5 + 0.1 * each["seed"]
    rows = table(each).set_index(["limit", "window"])
    ends = np.log(0.1 * 2**0.1), [np.log(0.2) + np.log(2) * 0.2 / (0.4 + 0.1 * s) for s in range(3)]
    ratios = ends[0] - np.array(ends[1])
    row = rows.loc[(0.3, "epochs 2-7")]
    assert row["of_last"] == pytest.approx(np.exp(ratios.mean()))
    assert row["p"] == pytest.approx(stats.ttest_1samp(ratios, 0).pvalue)
    low, high = stats.t.interval(0.95, 2, ratios.mean(), stats.sem(ratios))
    assert (row["of_last_low"], row["of_last_high"]) == pytest.approx((np.exp(low), np.exp(high)))


def test_the_command_from_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("dense at 0.05", "dense at 0.4", "rank 1 in 2-7 at 0.05", "rank 1 in 2-7 at 0.4"):
        short = replace(GRID[name], epochs=8, seed=7)
        short = replace(short, data=replace(short.data, train_size=64, test_size=32))
        regimes.run(short, tmp_path / "runs" / name)
    runs = load_all(tmp_path / "runs")
    loss = {run.name: run.rows[7]["train_loss"] for run in runs}
    each = excesses(runs)
    assert each["excess"].to_list() == [
        pytest.approx(loss[f"rank 1 in 2-7 at {rate}"] - loss[f"dense at {rate}"])
        for rate in (0.05, 0.4)
    ]
    paths = narrowing.main(tmp_path / "runs", tmp_path / "out")
    assert {path.name for path in paths} == {"narrowing.png", "narrowing.svg", "narrowing.csv",
                                             "largest.csv", "largest.md"}  # fmt: skip
    assert "epochs 2-7" in capsys.readouterr().out
    with pytest.raises(RecordError, match=r"has no run without compression at 0\.4 with seed 7"):
        excesses([run for run in runs if run.name != "dense at 0.4"])


def test_other_grids_are_refused() -> None:
    runs = load_all(Path(__file__).parents[1] / "data" / "reference" / "small-joint.tar.xz")
    with pytest.raises(RecordError, match="is no window at a rate"):
        excesses(runs)
