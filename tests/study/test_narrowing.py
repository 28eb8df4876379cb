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
from analysis.rates import narrowing
from analysis.rates.narrowing import largest, losses, table
from regimes.base.config import in_windows
from regimes.base.errors import RecordError
from regimes.presets import get_grid
from regimes.presets.own import AT
from regimes.records import Record, load_all

GRID = get_grid("rates-when")


def test_rank_1_is_in_its_window_and_the_rate_is_constant() -> None:
    assert len(GRID) == (1 + 3) * 9  # dense and three windows, rates
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
    """Losses at rates 0.1, 0.2, 0.4, 0.8 without compression: 0, 0, 0.1, 4. Early, rank 1 has 0.1,
    0.1, 1.1 + seed, 5 there, late 0, 0, 0.2, 4."""
    dense = (0.0, 0.0, 0.1, 4.0)
    rows = [
        {
            "window": window,
            "first": first,
            "seed": seed,
            "rate": rate,
            "dense": without,
            "loss": loss + (seed if first == 2 and rate == 0.4 else 0),
        }
        for window, first, losses in (
            ("epochs 2-7", 2, (0.1, 0.1, 1.1, 5.0)),
            ("epochs 8-13", 8, (0.0, 0.0, 0.2, 4.0)),
        )
        for seed in range(3)
        for rate, loss, without in zip((0.1, 0.2, 0.4, 0.8), losses, dense, strict=True)
    ]
    return pd.DataFrame(rows)


def test_the_range_ends_where_the_line_leaves_what_dense_allows() -> None:
    found = largest(_made()).set_index(["limit", "window", "seed"])
    assert found.loc[(0.3, "epochs 2-7", 0), "loss"] == pytest.approx(0.2 * 2**0.2)
    assert found.loc[(0.3, "epochs 2-7", 2), "loss"] == pytest.approx(0.2 * 2 ** (0.2 / 3))
    assert found.loc[(1.0, "epochs 2-7", 0), "loss"] == pytest.approx(0.2 * 2**0.9)
    assert found.loc[(0.3, "epochs 8-13", 1), "loss"] == pytest.approx(0.4 * 2 ** (0.1 / 3.8))
    for window in ("epochs 2-7", "epochs 8-13"):
        assert found.loc[(0.3, window, 0), "dense"] == pytest.approx(0.4 * 2 ** (0.2 / 3.9))


def test_the_range_with_rank_1_begins_at_its_own_best_rate() -> None:
    """Dense's, 0.4, is too high for rank 1, which is best at 0.1; no seed is left out for it."""
    early = _made().query("first == 2 and seed == 0").drop(columns=["loss", "dense"])
    each = early.assign(loss=[0.0, 0.1, 0.6, 5.0], dense=[0.2, 0.1, 0.0, 4.0])
    row = largest(each).set_index("limit").loc[0.3]
    assert row["loss"] == pytest.approx(0.2 * 2**0.4)
    assert row["dense"] == pytest.approx(0.4 * 2 ** (0.3 / 4))


def test_a_seed_without_an_end_is_left_out() -> None:
    each = _made()
    early = (each["first"] == 2) & (each["seed"] == 0)
    each.loc[early & (each["rate"] <= 0.2), "loss"] = 0.5  # its best rate is not usable
    rows = table(each).set_index(["limit", "window"])
    assert rows.loc[(0.3, "epochs 2-7"), "n"] == 2
    each.loc[each["rate"] == 0.8, ["loss", "dense"]] = 0.2  # all rates are
    rows = table(each).set_index(["limit", "window"])
    assert rows.loc[(0.3, "epochs 8-13"), "n"] == 0
    assert math.isnan(rows.loc[(0.3, "epochs 8-13"), "ratio"])


def test_a_rate_at_which_a_seed_is_not_finite_is_never_the_best() -> None:
    """As in `usable`, and as the figure has no point there: not the mean of the seeds that are."""
    each = _made()
    high = each["rate"] == 0.8
    each.loc[high, ["loss", "dense"]] = np.nan
    wanted = largest(each)
    each.loc[high & (each["seed"] == 0), ["loss", "dense"]] = -9.0  # finite, and lowest
    found = largest(each)
    for column in ("loss", "dense"):
        same = wanted["seed"] > 0
        assert found.loc[same, column].to_list() == wanted.loc[same, column].to_list()
    each.loc[(each["seed"] == 1), "dense"] = np.nan  # at every rate
    assert largest(each)[["loss", "dense"]].isna().all(axis=None)


