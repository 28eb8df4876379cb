"""Lemma 1 measured: the LASSO's numbers from scikit-learn's solutions, a network's from records.

No drawing here (`lasso`); the mathematics are in `model`. ``COLUMNS`` is the long
form of everything that is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from regimes.base.errors import RecordError, require
from regimes.base.statistics import t_interval
from regimes.records import Record

from ..common.compare import compressed_layers, group_runs
from .model import (
    Problem,
    Vector,
    density,
    holds,
    lower_bound,
    recovers,
    sample,
    solution,
    top,
    top_share,
)

FAMILIES = ("moments-frozen", "moments")  # at the end of an epoch, along it
COLUMNS = ["panel", "series", "x", "n", "mean", "ci_low", "ci_high"]
SIGMAS = tuple(np.geomspace(1e-4, 1, 25))
LAMBDAS = tuple(np.geomspace(3e-4, 0.9, 16))
SHAPES = (
    "mean-top10",
    "single-top10",
    "null-top10",
    "mean-density",
    "single-density",
    "null-density",
    "noise-density",
    "noise-in-top10",
    "resolved",
)


@dataclass(frozen=True)
class Setting:
    """The LASSO that is looked at.

    Attributes:
        nonzero: coordinates of mu that are not zero: alternating signs, 1 down to 0.5.
        lam: of the probabilities and the table; sigma: of the sparsity and the table.
        train: samples that a solution is fitted to.
        n: gradients that must all stay below gamma.
        epsilon: of the lemma.
        trials: draws of n per probability.
        draws: data sets per lam.
    """

    dimension: int = 200
    nonzero: int = 10
    lam: float = 0.1
    sigma: float = 0.3
    train: int = 1000
    n: int = 8
    epsilon: float = 0.05
    trials: int = 1000
    draws: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        some = f"1 to dimension = {self.dimension} coordinates"
        require(1 <= self.nonzero <= self.dimension, "nonzero", self.nonzero, some)
        for name in ("train", "n", "trials", "draws"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("lam", "sigma"):
            good = 0 < getattr(self, name) < np.inf
            require(good, name, getattr(self, name), "a positive number")
        require(self.seed >= 0, "seed", self.seed, "at least 0")
        require(0 < self.epsilon < 1, "epsilon", self.epsilon, "a number between 0 and 1")

    @property
    def mu(self) -> Vector:
        """The mean of the positive class."""
        values = np.linspace(1, 0.5, self.nonzero) * np.resize([1.0, -1.0], self.nonzero)
        return np.concatenate([values, np.zeros(self.dimension - self.nonzero)])

    def solved(self, lam: float, sigma: float, *key: int) -> Problem:
        """At scikit-learn's solution for a data set of its own."""
        rng = np.random.default_rng((self.seed, *key))
        x, y = sample(self.mu, sigma, self.train, rng)
        return Problem(self.mu, solution(x, y, lam), sigma, lam)

    @cached_property
    def there(self) -> Problem:
        """The solution for ``lam`` and ``sigma``."""
        return self.solved(self.lam, self.sigma, 0)

    @property
    def halfway(self) -> Problem:
        """Halfway from zero to there, as training passes it: the mean is still large."""
        return replace(self.there, w=self.there.w / 2)


