"""The network that trains on all of CIFAR-10 in 30 epochs: numbers for its page's template."""

from __future__ import annotations

from statistics import fmean

from regimes.base.console.tables import Table
from regimes.base.errors import LackingError
from regimes.records import summary

from ...common.compare import LAST
from .. import predictions
from ..predictions import FAST, WIDE, Evidence
from ..sources import number, record_read, records
from ..values import Interval, mean_of

TRIALS = f"{FAST}-tune.json"
# three seeds of 11 + 5 + 3 schedules (the grid, batches, TopK); one of signals, one at full width
PLANNED = 59


def _evidence() -> Evidence:
    """Of the archives that are there; a number of theirs changes with each that is added."""
    paths = {grid: record_read(f"{grid}.tar.xz") for grid in predictions.GRIDS}
    trials = record_read(TRIALS)
    return predictions.gather(
        {grid: records(grid) for grid, path in paths.items() if path.exists()},
        predictions.read_trials(trials) if trials.exists() else (),
    )


@number
def fast_predictions() -> str:
    """A table of what was predicted, and what the records say of it."""
    return predictions.as_text(predictions.judge(_evidence())).markdown()


@number
def fast_claims() -> str:
    """A table of the paper's claims, and what the records say of each."""
    evidence = _evidence()
    rows = predictions.judge_claims(evidence, predictions.judge(evidence))
    return predictions.claims_as_text(rows).markdown()


@number
def fast_counts() -> dict[str, int]:
    """How many runs have ended of those that are planned, how many predictions and claims there
    are, and how many of each verdict."""
    evidence = _evidence()
    rows = predictions.judge(evidence)
    verdicts = rows["verdict"].to_list()
    outcomes = predictions.judge_claims(evidence, rows)["outcome"].to_list()
    claimed = {"supported": outcomes.count("supported"), "claims_open": outcomes.count("open")}
    return {
        "runs": sum(map(len, evidence.runs.values())),
        "planned": PLANNED,
        "predictions": len(verdicts),
        **{verdict: verdicts.count(verdict) for verdict in ("holds", "refuted", "open")},
        "claims": len(outcomes),
        **claimed,
        "not": len(outcomes) - sum(claimed.values()),
    }


@number
def fast_arms() -> str:
    """A table of the schedules: n, accuracy at the end, floats, and the difference from rank 4."""
    evidence = _evidence()
    ends = summary(evidence.runs[FAST], LAST).groupby("name", sort=False)
    sent = ends["floats"].mean()
    rows = []
    for arm, runs in ends:
        share = f"{sent[arm] / sent['rank 4']:.2f}" if "rank 4" in sent else ""
        gap = "" if arm == "rank 4" else _gap(evidence, str(arm))
        rows.append([str(arm), str(len(runs)), f"{100 * runs['metric'].mean():.1f}", share, gap])
    heads = ["schedule", "n", "accuracy %", "floats, of rank 4's", "minus rank 4, points [95 %]"]
    return Table(heads, rows).markdown()


def _gap(evidence: Evidence, arm: str) -> str:
    both = [{run.seed for run in evidence.runs[FAST] if run.name == x} for x in (arm, "rank 4")]
    if not set.intersection(*both):
        return ""
    return mean_of(predictions.minus(arm, "rank 4")(evidence, FAST)).text(2, sign=True)


@number
def fast_own_rates() -> dict[str, float]:
    """`predictions.lost_by_rank_1`; empty where trials are missing."""
    try:
        return predictions.lost_by_rank_1(_evidence())
    except LackingError:
        return {}


@number
def fast_ceiling() -> Interval | None:
    """Accuracy at full width without compression, in %; None where no run is finished."""
    evidence = _evidence()
    if not evidence.runs.get(WIDE):
        return None
    return mean_of(predictions.end_of("dense")(evidence, WIDE))


@number
def fast_rates() -> str:
    """A table of the trials of rates on held-out images; empty where there are none."""
    tried: dict[str, dict[float, float]] = {}
    for row in _evidence().trials:
        if row["scores"]:
            rate = float(row["values"].rpartition("=")[2])
            tried.setdefault(row["schedule"], {})[rate] = 100 * fmean(row["scores"])
    if not tried:
        return ""
    rates = sorted({rate for scores in tried.values() for rate in scores})
    lines = [
        [arm, *(f"{scores[rate]:.1f}" if rate in scores else "" for rate in rates)]
        for arm, scores in tried.items()
    ]
    return Table(["held-out accuracy % at a rate of", *(f"{x:g}" for x in rates)], lines).markdown()
