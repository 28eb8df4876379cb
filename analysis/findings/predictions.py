"""What was predicted of cifar10-fast before its runs, by the rules that its grids state: verdicts.

::

    regimes figure predictions runs/cifar10-fast runs/cifar10-fast-wide runs/cifar10-fast-signals \\
        runs/cifar10-fast-batch runs/cifar10-fast-topk --trials runs/tune/cifar10-fast/tune.json

Each prediction stands, numbered, at the head of its grid's file (``analysis/grids``), and here with
what refutes it. It *holds* where the whole 95 % interval lies in what was predicted. It is
*refuted* where its rule says so. It is *open* otherwise, and the table says why: the interval has
both values that agree and values that do not, an arm has no run that is finished, or seeds are
missing. Any of the records may be missing. A second table has the paper's claims about the same
runs (`claims`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import LackingError, RecordError
from regimes.base.statistics import LEAST, Range, pair_by_seed
from regimes.plotting.groups import decay_epochs
from regimes.records import Record, load_all, separate_experiments, summary

from ..common.command import Files, Out, Several, by_name
from ..common.compare import LAST
from ..common.estimates import Row, as_table, word
from . import claims
from .sentences import FAST, FAST_BATCH, FAST_SIGNALS, OF_FAST, Claim
from .values import Interval, mean_of

Verdict = Literal["holds", "refuted", "open"]
WIDE, TOPK = "cifar10-fast-wide", "cifar10-fast-topk"
GRIDS = (FAST, WIDE, FAST_SIGNALS, FAST_BATCH, TOPK)
HIGH_RATE = (10, 14)  # epochs of prediction 4
SHARED = 0.4  # the rate of all arms
BESIDE = (  # numbers of the predictions that are about each claim of the paper
    *(("3a",), (), ("8a",), ("12a",), ("12b",), ("9",), ("8c",), ("13a", "13b"), ("14",)),
    *(("batch 1",), ("batch 2",), ("batch 4",), ("5b",), ("11",)),
)
ENDS = ("mean", "ci_low", "ci_high")
NOTHING: dict[str, Any] = {"n": 0, **dict.fromkeys(ENDS, math.nan), "outcome": "open"}
BOTH = "the interval has both"

# -- what is measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What the predictions are held against.

    Attributes:
        runs: by grid, those that are finished.
        trials: test of rates, as `regimes tune` writes them.
    """

    runs: Mapping[str, Sequence[Record]]
    trials: Sequence[Mapping[str, Any]] = ()

    def of(self, grid: str, *arms: str) -> list[list[Record]]:
        """The runs of each arm.

        Raises:
            LackingError: one has none.
        """
        found = [[run for run in self.runs.get(grid, ()) if run.name == arm] for arm in arms]
        if missing := [arm for arm, runs in zip(arms, found, strict=True) if not runs]:
            raise LackingError(f"no finished run of {', '.join(missing)}")
        return found


Measure = Callable[[Evidence, str], Sequence[float]]  # one number per seed, of a grid


def _paired(evidence: Evidence, grid: str, a: str, b: str, column: str) -> pd.DataFrame:
    """A column of both arms, by seed."""
    runs = [run for arm in evidence.of(grid, a, b) for run in arm]
    rows = summary(runs, LAST)
    known = {(run.name, run.seed): run for run in runs}
    first, last = HIGH_RATE
    metrics = [known[key].epochs["metric"] for key in zip(rows["name"], rows["seed"], strict=True)]
    rows["early"] = [float(metric[first : last + 1].mean()) for metric in metrics]
    if not {*rows.loc[rows["name"] == a, "seed"]} & {*rows.loc[rows["name"] == b, "seed"]}:
        raise LackingError(f"{a} and {b} have no seed in common")
    return pair_by_seed(rows, a, b, column)


