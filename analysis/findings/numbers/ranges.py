"""Usable learning rates and the edge of stability: numbers for templates."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.plotting.looks import find_metric

from ...rates import edge, narrowing, quadratic, usable
from ..sources import number, records, row_of
from ..values import Interval, mean_of, of_ratios

# -- usable rates ----------------------------------------------------------------------------


@functools.cache
def _usable(source: str, metric: str) -> pd.DataFrame:
    runs = [run for name in source.split(" + ") for run in records(name)]
    return usable.entries(runs, find_metric(metric))


def usable_runs(source: str, metric: str = "accuracy") -> pd.DataFrame:
    """One row per run: arm, rate, seed, metric and training loss."""
    for name in source.split(" + "):
        records(name)  # marks the archive as read, also where the table is cached
    return _usable(source, metric)


def _table(source: str, metric: str) -> pd.DataFrame:
    usable_runs(source, metric)  # marks the archives as read, also where the table is cached
    return _cached_table(source, metric)


@functools.cache
def _cached_table(source: str, metric: str) -> pd.DataFrame:
    return usable.table(_usable(source, metric), find_metric(metric))


@number
def range_of(source: str, arm: str, rule: int = 0, metric: str = "accuracy") -> dict[str, Any]:
    """The largest usable rate of an arm by rule number ``rule``: divided by dense's, with an
    interval (``of_dense``), and as a rate (``end``); n; and the arm's best rate."""
    rows = _table(source, metric)
    row = row_of(rows, rule=rows["rule"].unique()[rule], arm=arm)
    ends = row["of_dense"], row["of_dense_ci_low"], row["of_dense_ci_high"]
    n = int(row["n"])
    return {"of_dense": Interval(*ends, n=n), "end": row["usable_max"], "n": n, "best": row["best"]}


@number
def best_train_loss(source: str, arm: str, metric: str = "accuracy") -> float:
    """The smallest mean training loss over all rates."""
    return float(_losses(source, "train_loss", metric)[arm].min())


@number
def rate_of_best_loss(source: str, arm: str) -> float:
    return float(_losses(source, "train_loss", "accuracy")[arm].idxmin())


def _losses(source: str, column: str, metric: str) -> pd.Series:
    return usable_runs(source, metric).groupby(["arm", "rate"])[column].mean()


@number
def smallest_rate(source: str, arm: str) -> float:
    return float(_losses(source, "train_loss", "accuracy")[arm].index.min())


@number
def bits_at(source: str, arm: str, rate: float) -> float:
    """Mean bits per byte at a rate; rate 0 stands for the best one."""
    means = _losses(source, "bits per byte", "bits per byte")[arm]
    return float(means[rate] if rate else means.min())


@number
def better_seeds(source: str, arm: str, rate: float, other: float) -> int:
    """Seeds that have fewer bits at one rate than at the other."""
    runs = usable_runs(source, "bits per byte")
    wide = runs[runs["arm"] == arm].pivot(index="seed", columns="rate", values="bits per byte")
    return int((wide[rate] < wide[other]).sum())


@number
def endless(source: str, arm: str, metric: str) -> int:
    """How many seeds have a usable range, by the first rule (against the arm's own best), that
    reaches the largest rate that was tried."""
    ends = usable.ends(usable_runs(source, metric), find_metric(metric))
    seeds = ends[(ends["arm"] == arm) & (ends["rule"] == ends["rule"].unique()[0])]
    return int(np.isinf(seeds["usable_max"]).sum())  # inf: all rates above the best are usable


@number
def end_of_rank(rank: int, rule: int = 0, points: float = 5.0) -> Interval:
    """The largest usable rate at a rank, divided by that of the low-pass filter which is as late
    as this rank; by rule number ``rule``, with a tolerance of so many ``points`` of accuracy."""
    runs = usable_runs("rates + rates-low-pass")
    ends = usable.ends(runs, find_metric("accuracy"), points)
    kept = ends[ends["rule"] == ends["rule"].unique()[rule]]
    wide = kept.pivot(index="seed", columns="arm", values="usable_max")
    return of_ratios(np.log(wide[f"rank {rank}"] / wide[f"low-pass as rank {rank}"]).to_list())


@number
def loss_of_lateness(rank: int) -> Interval:
    """Training loss of the low-pass filter which is as late as a rank, minus the loss of PowerSGD
    at that rank; each at the learning rate where its mean loss is smallest."""
    runs = usable_runs("rates + rates-low-pass")
    means = runs.groupby(["arm", "rate"])["train_loss"].mean()
    losses = runs.set_index(["arm", "rate", "seed"])["train_loss"]
    low_pass, powersgd = (
        losses[arm][means[arm].idxmin()] for arm in (f"low-pass as rank {rank}", f"rank {rank}")
    )
    return mean_of((low_pass - powersgd).to_list())


