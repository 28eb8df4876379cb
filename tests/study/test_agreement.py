"""Agreement of detectors that no rule forces, and of the norm with the Hessian by rule (oracles:
scikit-learn, scipy, changes by hand, Figure 3's own numbers)."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from analysis.detection import norm_hessian, unforced
from analysis.detection.norm_hessian import RULES, find_measured, kappas, table
from analysis.detection.unforced import (
    FIRST,
    Change,
    calls,
    over_seeds,
    pairs,
    scored,
    scores,
    with_reference,
)
from analysis.paper import figure3
from regimes.base.errors import LackingError, RecordError
from regimes.records import Record, load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="module")
def runs() -> list[Record]:
    return [run for run in load_all(REFERENCE / "small-signals.tar.xz") if run.name == "low"]


def test_a_score_is_the_change_since_the_epoch_before(runs: list[Record]) -> None:
    run, table = runs[0], scores(runs[0])
    top = run.epochs["eigenvalue"].to_numpy()
    weights = [i for i, layer in enumerate(run.header["layers"]) if layer["compressed"]]
    layers = np.array([row["statistics"]["norm:update"] for row in run.rows])
    norm = np.hypot.reduce(layers[:, weights], axis=1)
    for name, values in (("eigenvalue", top), ("norm", norm)):
        by_hand = np.abs(np.diff(values)) / values[:-1]  # of epochs 0 and 1, 1 and 2, ...
        assert table[name].to_numpy() == pytest.approx(by_hand[table.index - 1])
        apart = np.abs(values[3:] - values[:-3]) / values[:-3]
        longer = scores(run, Change(back=3))[name]
        assert longer.to_numpy() == pytest.approx(apart[longer.index - 3])
        absolute = scores(run, Change(absolute=True))[name].to_numpy()
        assert absolute == pytest.approx(np.abs(np.diff(values))[table.index - 1])
    rate = run.epochs["lr"].to_numpy()
    assert rate[table.index[0] - 1] == rate.max() > rate[table.index[0] - 2]
    assert table.index[-1] == len(run.rows) - 1


def test_each_detector_calls_as_many_and_the_largest() -> None:
    table = pd.DataFrame(np.random.default_rng(3).random((20, 3)), columns=["a", "b", "c"])
    table.loc[[2, 5, 7], "c"] = np.nan
    called = calls(table)
    assert (called.sum() == 5).all()
    for name in table:
        assert table[name][called[name]].min() > table[name][~called[name]].max()
    assert [*called.index[called[FIRST]]] == [0, 1, 2, 3, 4]


def test_kappa_and_spearman(runs: list[Record]) -> None:
    each = pairs(scored(runs)).set_index(["a", "b", "seed"])
    for run in runs:
        table = scores(run)
        called = calls(table)
        row = each.loc[("norm", "eigenvalue", run.seed)]
        kappa = cohen_kappa_score(called["norm"], called["eigenvalue"])
        assert row["kappa"] == pytest.approx(kappa)
        both = stats.spearmanr(table["norm"], table["eigenvalue"]).statistic
        assert row["spearman"] == pytest.approx(both)
        first = each.loc[("eigenvalue", FIRST, run.seed)]
        kappa = cohen_kappa_score(called["eigenvalue"], called[FIRST])
        assert first["kappa"] == pytest.approx(kappa)
        assert np.isnan(first["spearman"])
    together = np.concatenate([scores(run)["eigenvalue"] for run in runs])
    assert unforced.thresholds(scored(runs))["eigenvalue"] == pytest.approx(
        np.quantile(together, 0.75)
    )


def test_agreement_with_other_runs_is_over_all_pairs_of_them(runs: list[Record]) -> None:
    called = [calls(scores(run)) for run in runs]
    others = unforced.other_runs(scored(runs), "eigenvalue")
    for column, name in (("with", "eigenvalue"), ("itself", "norm")):
        apart = [cohen_kappa_score(a["norm"], b[name]) for a, b in permutations(called, 2)]
        assert len(apart) == 20
        assert others.loc["norm", column] == pytest.approx(np.mean(apart))
    assert [*others.index] == [*called[0]]


def test_over_seeds_with_the_t_interval(runs: list[Record]) -> None:
    each = pairs(scored(runs))
    row = with_reference(over_seeds(each)).set_index("detector").loc["norm"]
    known = each[(each["a"] == "norm") & (each["b"] == "eigenvalue")]["kappa"].to_numpy()
    ends = stats.t.interval(0.95, len(known) - 1, known.mean(), stats.sem(known))
    assert (row["kappa"], row["kappa_ci_low"], row["kappa_ci_high"]) == pytest.approx(
        (known.mean(), *ends)
    )


def test_runs_without_statistics_or_a_reference_are_one_sentence(runs: list[Record]) -> None:
    with pytest.raises(RecordError, match="recorded no 'sharpness', with which"):
        with_reference(over_seeds(pairs(scored(runs))), "sharpness")
    with pytest.raises(RecordError, match="after its warm-up that can be scored, too few"):
        scores(replace(runs[0], rows=runs[0].rows[:5]))


def test_a_statistic_of_some_epochs_is_compared_where_it_was_measured(runs: list[Record]) -> None:
    whole = scores(runs[0], Change(back=3))
    rows = [row if row["epoch"] % 3 == 0 else {**row, "model": {}} for row in runs[0].rows]
    run = replace(runs[0], rows=rows)
    with pytest.raises(RecordError, match="changes over 1; 8 of 24 epochs have eigenvalue and"):
        scores(run)
    sparse = scores(run, Change(back=3))
    assert not sparse.index.empty
    pd.testing.assert_frame_equal(sparse, whole.loc[whole.index % 3 == 0])


# -- norm against hessian, by rule ---------------------------------------------------------

SMALL = REFERENCE / "small-signals.tar.xz"


def test_each_rule_has_the_numbers_of_the_figure_that_draws_it() -> None:
    runs = find_measured(load_all(SMALL))
    assert {run.name for run in runs} == {"low"}
    found = kappas(runs).groupby("rule")[["kappa", "control"]].mean()
    _, pairs = figure3.agreement(runs, 3, 0.5)
    by = pairs.set_index(["a", "b"])["kappa"]
    paper = found.loc[RULES[0]]
    assert paper["kappa"] == pytest.approx(by[figure3.NORM, figure3.EVAL])
    assert paper["control"] == pytest.approx(by[figure3.EVAL, figure3.CONTROL])
    for rule, absolute in ((RULES[1], False), (RULES[2], True)):
        tables = unforced.scored(runs, unforced.Change(1, absolute))
        rows = unforced.over_seeds(unforced.pairs(tables))
        of = {frozenset((r["a"], r["b"])): r["kappa"] for r in rows.to_dict("records")}
        assert found.loc[rule, "kappa"] == pytest.approx(of[frozenset(("norm", "eigenvalue"))])
        control = of[frozenset(("eigenvalue", unforced.FIRST))]
        assert found.loc[rule, "control"] == pytest.approx(control)


def test_an_eigenvalue_of_every_third_epoch_is_scored_over_three() -> None:
    runs = find_measured(load_all(REFERENCE / "cifar10-resnet20.tar.xz"))
    assert {run.name for run in runs} == {"rank 4"}
    rows = table({"whole": runs})
    assert rows["n"].tolist() == [3, 3, 3]
    assert np.isfinite(rows["kappa"]).all()
    assert np.allclose(rows["gain"], rows["kappa"] - rows["control"])


def test_the_page_says_what_the_table_shows(tmp_path: Path) -> None:
    columns = [f"{name}{end}" for name in ("kappa", "gain") for end in ("", "_ci_low", "_ci_high")]
    numbers = [[0.5, 0.3, 0.7, -0.1, -0.3, 0.1], [0.1, -0.3, 0.5, 0.2, 0.1, 0.3]]
    said = norm_hessian.answer(pd.DataFrame(numbers, columns=columns).assign(n=5))
    assert "Of 2 pairs" in said
    assert "by chance in 1, and better than a control that reads nothing in 1" in said
    paths = norm_hessian.main((SMALL,), tmp_path)
    assert {path.name for path in paths} == {"norm-hessian.csv", "norm-hessian.md"}
    with pytest.raises(LackingError, match="recorded the eigenvalue"):
        find_measured(load_all(REFERENCE / "lm-demo.tar.xz"))
