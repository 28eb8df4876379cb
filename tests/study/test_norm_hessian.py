"""Norm against Hessian, by rule (oracles: Figure 3's and the agreement's own numbers on committed
records; runs made here, whose epochs are known)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.detection import norm_hessian, unforced
from analysis.detection.norm_hessian import RULES, find_measured, kappas, table
from analysis.paper import figure3
from regimes.base.errors import LackingError
from regimes.records import load_all

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
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
    rows = pd.DataFrame(
        [
            {"n": 5, "kappa": 0.5, "kappa_ci_low": 0.3, "kappa_ci_high": 0.7}
            | {"gain": -0.1, "gain_ci_low": -0.3, "gain_ci_high": 0.1},
            {"n": 5, "kappa": 0.1, "kappa_ci_low": -0.3, "kappa_ci_high": 0.5}
            | {"gain": 0.2, "gain_ci_low": 0.1, "gain_ci_high": 0.3},
        ]
    )
    said = norm_hessian.answer(rows)
    assert "Of 2 pairs" in said
    assert "by chance in 1, and better than a control that reads nothing in 1" in said
    paths = norm_hessian.main((SMALL,), tmp_path)
    assert {path.name for path in paths} == {"norm-hessian.csv", "norm-hessian.md"}
    with pytest.raises(LackingError, match="recorded the eigenvalue"):
        find_measured(load_all(REFERENCE / "smoke-full.tar.xz"))