def test_a_seed_without_the_best_rate_is_one_sentence() -> None:
    each = _made()
    lacks = each[(each["seed"] != 1) | (each["rate"] != 0.1)]
    with pytest.raises(RecordError, match=r"no run at 0\.1 with seed 1: run all rates"):
        largest(lacks)


def test_windows_are_compared_by_seed() -> None:
    each = _made()
    late = (each["first"] == 8) & (each["rate"] == 0.8)
    each.loc[late, "loss"] = 2.0 + each["seed"]
    rows = table(each).set_index(["limit", "window"])
    dense = 0.2 / 3.9
    early = [math.log(0.2) + math.log(2) * 0.2 / (1 + s) for s in range(3)]
    last = [math.log(0.4) + math.log(2) * 0.1 / (1.8 + s) for s in range(3)]
    ends = [np.array(x) - math.log(0.4) - math.log(2) * dense for x in (early, last)]
    row = rows.loc[(0.3, "epochs 2-7")]
    assert row["ratio"] == pytest.approx(np.exp(ends[0].mean()))
    low, high = stats.t.interval(0.95, 2, ends[0].mean(), stats.sem(ends[0]))
    assert (row["ratio_ci_low"], row["ratio_ci_high"]) == pytest.approx((np.exp(low), np.exp(high)))
    assert row["p"] == pytest.approx(stats.ttest_1samp(ends[0] - ends[1], 0).pvalue)
    assert math.isnan(rows.loc[(0.3, "epochs 8-13"), "p"])


@pytest.mark.slow
def test_the_command_from_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("dense at 0.05", "dense at 0.4", "rank 1 in 2-7 at 0.05", "rank 1 in 2-7 at 0.4"):
        short = replace(GRID[name], epochs=8, seed=7)
        short = replace(short, data=replace(short.data, train_size=64, test_size=32))
        regimes.run(short, tmp_path / "runs" / name)
    runs = load_all(tmp_path / "runs")
    loss = {run.name: run.rows[7]["train_loss"] for run in runs}
    each = losses(runs)
    assert each["loss"].to_list() == [loss[f"rank 1 in 2-7 at {rate}"] for rate in (0.05, 0.4)]
    assert each["dense"].to_list() == [loss[f"dense at {rate}"] for rate in (0.05, 0.4)]
    paths = narrowing.main(tmp_path / "runs", tmp_path / "out")
    assert {path.name for path in paths} == {
        "narrowing.png",
        "narrowing.svg",
        "narrowing.csv",
        "largest.csv",
        "largest.md",
    }
    assert "| 0.3 | 2-7 | " in (tmp_path / "out" / "largest.md").read_text()
    assert "dense, up to" in capsys.readouterr().out
    with pytest.raises(RecordError, match=r"has no run without compression at 0\.4 with seed 7"):
        losses([run for run in runs if run.name != "dense at 0.4"])


def test_runs_that_would_be_mixed_or_are_too_few_are_one_sentence() -> None:
    runs = list(load_all(Path(__file__).parents[2] / "data" / "reference" / "rates-when.tar.xz"))
    one = next(run for run in runs if run.name.startswith("rank 1 in 2-7"))
    twin = next(r for r in runs if r.name == f"dense{AT}{one.rate:g}" and r.seed == one.seed)

    def called(arm: str) -> Record:
        name = f"{arm}{AT}{one.rate:g}"
        return replace(one, header=one.header | {"config": one.config | {"name": name}})

    with pytest.raises(RecordError, match="is no window at a rate"):
        losses([twin, one, called("rank 2 in 2-7")])
    with pytest.raises(RecordError, match="two runs of 'rank 1 in 2-7'"):
        losses([twin, one, called("rank 1 in 2-7")])
    with pytest.raises(RecordError, match="no run has rank 1 in a window"):
        losses([twin])
    with pytest.raises(RecordError, match="ends before epoch 40"):
        losses([twin, called("rank 1 in 2-40")])


def test_other_grids_are_refused() -> None:
    runs = load_all(Path(__file__).parents[2] / "data" / "reference" / "small-joint.tar.xz")
    with pytest.raises(RecordError, match="is no window at a rate"):
        losses(runs)
