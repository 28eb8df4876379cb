"""Usable learning rates and their models, also by window (oracles: sums by hand, closed forms of
stable rates, the records' rows)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from torch import Tensor

import regimes
from analysis.rates import narrowing
from analysis.rates.narrowing import largest, losses
from analysis.rates.usable import end, ends, rules, table
from regimes.base.errors import RecordError
from regimes.collectives.comm import Comm
from regimes.compression.bucket import Bucket
from regimes.compression.powersgd import PowerSGD
from regimes.plotting.looks import find_metric
from regimes.presets import get_grid
from regimes.presets.own import AT
from regimes.records import Record, load, unpack_records

ACCURACY = find_metric("accuracy")


# -- the grids -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0125, 0.05, 0.2])
@pytest.mark.parametrize("rank", [4, 2, 1])
def test_a_low_pass_sends_the_energy_that_its_rank_sends(
    rank: int, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is owed, summed over the steps and layers of a run on digits."""
    owed, left = [], []
    exchange = PowerSGD.exchange

    def measured(self: PowerSGD, bucket: Bucket, comm: Comm) -> list[Tensor]:
        owed.append(sum(float(delta.square().sum()) for delta in bucket.deltas))
        updates = exchange(self, bucket, comm)  # which takes out what it sends
        left.append(sum(float(delta.square().sum()) for delta in bucket.deltas))
        return updates

    monkeypatch.setattr(PowerSGD, "exchange", measured)
    settings = [
        f"levels={{level={rank}}}",
        "policy={name='static', level='level'}",
        f"optimizer.lr={rate}",
    ]
    regimes.run(regimes.override(regimes.get_preset("smoke/high"), settings), tmp_path)
    share = get_grid("rates-low-pass")[f"low-pass as rank {rank} at 0.1"].levels["level"]
    assert isinstance(share, float)
    assert 1 - sum(left) / sum(owed) == pytest.approx(1 - (1 - share) ** 2, abs=0.02)


# -- the usable range ------------------------------------------------------------------------


def test_a_range_ends_where_the_line_first_leaves_what_is_allowed() -> None:
    rates = [0.1, 0.2, 0.4, 0.8]
    assert end(rates, [1, 1, 1, 1], 1, 2) == math.inf
    assert end(rates, [1, 1, 5, 0], 0, 2) == pytest.approx(0.2 * 2**0.25)  # not the way back
    assert end(rates, [1, 1, 1, math.inf], 0, 2) == pytest.approx(0.4 * 2**0.5)
    assert math.isnan(end(rates, [1, 3, 1, 1], 1, 2))
    assert math.isnan(end(rates, [1, math.nan, 1, 1], 1, 2))
    assert end(rates, [9, 9, 1, 2], 2, 2) == math.inf  # at the limit is within


def _made() -> pd.DataFrame:
    """Two arms, three seeds: dense is usable throughout, the other one to 0.2 times 2^(1/2), ..."""
    rows = [
        (arm, rate, seed, 0.9, float(reached), (100 - reached) / 10)
        for seed in range(3)
        for rate, dense, other in ((0.1, 90, 88), (0.2, 92, 90), (0.4, 91, 80 - 10 * seed))
        for arm, reached in (("dense", dense), ("rank 1", other))
    ]
    columns = ["arm", "rate", "seed", "momentum", "accuracy", "train_loss"]
    return pd.DataFrame(rows, columns=columns)


def test_the_table_of_made_up_runs() -> None:
    rows = table(_made(), ACCURACY).set_index(["rule", "arm"])
    own = "own best within 5 points"
    assert rows.loc[(own, "dense"), "usable_max"] == pytest.approx(0.4)
    assert rows.loc[(own, "dense"), "usable_max_beyond"] == 3
    by_hand = [0.2 * 2 ** (5 / (10 + 10 * seed)) for seed in range(3)]  # 90 to 80, 70, 60
    assert rows.loc[(own, "rank 1"), "usable_max"] == pytest.approx(
        np.exp(np.mean(np.log(by_hand)))
    )
    assert rows.loc[(own, "rank 1"), "usable_max_beyond"] == 0
    assert rows.loc[(own, "rank 1"), "best"] == 0.2
    assert math.isnan(rows.loc[(own, "rank 1"), "of_dense"])  # dense's is not known
    loss = "training loss within 0.3 of dense"  # its lowest: 0.8
    assert rows.loc[(loss, "dense"), "usable_max_beyond"] == 3
    assert rows.loc[(loss, "rank 1"), "usable_max"] == pytest.approx(
        np.exp(np.mean([np.log(0.2) + np.log(2) * 0.1 / (1 + seed) for seed in range(3)]))
    )


