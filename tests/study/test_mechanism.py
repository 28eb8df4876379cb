"""Usable learning rates and their models (oracles: sums by hand, closed forms of stable rates,
training in numpy)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from torch import Tensor

import regimes
from analysis.common import panels
from analysis.rates.usable import end, ends, entries, rules, table
from regimes.base.config import DENSE
from regimes.base.errors import RecordError
from regimes.collectives.comm import Comm
from regimes.compression.bucket import Bucket
from regimes.compression.powersgd import PowerSGD
from regimes.plotting import style
from regimes.plotting.looks import find_metric
from regimes.presets import get_grid
from regimes.presets.own import AT
from regimes.records import load_all

ACCURACY = find_metric("accuracy")
REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def test_rates_are_drawn_over_their_logarithm() -> None:
    fig = style.figure(2)
    ax = fig.subplots()
    ax.plot([0.01, 0.1, 1.0], [1, 2, 3])
    panels.rates_axis(ax)
    assert ax.get_xscale() == "log"
    fig.canvas.draw()
    written = [text.get_text() for text in ax.get_xticklabels()]
    assert {"0.01", "0.03", "0.1", "0.3", "1"} <= set(written)


# -- the grids -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rates-smoke", "rates-momentum", "rates-lm"])
def test_a_cell_is_its_level_at_its_rate_and_nothing_else(name: str) -> None:
    grid = get_grid(name)
    first = next(iter(grid.values()))
    starts = set()
    for key, cell in grid.items():
        arm, _, rate = key.rpartition(AT)
        assert cell.name == key
        assert f"{cell.optimizer.lr:g}" == rate
        assert cell.compressor.get("error_feedback", True) == ("no feedback" not in arm)
        word = arm.split(",")[0].removesuffix(" %").split(" ")[-1]
        level = cell.levels.get(cell.policy["level"], DENSE)
        assert str(level) == word
        starts.add((cell.optimizer.warmup_from or 0) / cell.optimizer.lr)
        for part in ("data", "model", "epochs", "workers", "batch_size"):
            assert getattr(cell, part) == getattr(first, part)
    assert max(starts) - min(starts) < 1e-6


def test_momenta_move_as_far_by_a_constant_gradient() -> None:
    grid = get_grid("rates-momentum")
    known = {cell.optimizer.lr for cell in get_grid("rates-smoke").values()}
    far = {float(f"{rate / (1 - 0.9):.5g}") for rate in known}
    for cell in grid.values():
        moved = cell.optimizer.lr / (1 - cell.optimizer.momentum)
        assert float(f"{moved:.5g}") in far
    assert {cell.optimizer.momentum for cell in grid.values()} == {0.0, 0.5}


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
    rows = []
    for seed in range(3):
        for rate, dense, other in ((0.1, 90, 88), (0.2, 92, 90), (0.4, 91, 80 - 10 * seed)):
            for arm, reached in (("dense", dense), ("rank 1", other)):
                rows.append(
                    {
                        "arm": arm,
                        "rate": rate,
                        "seed": seed,
                        "momentum": 0.9,
                        "accuracy": float(reached),
                        "train_loss": (100 - reached) / 10,
                    }
                )
    return pd.DataFrame(rows)


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
    assert [*found] == [
        "own best within 5 points",
        "training loss within 0.3 of dense",
        "training loss within 1 of dense",
    ]
    assert found["own best within 5 points"][1].to_dict() == {"dense": -87.0, "rank 1": -85.0}
    assert found["training loss within 1 of dense"][1].to_dict() == pytest.approx(
        {"dense": 1.8, "rank 1": 1.8}
    )
    alone = _made()[lambda rows: rows["arm"] == "rank 1"]
    assert [*rules(alone, ACCURACY)] == ["own best within 5 points"]


def test_a_run_that_is_not_finite_is_outside() -> None:
    each = _made()
    each.loc[(each["arm"] == "dense") & (each["rate"] == 0.4), ["accuracy", "train_loss"]] = np.nan
    found = ends(each, ACCURACY)
    own = found[(found["arm"] == "dense") & found["rule"].str.startswith("own")]
    assert own["usable_max"].to_list() == pytest.approx([0.2 * 2**0.5] * 3)


def test_a_rate_with_a_run_that_is_not_finite_is_never_the_best() -> None:
    """An arm that has no other rate has no range, whatever its other seeds reach."""
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


def test_units_that_were_not_tested_are_not_units_without_a_metric() -> None:
    """Tested in units 1, 3, 5, ...: the tests of the last three units are averaged; one of them
    that is not finite makes the run so."""
    run = load_all(REFERENCE / "rates-when.tar.xz")[0]
    config = run.config | {"evaluate_every": 2}
    units = len(run.rows)
    metrics = [0.01 * unit if unit % 2 or unit == units - 1 else None for unit in range(units)]
    rows = [{**row, "metric": metric} for row, metric in zip(run.rows, metrics, strict=True)]
    sparse = replace(run, header=run.header | {"config": config}, rows=rows)
    last = [metric for metric in metrics[-3:] if metric is not None]
    (found,) = entries([sparse], ACCURACY).to_dict("records")
    assert found["accuracy"] == pytest.approx(100 * np.mean(last))
    rows[-1]["metric"] = None
    (found,) = entries([replace(sparse, rows=rows)], ACCURACY).to_dict("records")
    assert math.isnan(found["accuracy"])


def test_a_metric_without_a_rule_is_one_sentence() -> None:
    each = _made().query("arm == 'rank 1'").rename(columns={"accuracy": "squared error"})
    with pytest.raises(RecordError, match="run the arm 'dense', too"):
        table(each, find_metric("squared error"))


def test_a_seed_without_the_best_rate_is_one_sentence() -> None:
    each = _made()
    with pytest.raises(RecordError, match=r"'rank 1' has no run at 0\.2 with seed 1"):
        ends(each.drop(each.query("arm == 'rank 1' and rate == 0.2 and seed == 1").index), ACCURACY)