def minus(a: str, b: str, column: str = "metric") -> Measure:
    """Points of accuracy that ``a`` is above ``b``: at the end, or "early", at the high rate."""

    def values(evidence: Evidence, grid: str) -> list[float]:
        wide = _paired(evidence, grid, a, b, column)
        return (100 * (wide[a] - wide[b])).to_list()

    return values


def share_of_floats(a: str, b: str) -> Measure:
    """What ``a`` sends, in % of what ``b`` sends."""

    def values(evidence: Evidence, grid: str) -> list[float]:
        wide = _paired(evidence, grid, a, b, "floats")
        return (100 * wide[a] / wide[b]).to_list()

    return values


def end_of(arm: str) -> Measure:
    """Accuracy at the end, in %."""

    def values(evidence: Evidence, grid: str) -> list[float]:
        (runs,) = evidence.of(grid, arm)
        return (100 * summary(runs, LAST)["metric"]).to_list()

    return values


def width(evidence: Evidence, grid: str) -> list[float]:
    """Points that full width is above the mean of dense, which has all its seeds."""
    dense = end_of("dense")(evidence, grid)
    if not evidence.runs.get(WIDE):
        raise LackingError("no finished run at full width")
    wide = end_of("dense")(evidence, WIDE)
    if len(dense) < LEAST:
        raise LackingError(f"n = {len(dense)} of {LEAST} of dense")
    return [each - fmean(dense) for each in wide]


def made_up_for(evidence: Evidence, grid: str) -> list[float]:
    """How many points less rank 1 loses to rank 4 if each has the best of its rates (held-out
    images, one seed)."""
    lost = lost_by_rank_1(evidence)
    return [lost["shared"] - lost["own"]]


def lost_by_rank_1(evidence: Evidence) -> dict[str, float]:
    """Points of held-out accuracy that rank 1 loses to rank 4, one seed: at the "shared" rate, and
    each at its "own" best rate; and these rates, by arm.

    Raises:
        LackingError: trials are missing, or an arm chose an end of its list.
    """
    best, shared, found = list[float](), list[float](), dict[str, float]()
    for arm in ("rank 4", "rank 1"):
        rows = [row for row in evidence.trials if row["schedule"] == arm and row["scores"]]
        rates = {float(row["values"].rpartition("=")[2]): fmean(row["scores"]) for row in rows}
        if SHARED not in rates or len(rates) < LEAST:
            raise LackingError(f"trials of {arm} are missing")
        chosen = max(rates, key=lambda rate: rates[rate])
        if chosen in (min(rates), max(rates)):
            raise LackingError(f"{arm} chose {chosen:g}, an end of its list of rates")
        best.append(rates[chosen])
        shared.append(rates[SHARED])
        found[arm] = chosen
    gaps = {"shared": 100 * (shared[0] - shared[1]), "own": 100 * (best[0] - best[1])}
    return found | gaps


def _norms(run: Record) -> pd.Series:
    """The norm of all layers together, by epoch."""
    if run.statistic not in run.layers:
        raise LackingError(f"no {run.statistic} of {run.name}")
    of_epoch = run.layers.groupby("epoch")[run.statistic]
    return of_epoch.apply(lambda norms: float(np.sqrt((norms**2).sum(skipna=False))))


def rise_of_norm(evidence: Evidence, grid: str) -> list[float]:
    """The smallest, over the decays, of the norm in the first epoch after a decay over that in the
    last before it."""
    values = []
    for run in evidence.of(grid, "rank 4")[0]:
        norm = _norms(run)
        values.append(min(norm[at] / norm[at - 1] for at in decay_epochs(run)))
    return values


def fall_of_norm(evidence: Evidence, grid: str) -> list[float]:
    """The largest, over the decays and the two epochs after the first one, of a norm over that of
    the epoch before; below 1 where it falls each time."""
    values = []
    for run in evidence.of(grid, "rank 4")[0]:
        norm = _norms(run)
        after = [at + k for at in decay_epochs(run) for k in (1, 2)]
        values.append(max(norm[at] / norm[at - 1] for at in after))
    return values


