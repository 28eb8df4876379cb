"""The usable range of learning rates, by level of compression (the command `mechanism`).

Train each level at many rates, then draw; `grids/rates-smoke.toml` has the arms. The command writes
the figure ``mechanism`` and the table ``ranges``::

    regimes ablate rates-smoke --seeds 4 --first-seed 4000 --out runs/rates/smoke
    regimes figure mechanism runs/rates

A rate is *usable* for an arm by two rules, of the mean of a run's last three units (of the metric:
of the tests after them):

- *own best*: the metric is within a tolerance of the arm's metric at its own best rate;
- *loss*: the training loss is at most so many nats above the lowest of the arm ``dense``.

The range of a seed starts at the arm's best rate (of the mean over seeds) and goes up and down from
it. It ends where a line through the points, over the logarithm of the rate, first crosses the
limit; next to a run that is not finite, halfway between the two rates. A rate at which a run of the
arm is not finite is never its best; an arm with no other rate has no range. If the line does not
cross the limit within the rates that were tried, the range ends at the last of them; the table
counts such seeds: their range is at least as wide. A seed that is beyond the limit at the arm's
best rate has no range and is left out of n. Intervals are 95 % t intervals of the mean logarithm
over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Metric
from regimes.presets.own import AT
from regimes.records import Record, check_same_experiment, last_metric, load_all

from ..common.command import Files, Out, Several
from ..common.compare import LAST
from ..common.estimates import estimate
from ..common.names import ARMS, LATE
from . import usable_figure
from .usable_figure import NO_MOMENTUM
from .usable_figure import as_text as as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLERANCE = {"accuracy": 5.0, "bits per byte": 0.25}  # in the shown unit
LOSSES = (0.3, 1.0)  # nats above dense's lowest
REFERENCE = "dense"

# -- records to numbers ----------------------------------------------------------------------


def check_arms(runs: Sequence[Record]) -> None:
    """Check that the runs of an arm at a rate are one experiment, however names write the rate.

    Raises:
        RecordError: they are not.
    """
    by_arm: dict[tuple[str, float], list[Record]] = {}
    for run in runs:
        by_arm.setdefault((arm_of(run)[0], run.rate), []).append(run)
    for alike in by_arm.values():
        check_same_experiment(alike)


def arm_of(run: Record) -> tuple[str, bool]:
    """(arm of a run named "ARM at RATE", whether the name has that form); the arm includes what
    distinguishes runs of equal names."""
    arm, at, _ = run.config["name"].rpartition(AT)
    return f"{arm} ({run.variant})" if run.variant else arm, bool(at)


def entries(runs: Sequence[Record], shown: Metric) -> pd.DataFrame:
    """One row per run: arm, rate, momentum (nan of AdamW), seed, metric as it is shown, and
    training loss; nan where one of the last units has none (see `records.last_metric`).

    Raises:
        RecordError: an unfinished run, one without a rate in its name, two runs with the same arm,
            rate and seed, or runs tested by another metric.
    """
    rows = []
    for run in runs:
        run.check_finished()
        arm, at = arm_of(run)
        if not at:
            raise RecordError(
                f"{run.folder}: the name {run.name!r} does not have the form 'ARM at RATE': see "
                "`regimes presets mechanism` for grids that name their arms so"
            )
        if tested_by(run) != shown:
            raise RecordError(
                f"{run.folder} was tested by another metric than {shown.name}: draw it separately"
            )
        optimizer = run.config["optimizer"]
        momentum = optimizer.get("momentum") if optimizer.get("name") == "sgd" else None
        rows.append(
            {
                "arm": arm,
                "rate": run.rate,
                "seed": run.seed,
                "momentum": math.nan if momentum is None else momentum,
                shown.name: shown.factor * last_metric(run, LAST),
                "train_loss": run.epochs["train_loss"].astype(float).tail(LAST).mean(skipna=False),
            }
        )
    check_arms(runs)
    by_run = pd.DataFrame(rows)
    if (twice := by_run.duplicated(["arm", "rate", "seed"])).any():
        arm, rate, seed = by_run.loc[twice, ["arm", "rate", "seed"]].iloc[0]
        raise RecordError(f"two runs of {arm!r} at {rate:g} with seed {seed}")
    places = {arm: place for place, arm in enumerate([*ARMS, *LATE])}
    # Arms of another grid are nan, and so sorted to the end.
    place = by_run["arm"].str.partition(", momentum")[0].map(places)
    order = ["place", "arm", "rate", "seed"]
    return by_run.assign(place=place).sort_values(order, ignore_index=True).drop(columns="place")


def end(rates: Sequence[float], losses: Sequence[float], best: int, limit: float) -> float:
    """The first rate above ``best`` at which a line through the losses exceeds the limit.

    The line is linear in the logarithm of the rate. inf if it never does, nan if it does at
    ``best``.

    >>> end([1, 2, 4, 16], [0, 0, 1, 3], best=0, limit=2)  # halfway from 4 to 16 on a log scale
    8.0
    >>> end([1, 2, 4], [0, 1, math.nan], best=0, limit=2) == 8**0.5
    True
    """
    if not losses[best] <= limit:
        return math.nan
    for i in range(best, len(rates) - 1):
        if not losses[i + 1] <= limit:
            known = math.isfinite(losses[i + 1])
            share = (limit - losses[i]) / (losses[i + 1] - losses[i]) if known else 0.5
            return float(rates[i] ** (1 - share) * rates[i + 1] ** share)
    return math.inf


def rules(
    by_run: pd.DataFrame, shown: Metric, tolerance: float | None = None
) -> dict[str, tuple[str, pd.Series]]:
    """Per rule the column that it reads, and the largest loss that it allows each arm; nan where no
    rate has finite losses of all seeds. Metrics where higher is better are negated, so that lower
    is always better.

    Raises:
        RecordError: there is no rule: no tolerance of this metric, and no arm `REFERENCE`.
    """
    tolerance = TOLERANCE.get(shown.name, math.nan) if tolerance is None else tolerance
    best = _finite(_means(by_run, shown.name, shown)).groupby("arm").min()
    limits_by_rule = {}
    if not math.isnan(tolerance):
        limits_by_rule[f"own best within {tolerance:g} {shown.unit}"] = (
            shown.name,
            best + tolerance,
        )
    lowest = _finite(_means(by_run, "train_loss", shown)).groupby("arm").min()
    for more in LOSSES if REFERENCE in lowest else ():
        limits = pd.Series(lowest[REFERENCE] + more, index=lowest.index).where(lowest.notna())
        limits_by_rule[f"training loss within {more:g} of dense"] = ("train_loss", limits)
    if not limits_by_rule:
        raise RecordError(
            f"no rule says which rates are usable by {shown.name}: run the arm {REFERENCE!r}, too"
        )
    return limits_by_rule


def _means(by_run: pd.DataFrame, column: str, shown: Metric) -> pd.Series:
    """Mean losses by arm and rate; infinite where a seed has none."""
    loss = by_run[column] * (-1 if column == shown.name and not shown.lower else 1)
    means = loss.groupby([by_run["arm"], by_run["rate"]]).agg(lambda x: x.mean(skipna=False))
    return means.fillna(math.inf)


def _finite(means: pd.Series) -> pd.Series:
    return means.where(np.isfinite(means))


def ends(by_run: pd.DataFrame, shown: Metric, tolerance: float | None = None) -> pd.DataFrame:
    """One row per rule, arm and seed: the ends of the usable range, ``usable_min`` and
    ``usable_max``, 0 and inf where all rates on that side are usable, nan where none is; and the
    smallest and largest rate that was tried, ``tried_min`` and ``tried_max``.

    Args:
        tolerance: the loss of the metric that is allowed; default in `TOLERANCE`.

    Raises:
        RecordError: a seed was not run at an arm's best rate.
    """
    rows = []
    for rule, (column, limits) in rules(by_run, shown, tolerance).items():
        means = _means(by_run, column, shown)
        sign = -1 if column == shown.name and not shown.lower else 1
        for key, runs in by_run.groupby(["arm", "seed"], sort=False):
            arm, seed = str(key[0]), key[1]
            rates, losses = runs["rate"].to_list(), (sign * runs[column]).to_list()
            if (rate := means[arm].idxmin()) not in rates:
                raise RecordError(
                    f"{arm!r} has no run at {rate:g} with seed {seed}: run all rates "
                    "with the same seeds"
                )
            best = rates.index(rate)
            back = end(
                [1 / rate for rate in rates[::-1]], losses[::-1], len(rates) - 1 - best, limits[arm]
            )
            rows.append(
                {
                    "rule": rule,
                    "arm": arm,
                    "seed": seed,
                    "usable_min": 1 / back,
                    "usable_max": end(rates, losses, best, limits[arm]),
                    "tried_min": rates[0],
                    "tried_max": rates[-1],
                }
            )
    return pd.DataFrame(rows)


def table(by_run: pd.DataFrame, shown: Metric) -> pd.DataFrame:
    """One row per rule and arm: momentum, best rate, n of seeds that have a range; its smallest and
    largest rate, geometric means with 95 % t intervals; for how many seeds the range reaches the
    end of the rates tried (``_beyond``); and the largest usable rate divided by dense's with the
    same momentum, on common seeds."""
    ranges, rows = ends(by_run, shown), []
    best = _finite(_means(by_run, shown.name, shown))
    momentum = by_run.groupby("arm")["momentum"].first()
    for key, seeds in ranges.groupby(["rule", "arm"], sort=False):
        rule, arm = map(str, key)
        kept = seeds.dropna(subset="usable_max")
        row = {
            "rule": rule,
            "arm": arm,
            "momentum": momentum[arm],
            "best": best[arm].idxmin() if best[arm].notna().any() else math.nan,
            "n": len(kept),
        }
        for side, edge in (("usable_min", "tried_min"), ("usable_max", "tried_max")):
            beyond = kept[side].isin([0.0, math.inf])
            values = kept[side].where(~beyond, kept[edge]).to_numpy()
            row |= estimate(np.log(values), side, logs=True)
            row[f"{side}_beyond"] = int(beyond.sum())
        rows.append(row | _of_dense(ranges, rule, arm, momentum))
    return pd.DataFrame(rows)


def _of_dense(ranges: pd.DataFrame, rule: str, arm: str, momentum: pd.Series) -> dict[str, float]:
    """The largest usable rate over the dense arm's of the same optimiser, by seed; nan where
    no seed has both inside what was tried."""
    kinds = momentum.fillna(NO_MOMENTUM)
    dense = [
        name
        for name in kinds.index
        if name.partition(",")[0] == REFERENCE and kinds[name] == kinds[arm]
    ]
    wide = ranges[ranges["rule"] == rule].pivot(index="seed", columns="arm", values="usable_max")
    ratios = (wide[arm] / wide[dense[0]] if dense else pd.Series(dtype=float)).to_numpy()
    kept = ratios[np.isfinite(ratios) & (ratios > 0)]
    return estimate(np.log(kept), "of_dense", logs=True)


# -- the command ---------------------------------------------------------------------------


def figure(runs: Sequence[Record]) -> tuple[Figure, pd.DataFrame, pd.DataFrame]:
    """`usable_figure.figure` of runs, the means that it draws, and `table`."""
    shown = tested_by(runs[0])
    by_run = entries(runs, shown)
    rows = table(by_run, shown)
    return *usable_figure.figure(by_run, rows, _plain(runs), shown), rows


def _plain(runs: Sequence[Record]) -> Record:
    return next((run for run in runs if run.name.startswith(REFERENCE)), runs[0])


def main(records: Several, out: Out = None) -> list[Path]:
    """Draw metric and training loss against the rate, and print the usable range of each arm.

    The runs share network and data.
    """
    files, runs = Files(records[0], out), load_all(*records)
    drawn, points, rows = figure(runs)
    plain = _plain(runs)
    about = f"{style.describe_setting(plain)} ({plain.name.partition(AT)[0]})."
    texts = as_text(rows)
    files.page("ranges", about, *(replace(t, title=f"Usable: {rule}") for rule, t in texts.items()))
    files.figure("mechanism", (drawn, points))
    files.table("ranges", rows)
    return files.print_paths()