def test_rules_are_of_the_best_mean_and_of_dense() -> None:
    found = rules(_made(), ACCURACY)
    own, _, loss = found
    assert (own, loss) == ("own best within 5 points", "training loss within 1 of dense")
    assert found[own][1].to_dict() == {"dense": -87.0, "rank 1": -85.0}
    assert found[loss][1].to_dict() == pytest.approx({"dense": 1.8, "rank 1": 1.8})
    assert [*rules(_made().query("arm == 'rank 1'"), ACCURACY)] == [own]


def test_a_rate_with_a_run_that_is_not_finite_is_outside_and_never_the_best() -> None:
    """An arm that has no other rate has no range, whatever its other seeds reach."""
    each = _made()
    each.loc[(each["arm"] == "dense") & (each["rate"] == 0.4), ["accuracy", "train_loss"]] = np.nan
    found = ends(each, ACCURACY)
    own = found[(found["arm"] == "dense") & found["rule"].str.startswith("own")]
    assert own["usable_max"].to_list() == pytest.approx([0.2 * 2**0.5] * 3)
    each = _made()
    for seed, rate in enumerate((0.1, 0.2, 0.4)):
        bad = (each["arm"] == "rank 1") & (each["rate"] == rate) & (each["seed"] == seed)
        each.loc[bad, ["accuracy", "train_loss"]] = np.nan
    rows = table(each, ACCURACY).set_index(["rule", "arm"])
    for rule in rows.index.unique("rule"):
        assert rows.loc[(rule, "dense"), "n"] == 3
        assert rows.loc[(rule, "rank 1"), "n"] == 0
        assert rows.loc[(rule, "rank 1"), ["best", "usable_max"]].isna().all()
    each.loc[each["arm"] == "dense", "train_loss"] = np.nan
    rows = table(each, ACCURACY).set_index(["rule", "arm"])
    assert (rows.loc["training loss within 1 of dense", "n"] == 0).all()


def test_dense_is_that_of_the_same_optimiser() -> None:
    """AdamW's dense ends at 0.2 x 2^(1/2), SGD's and rank 1's at other rates."""
    sgd = _made()
    adamw = sgd.assign(arm=sgd["arm"] + ", adamw", momentum=math.nan)
    adamw.loc[(adamw["arm"] == "dense, adamw") & (adamw["rate"] == 0.4), "accuracy"] = 82.0
    sgd.loc[(sgd["arm"] == "dense") & (sgd["rate"] == 0.4), "accuracy"] = 40.0
    rows = table(pd.concat([sgd, adamw]), ACCURACY).set_index(["rule", "arm"])
    row = rows.loc[("own best within 5 points", "rank 1, adamw")]
    by_hand = [0.2 * 2 ** (5 / (10 + 10 * seed)) for seed in range(3)]
    ratio = np.exp(np.mean(np.log(by_hand))) / (0.2 * 2**0.5)
    assert row["of_dense"] == pytest.approx(ratio)
    alone = pd.concat([sgd, adamw[adamw["arm"] == "rank 1, adamw"]])
    rows = table(alone, ACCURACY).set_index(["rule", "arm"])
    assert math.isnan(rows.loc[("own best within 5 points", "rank 1, adamw"), "of_dense"])


def test_an_arm_or_a_run_that_lacks_is_one_sentence() -> None:
    each = _made().query("arm == 'rank 1'").rename(columns={"accuracy": "squared error"})
    with pytest.raises(RecordError, match="run the arm 'dense', too"):
        table(each, find_metric("squared error"))
    lacks = _made().query("arm != 'rank 1' or rate != 0.2 or seed != 1")
    with pytest.raises(RecordError, match=r"'rank 1' has no run at 0\.2 with seed 1"):
        ends(lacks, ACCURACY)


# -- usable rates by window ----------------------------------------------------------------


def _windows() -> pd.DataFrame:
    """Losses at rates 0.1, 0.2, 0.4, 0.8 without compression: 0, 0, 0.1, 4. Early, rank 1 has 0.1,
    0.1, 1.1 + seed, 5 there, late 0, 0, 0.2, 4."""
    rows = [
        (window, first, seed, rate, without, loss + seed * (first == 2 and rate == 0.4))
        for window, first, losses in (
            ("epochs 2-7", 2, (0.1, 0.1, 1.1, 5.0)),
            ("epochs 8-13", 8, (0.0, 0.0, 0.2, 4.0)),
        )
        for seed in range(3)
        for rate, loss, without in zip(
            (0.1, 0.2, 0.4, 0.8), losses, (0.0, 0.0, 0.1, 4.0), strict=True
        )
    ]
    return pd.DataFrame(rows, columns=["window", "first", "seed", "rate", "dense", "loss"])