def _eigenvalues(evidence: Evidence, grid: str) -> list[tuple[Record, pd.Series]]:
    found = []
    for run in evidence.of(grid, "rank 4")[0]:
        if "eigenvalue" not in run.epochs:
            raise LackingError(f"no eigenvalue in {grid}")
        found.append((run, run.epochs.set_index("epoch")["eigenvalue"]))
    return found


def first_eigenvalues(evidence: Evidence, grid: str) -> list[float]:
    """The eigenvalue of epoch 6 over that of epoch 0."""
    return [float(top[6] / top[0]) for _, top in _eigenvalues(evidence, grid)]


def eigenvalues_at_decays(evidence: Evidence, grid: str) -> list[float]:
    """The largest relative change, over the decays, from the last epoch before to the first after,
    in %."""
    return [
        max(100 * abs(top[at] / top[at - 1] - 1) for at in decay_epochs(run))
        for run, top in _eigenvalues(evidence, grid)
    ]


def largest_overlap(evidence: Evidence, grid: str) -> list[float]:
    """The largest share of the top 10 %, over the epochs, that gradients of 128 images share; %."""
    values = []
    for run in evidence.of(grid, "rank 4")[0]:
        lines = [line for line in run.details if line["instrument"] == "overlap"]
        if not lines:
            raise LackingError(f"no support overlap in {grid}")
        values.append(max(100 * float(line["sizes"]["128"]["mean"]) for line in lines))
    return values