def sparsity(s: Setting) -> pd.DataFrame:
    """Support sizes at the solution against lam; mean over data sets, 95 % t interval."""
    rows: list[tuple[Any, ...]] = []
    for i, lam in enumerate(LAMBDAS):
        problems = [s.solved(lam, s.sigma, 1, i, draw) for draw in range(s.draws)]
        sizes: dict[str, list[float]] = {
            "|supp w| + |supp μ|": [float(np.count_nonzero(p.w) + s.nonzero) for p in problems],
            "|supp E g|": [float(np.count_nonzero(p.mean)) for p in problems],
            "|supp w|": [float(np.count_nonzero(p.w)) for p in problems],
        }
        rows += [("sparsity", k, lam, s.draws, *t_interval(v)) for k, v in sizes.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def chances(s: Setting) -> pd.DataFrame:
    """Probabilities (95 % Clopper-Pearson interval) and bounds against sigma; halfway with w held,
    as in the lemma, and at the solution of each sigma."""
    rows: list[tuple[Any, ...]] = []
    for i, sigma in enumerate(SIGMAS):
        half, there = replace(s.halfway, sigma=sigma), s.solved(s.lam, sigma, 2, i)
        rng = np.random.default_rng((s.seed, 3, i))
        counts = {
            "halfway: noise below γ": holds(half, s.n, s.trials, rng),
            "halfway: top k is the support": recovers(half, s.trials, rng),
            "at the solution: noise below γ": holds(there, s.n, s.trials, rng),
        }
        for series, count in counts.items():
            ends = binomtest(count, s.trials).proportion_ci()
            rows.append((series, sigma, s.trials, count / s.trials, ends.low, ends.high))
        bounds = {
            "halfway: bound, exact variance": lower_bound(half, s.n),
            "halfway: bound, paper's variance": lower_bound(half, s.n, half.paper_variance),
        }
        rows += [(k, sigma, 1, max(v, 0.0), np.nan, np.nan) for k, v in bounds.items()]
    return pd.DataFrame([("chances", *row) for row in rows], columns=COLUMNS)


def shapes(s: Setting) -> pd.DataFrame:
    """The LASSO in the statistics of the ``moments`` instrument, at zero, halfway and there; here
    mean and variance are exact."""
    points = {"zero": replace(s.there, w=0 * s.there.w), "halfway": s.halfway, "there": s.there}
    table = {}
    for name, p in points.items():
        rng = np.random.default_rng((s.seed, 4))
        single = p.gradients(100, rng)
        null = rng.standard_normal(s.dimension) * np.sqrt(p.variance)
        values = {
            "mean-top10": top_share(p.mean, 10),
            "single-top10": float(np.mean([top_share(g, 10) for g in single])),
            "null-top10": top_share(null, 10),
            "mean-density": density(p.mean),
            "single-density": float(np.mean([density(g) for g in single])),
            "null-density": density(null),
            "noise-density": density(p.variance),
            "noise-in-top10": float(p.variance[top(p.mean, 10)].sum() / p.variance.sum()),
            "resolved": 1.0,
        }
        table[f"LASSO, {name}"] = values
    return pd.DataFrame(table)


def network(runs: Iterable[Record]) -> pd.DataFrame:
    """The same statistics of a training run, against epoch: mean over seeds, 95 % t interval.

    Panels: "moments" and "moments-frozen", as far as recorded, of the whole model's vector; with
    " in layers", the mean over the compressed layers.

    Raises:
        RecordError: no readings, or runs of several schedules.
    """
    by_schedule = group_runs(runs)
    if len(by_schedule) > 1:
        raise RecordError(
            f"runs of the schedules {', '.join(by_schedule)}: give the folder of one of them"
        )
    parts = [_of_run(run) for chosen in by_schedule.values() for run in chosen]
    frame = pd.concat(parts, ignore_index=True).dropna(subset="value")
    rows: list[tuple[Any, ...]] = []
    for key, group in frame.groupby(["panel", "series", "epoch"], sort=False):
        values = group["value"].to_list()
        rows.append((*key, len(values), *t_interval(values)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _of_run(run: Record) -> pd.DataFrame:
    inside = run.layers[
        run.layers["layer"].isin([layer["name"] for layer in compressed_layers(run)])
    ]
    parts = []
    for family in FAMILIES:
        columns = {f"{family}:{name}": name for name in SHAPES}
        if not set(columns) <= set(run.epochs):
            continue
        for panel, table in ((family, run.epochs), (f"{family} in layers", inside)):
            values = table[["epoch", *columns]].astype(float).groupby("epoch").mean()
            long = values.rename(columns=columns).reset_index().melt("epoch", var_name="series")
            parts.append(long.assign(panel=panel))
    if not parts:
        raise RecordError(
            f"{run.folder} recorded no moments of the gradient: switch the instrument on (--set "
            "instruments.moments-frozen.every=1)"
        )
    return pd.concat(parts, ignore_index=True)