def test_the_range_ends_where_the_line_leaves_what_dense_allows() -> None:
    found = largest(_windows()).set_index(["limit", "window", "seed"])
    assert found.loc[(0.3, "epochs 2-7", 0), "loss"] == pytest.approx(0.2 * 2**0.2)
    assert found.loc[(0.3, "epochs 2-7", 2), "loss"] == pytest.approx(0.2 * 2 ** (0.2 / 3))
    assert found.loc[(1.0, "epochs 2-7", 0), "loss"] == pytest.approx(0.2 * 2**0.9)
    assert found.loc[(0.3, "epochs 8-13", 1), "loss"] == pytest.approx(0.4 * 2 ** (0.1 / 3.8))
    for window in ("epochs 2-7", "epochs 8-13"):
        assert found.loc[(0.3, window, 0), "dense"] == pytest.approx(0.4 * 2 ** (0.2 / 3.9))


def test_the_range_with_rank_1_begins_at_its_own_best_rate() -> None:
    """Dense's, 0.4, is too high for rank 1, which is best at 0.1; no seed is left out for it."""
    early = _windows().query("first == 2 and seed == 0").drop(columns=["loss", "dense"])
    each = early.assign(loss=[0.0, 0.1, 0.6, 5.0], dense=[0.2, 0.1, 0.0, 4.0])
    row = largest(each).set_index("limit").loc[0.3]
    assert row["loss"] == pytest.approx(0.2 * 2**0.4)
    assert row["dense"] == pytest.approx(0.4 * 2 ** (0.3 / 4))


def test_a_seed_without_an_end_is_left_out() -> None:
    each = _windows()
    early = (each["first"] == 2) & (each["seed"] == 0)
    each.loc[early & (each["rate"] <= 0.2), "loss"] = 0.5  # its best rate is not usable
    rows = narrowing.table(each).set_index(["limit", "window"])
    assert rows.loc[(0.3, "epochs 2-7"), "n"] == 2
    each.loc[each["rate"] == 0.8, ["loss", "dense"]] = 0.2  # all rates are
    rows = narrowing.table(each).set_index(["limit", "window"])
    assert rows.loc[(0.3, "epochs 8-13"), "n"] == 0
    assert math.isnan(rows.loc[(0.3, "epochs 8-13"), "ratio"])


def test_a_rate_at_which_a_seed_is_not_finite_is_never_the_best() -> None:
    """As in `usable`, and as the figure has no point there: not the mean of the seeds that are."""
    each = _windows()
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
    each = _windows()
    lacks = each[(each["seed"] != 1) | (each["rate"] != 0.1)]
    with pytest.raises(RecordError, match=r"no run at 0\.1 with seed 1: run all rates"):
        largest(lacks)


def test_windows_are_compared_by_seed() -> None:
    each = _windows()
    late = (each["first"] == 8) & (each["rate"] == 0.8)
    each.loc[late, "loss"] = 2.0 + each["seed"]
    rows = narrowing.table(each).set_index(["limit", "window"])
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


def test_losses_are_those_of_the_last_epoch_of_a_window() -> None:
    """Of the first seed's runs; what would be mixed or is too few is one sentence."""
    archive = Path(__file__).parents[2] / "data" / "reference" / "rates-when.tar.xz"
    arms = [f"{arm}{AT}{rate}" for arm in ("dense", "rank 1 in 2-7") for rate in ("0.05", "0.4")]
    with unpack_records(archive) as root:
        runs = [load(root / arm / "seed-4000") for arm in arms]
    low, twin, _, one = runs
    each, loss = losses(runs), {run.name: run.rows[7]["train_loss"] for run in runs}
    assert each[["dense", "loss"]].to_numpy().T.ravel().tolist() == [loss[arm] for arm in arms]

    def called(arm: str) -> Record:
        config = one.config | {"name": f"{arm}{AT}0.4"}
        return replace(one, header=one.header | {"config": config})

    for others, words in (
        ([twin, one, called("rank 2 in 2-7")], "is no window at a rate"),
        ([twin, one, called("rank 1 in 2-7")], "two runs of 'rank 1 in 2-7'"),
        ([low, one], r"has no run without compression at 0\.4 with seed 4000"),
        ([twin], "no run has rank 1 in a window"),
        ([twin, called("rank 1 in 2-40")], "ends before epoch 40"),
    ):
        with pytest.raises(RecordError, match=words):
            losses(others)