# -- what was predicted ----------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A sentence at the head of a grid's file.

    Attributes:
        grid: whose file.
        number: its number there, with a letter where it says several things, and in another file
            than the first one's with a word before it.
        says: the sentence.
        refuted_by: what refutes it.
        measure: one number per seed.
        unit: of these.
        within: what is predicted.
        allowed: an interval outside of it refutes; default ``within``.
        of_mean: the rule is about the mean alone.
        seeds: how many were planned.
    """

    grid: str
    number: str
    says: str
    refuted_by: str
    measure: Measure
    within: Range
    unit: str = "points"
    allowed: Range | None = None
    of_mean: bool = False
    seeds: int = LEAST

    def verdict(self, found: Interval) -> tuple[Verdict, str]:
        """By the rule, with the reason where it is open.

        Where an interval has no ends, because one seed was planned or all seeds are alike, the rule
        is about the mean.
        """
        if found.n < self.seeds:
            return "open", f"n = {found.n} of {self.seeds}"
        known = not (self.of_mean or math.isnan(found.low))
        low, high = (found.low, found.high) if known else (found.mean, found.mean)
        least, most = self.allowed or self.within
        if high < least or low > most:
            return "refuted", ""
        least, most = self.within
        return ("holds", "") if least <= low and high <= most else ("open", BOTH)


def _below(most: float) -> Range:
    return -math.inf, most


def _above(least: float) -> Range:
    return least, math.inf


OUTSIDE = "an interval outside"
_of = partial(Prediction, FAST)
_once = partial(Prediction, FAST_SIGNALS, seeds=1)
_batch = partial(Prediction, FAST_BATCH)
_topk = partial(Prediction, TOPK)
PREDICTIONS = (
    _of(
        "1a",
        "Dense ends between 89 and 91 %.",
        "a mean outside",
        end_of("dense"),
        (89, 91),
        unit="%",
        of_mean=True,
    ),
    _of(
        "1b",
        "Full width ends 0.5 to 1.5 above it.",
        "a value outside, of the one run that was planned",
        width,
        (0.5, 1.5),
        seeds=1,
    ),
    _of(
        "2",
        "Rank 4 loses less than 0.5 to dense.",
        "an interval above 0.5",
        minus("dense", "rank 4"),
        _below(0.5),
    ),
    _of(
        "3a",
        "Rank 1 loses 1 to 4 to rank 4.",
        "an interval above 4 or below 1",
        minus("rank 4", "rank 1"),
        (1, 4),
    ),
    _of(
        "3b",
        "At own rates less than 1 of it is made up for.",
        "1 or more, in trials of one seed",
        made_up_for,
        _below(math.nextafter(1, 0)),
        seeds=1,
    ),
    _of(
        "4a",
        "At the high rate (mean of epochs 10 to 14) rank 1 is below rank 4 by more than 3.",
        "an interval below 3",
        minus("rank 4", "rank 1", "early"),
        _above(3),
    ),
    _of(
        "4b",
        "There ACCORDION (interval 1) is below rank 4 by more than 1.",
        "an interval below 1",
        minus("rank 4", "accordion", "early"),
        _above(1),
    ),
    _of(
        "5a",
        "ACCORDION (interval 1) sends less than 60 % of rank 4's floats.",
        "an interval above 60 %",
        share_of_floats("accordion", "rank 4"),
        _below(60),
        unit="%",
    ),
    _of(
        "5b",
        "It ends 0.3 to 1.5 below rank 4.",
        OUTSIDE,
        minus("rank 4", "accordion"),
        (0.3, 1.5),
    ),
    _of(
        "6a",
        "ACCORDION (interval 10) ends within 0.3 of rank 4.",
        OUTSIDE,
        minus("accordion 10", "rank 4"),
        (-0.3, 0.3),
    ),
    _of(
        "6b",
        "It sends 80 % of rank 4's floats or more.",
        "an interval below 80 %",
        share_of_floats("accordion 10", "rank 4"),
        _above(80),
        unit="%",
    ),
    _of(
        "7",
        "ACCORDION (interval 1) is no better than rank 2 throughout.",
        "an interval above 0",
        minus("accordion", "rank 2"),
        _below(0),
    ),
    _of(
        "8a",
        "Rank 4 in the critical 8 epochs ends within 0.5 of rank 4 throughout.",
        "an interval below -0.5",
        minus("critical 8", "rank 4"),
        (-0.5, 0.5),
        allowed=_above(-0.5),
    ),
    _of(
        "8b",
        "Rank 4 in the last 8 epochs does so as well.",
        "an interval below -0.5",
        minus("last 8", "rank 4"),
        (-0.5, 0.5),
        allowed=_above(-0.5),
    ),
    _of(
        "8c",
        "The critical 8 are not above the last 8 by more than 0.3.",
        "an interval above 0.3",
        minus("critical 8", "last 8"),
        _below(0.3),
    ),
    _of(
        "9",
        "Rank 1 in the critical 8, dense elsewhere, loses less than 0.5 to dense; the paper's "
        "Figure 2 expects an interval above 0.5.",
        "an interval above 0.5",
        minus("dense", "high in critical 8"),
        _below(0.5),
    ),
    _of(
        "10",
        "The ladder, which follows the decays alone, ends within 0.3 of rank 4.",
        OUTSIDE,
        minus("ladder 4-2-1", "rank 4"),
        (-0.3, 0.3),
    ),
    _of(
        "11",
        "Rank 1 longer ends above ACCORDION (interval 1); Figure 8 expects an interval below 0.",
        "an interval below 0",
        minus("rank 1 longer", "accordion"),
        _above(0),
    ),
    _of(
        "12a",
        "The norm of all layers is 1.2 times as high or more in the first epoch after a decay as "
        "in the last before it, at both decays.",
        "an interval below 1.2, of the smaller ratio",
        rise_of_norm,
        _above(1.2),
        unit="ratio",
    ),
    _of(
        "12b",
        "It falls in the two epochs after it, at both decays.",
        "an interval above 1, of the largest ratio of an epoch to the one before",
        fall_of_norm,
        _below(1),
        unit="ratio",
    ),
    _once(
        "13a",
        "The eigenvalue falls to a third or less from epoch 0 to 6.",
        "a ratio above a third, of the one run that was planned",
        first_eigenvalues,
        _below(1 / 3),
        unit="ratio",
    ),
    _once(
        "13b",
        "It does not move by more than a quarter at a decay.",
        "a larger change at a decay of that run",
        eigenvalues_at_decays,
        _below(25),
        unit="%",
    ),
    _once(
        "14",
        "Top-10 % supports of two gradients of 128 images share less than half of their "
        "coordinates in every epoch.",
        "half or more in an epoch of that run",
        largest_overlap,
        _below(math.nextafter(50, 0)),
        unit="%",
    ),
    _batch(
        "batch 1",
        "Large batches throughout lose 2 to 10 points to small ones.",
        OUTSIDE,
        minus("small-batch", "large-batch"),
        (2, 10),
    ),
    _batch(
        "batch 2",
        "Small batches in the critical 8 epochs end within 1 point of small throughout; the paper "
        "expects so, too.",
        "an interval below -1",
        minus("small-in-critical", "small-batch"),
        (-1, 1),
        allowed=_above(-1),
    ),
    _batch(
        "batch 3",
        "Small batches in the last 8 end as high; the paper expects an interval above 0.5.",
        "an interval of the critical 8 minus the last 8 above 0.5",
        minus("small-in-critical", "small in the last 8"),
        _below(0.5),
    ),
    _batch(
        "batch 4",
        "Large batches in the critical 8, small elsewhere, lose less than 1 point to small "
        "throughout; the paper expects an interval above 1.",
        "an interval above 1",
        minus("small-batch", "large-in-critical"),
        _below(1),
    ),
    _topk(
        "TopK 1",
        "TopK 10 % loses less than 0.5 to TopK 99 %; the paper's Table 3 expects 0.5 to 1.1.",
        "an interval above 0.5",
        minus("low", "high"),
        _below(0.5),
    ),
    _topk(
        "TopK 2a",
        "ACCORDION (interval 1) ends within 0.3 of TopK 99 %.",
        OUTSIDE,
        minus("accordion", "low"),
        (-0.3, 0.3),
    ),
    _topk(
        "TopK 2b",
        "It ends within 0.3 of TopK 10 %.",
        OUTSIDE,
        minus("accordion", "high"),
        (-0.3, 0.3),
    ),
)


# -- records to verdicts ---------------------------------------------------------------------


def gather(
    named: Mapping[str, Iterable[Record]], trials: Sequence[Mapping[str, Any]] = ()
) -> Evidence:
    """The finished runs of each grid."""
    runs = {
        grid: [run for run in separate_experiments(given) if run.rows and run.finished]
        for grid, given in named.items()
    }
    return Evidence(runs, trials)


def judge(evidence: Evidence, predictions: Sequence[Prediction] = PREDICTIONS) -> pd.DataFrame:
    """One row per prediction: grid, number, says, refuted_by, unit, n, mean, ci_low, ci_high (nan
    for fewer than three seeds), verdict, and why it is open."""
    rows = []
    for each in predictions:
        try:
            found = mean_of(each.measure(evidence, each.grid))
            verdict, why = each.verdict(found)
        except LackingError as error:
            found, verdict, why = Interval(math.nan, math.nan, math.nan), "open", str(error)
        row: dict[str, Any] = {"grid": each.grid, "number": each.number, "says": each.says}
        row |= {"refuted_by": each.refuted_by, "unit": each.unit, "n": found.n}
        row |= {"mean": found.mean, "ci_low": found.low, "ci_high": found.high}
        rows.append({**row, "verdict": verdict, "why": why})
    return pd.DataFrame(rows)


def judge_claims(evidence: Evidence, predicted: pd.DataFrame) -> pd.DataFrame:
    """One row per claim of the paper: item, claim, effect, n, mean, ci_low, ci_high, outcome, why
    it is open where runs are missing, and the verdicts on the predictions beside it.

    Args:
        predicted: rows of `judge`.
    """
    lacks = [_lacks(evidence, claim) for claim in OF_FAST]
    judged = [
        claims.judge_one(claim, evidence.runs[claim.sources[0]])
        for claim, why in zip(OF_FAST, lacks, strict=True)
        if not why
    ]
    known = iter(claims.with_outcomes(judged).to_dict("records") if judged else ())
    verdicts = dict(zip(predicted["number"], predicted["verdict"], strict=True))
    rows = []
    for claim, why, numbers in zip(OF_FAST, lacks, BESIDE, strict=True):
        found = NOTHING if why else next(known)
        few = f"n = {found['n']}" if found["n"] < LEAST else ""
        rows.append(
            {"item": claim.item, "claim": claim.says, "effect": claim.name}
            | {column: found[column] for column in NOTHING}
            | {"why": why or few}
            | {"predictions": "; ".join(f"{number} {verdicts[number]}" for number in numbers)}
        )
    return pd.DataFrame(rows)


def _lacks(evidence: Evidence, claim: Claim) -> str:
    """What is missing for a claim; empty where nothing is."""
    try:
        arms = evidence.of(claim.sources[0], *claim.schedules)
    except LackingError as error:
        return str(error)
    shared = set.intersection(*({run.seed for run in arm} for arm in arms))
    return "" if shared else f"{' and '.join(claim.schedules)} have no seed in common"


# -- verdicts to tables ----------------------------------------------------------------------


def _measured(row: Row) -> str:
    if math.isnan(row["mean"]):
        return ""
    text = Interval(row["mean"], row["ci_low"], row["ci_high"], n=row["n"]).text(2)
    return f"{text} %" if row["unit"] == "%" else text


def _claimed(row: Row) -> str:
    if math.isnan(row["mean"]):
        return ""
    return Interval(row["mean"], row["ci_low"], row["ci_high"]).text(2, sign=True)


def _with_reason(column: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        said = str(row[column]).removesuffix(" at this scale")
        return f"{said}: {row['why']}" if row["why"] else said

    return text


COLUMNS = {
    "prediction": word("number"),
    "says": word("says"),
    "refuted by": word("refuted_by"),
    "measured [95 %]": _measured,
    "n": word("n"),
    "verdict": _with_reason("verdict"),
}
CLAIMED = {
    "of the paper": word("item"),
    "claim": word("claim"),
    "effect": word("effect"),
    "mean [95 %]": _claimed,
    "n": word("n"),
    "the claim is": _with_reason("outcome"),
    "predictions": word("predictions"),
}


def as_text(rows: pd.DataFrame) -> Table:
    """Rows of `judge` as rounded text."""
    return as_table(rows, COLUMNS, texts=3, ends=1)


def claims_as_text(rows: pd.DataFrame) -> Table:
    """Rows of `judge_claims` as rounded text."""
    return as_table(rows, CLAIMED, texts=3, ends=2)


def read_trials(path: Path) -> list[dict[str, Any]]:
    """The trials that `regimes tune` has written."""
    return list(json.loads(path.read_text(encoding="utf-8"))["trials"])


def main(records: Several, out: Out = None, trials: Path | None = None) -> list[Path]:
    """Print what the records say of each prediction about cifar10-fast and of the paper's claims.

    Args:
        records: of the grids cifar10-fast, its -wide, -signals, -batch and -topk, by these names;
            any of them.
        trials: of learning rates, the file tune.json.
    """
    files, paths = Files("predictions", out), by_name(records)
    if strange := [name for name in paths if name not in GRIDS]:
        raise RecordError(f"{paths[strange[0]]}: expected a name of {', '.join(GRIDS)}")
    named = {name: load_all(path) for name, path in paths.items()}
    evidence = gather(named, read_trials(trials) if trials else ())
    rows = judge(evidence)
    paper = judge_claims(evidence, rows)
    files.table("predictions", rows)
    files.table("claims", paper)
    counts = rows["verdict"].value_counts()
    about = "; ".join(f"{counts.get(said, 0)} {said}" for said in ("holds", "refuted", "open"))
    files.page("predictions", f"{about}.", as_text(rows), claims_as_text(paper))
    return files.print_paths()