# -- early or late ---------------------------------------------------------------------------


def _when() -> pd.DataFrame:
    records("rates-when")  # marks the archive as read
    return _cached_when()


@functools.cache
def _cached_when() -> pd.DataFrame:
    return narrowing.losses(records("rates-when"))


@number
def when(nats: float, epochs: str) -> Interval:
    """The largest usable rate with rank 1 in six epochs (early, in the middle or late), divided by
    dense's. Usable: the loss is at most so many ``nats`` above dense's lowest. p is of the
    hypothesis that the last window has the same ratio."""
    rows = narrowing.table(_when())
    row = row_of(rows, limit=nats, window=f"epochs {epochs}")
    ends = row["ratio"], row["ratio_ci_low"], row["ratio_ci_high"]
    return Interval(*ends, n=int(row["n"]), p=row["p"])


@number
def loss_ratio(epochs: str, of: str = "") -> Interval:
    """Loss at rank 1 divided by dense's in a window, mean over rates up to 0.1; with ``of``, that
    ratio divided by another window's."""
    losses = _when()
    low_rates = losses[losses["rate"] <= 0.1]
    ratios = (low_rates["loss"] / low_rates["dense"]).map(math.log)
    logs = ratios.groupby([low_rates["window"], low_rates["seed"]]).mean()
    values = logs[f"epochs {epochs}"]
    return of_ratios((values - logs[f"epochs {of}"] if of else values).to_list())


@number
def early_gap(rate: float, minus: float = 0.0) -> Interval:
    """The loss of rank 1 minus dense's after epochs 2-7, in nats; with ``minus``, this gap minus
    the gap at that rate."""
    losses = _when()
    early = losses[losses["window"] == "epochs 2-7"]
    gaps = (early["loss"] - early["dense"]).groupby([early["rate"], early["seed"]]).mean()
    by_rate = gaps.unstack().T
    return mean_of((by_rate[rate] - by_rate[minus] if minus else by_rate[rate]).to_list())


@number
def least_early_gap(largest_rate: float) -> float:
    """The smallest mean `early_gap` over rates up to ``largest_rate``."""
    losses = _when()
    early = losses[(losses["window"] == "epochs 2-7") & (losses["rate"] <= largest_rate)]
    return float((early["loss"] - early["dense"]).groupby(early["rate"]).mean().min())


# -- the edge of stability -------------------------------------------------------------------


def _edge() -> pd.DataFrame:
    runs = records("rates-edge")
    return edge.table(edge.products(runs), runs[0].config["optimizer"]["warmup_epochs"])


@number
def product(rate: float, arm: str) -> Interval:
    """The top eigenvalue times the rate."""
    row = row_of(_edge(), rate=rate, arm=arm)
    return Interval(row["product"], row["product_ci_low"], row["product_ci_high"], n=int(row["n"]))


@number
def edge_of(momentum: float) -> float:
    return edge.edge(momentum)


# -- a quadratic -----------------------------------------------------------------------------


OF_DENSE = "of dense's"


@functools.cache
def _quadratic() -> pd.DataFrame:
    every = pd.concat([quadratic.lines(), quadratic.points()], ignore_index=True)
    return every.assign(of_dense=quadratic.of_dense(every))


@number
def quadratic_table() -> str:
    """A table of the largest stable rates, each divided by dense's: with error feedback, of filters
    that send the same share of the energy, and without error feedback. Momentum 0.5 stands
    in what `regimes figure quadratic` prints."""
    found = quadratic.as_text(_quadratic())
    cells = [dict(zip(found.heads, row, strict=True)) for row in found.rows]
    # the column without a heading says whether there is error feedback
    without = {
        (c["momentum"], c["level"]): c[OF_DENSE] for c in cells if c[""] == quadratic.WITHOUT
    }
    shown = ("momentum", "level", "sent", OF_DENSE, *quadratic.BESIDE)
    lines = [
        [*(c[name] for name in shown), without[c["momentum"], c["level"]]]
        for c in cells
        if c[""] == quadratic.WITH and c["level"] != "dense" and c["momentum"] != "0.5"
    ]
    heads = ["momentum", "level", "sent", "feedback", *quadratic.BESIDE, "no feedback"]
    return Table(heads, lines, texts=2).markdown()
