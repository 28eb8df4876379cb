"""Schedules compared, the paper's claims, runs that collapsed: numbers for templates."""

from __future__ import annotations

import functools
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from regimes.base.statistics import correct_by_holm
from regimes.records import find_runs, share_of_low, unpack_records
from regimes.records.selection import last_metric

from ...common import compare
from ...paper import published
from ...rates import collapse
from .. import claims
from ..effects import minus
from ..sources import REFERENCE, number, pooled, record_read, records, row_of, trials
from ..values import Interval, mean_of
from ..verdicts import NOT_REPRODUCED

# -- schedules -------------------------------------------------------------------------------


@number
def effect(source: str, a: str, b: str) -> Interval:
    """The metric of ``a`` minus the metric of ``b``, paired over seeds, in the unit of figures
    (accuracy in %)."""
    return mean_of(minus(a, b)(pooled(source, a, b)))


@number
def effect_in_epoch(source: str, a: str, b: str, epoch: int) -> Interval:
    """As `effect`, of the metric in one epoch (from 0)."""
    runs = [run for run in records(source) if run.name in (a, b)]
    rows = [
        {"name": run.name, "seed": run.seed, "metric": float(run.epochs["metric"][epoch])}
        for run in runs
    ]
    factor = compare.tested_by(runs[0]).factor
    differences = compare.paired_differences(pd.DataFrame(rows), a, b, "metric")
    return mean_of([factor * x for x in differences])


@number
def effect_by_seed(source: str, a: str, b: str) -> list[float]:
    """The differences that `effect` is the mean of, in the order of their seeds."""
    return minus(a, b)(records(source))


@number
def floats_of(source: str, a: str, b: str) -> float:
    """What ``a`` sends in a run, divided by what ``b`` sends, mean over their common seeds."""
    sent = {(run.name, run.seed): float(run.epochs["floats"].sum()) for run in records(source)}
    seeds = [seed for name, seed in sent if name == a and (b, seed) in sent]
    return fmean(sent[a, seed] / sent[b, seed] for seed in seeds)


@number
def difference_of_differences(source: str, a: str, b: str, c: str, d: str) -> Interval:
    """(a - b) - (c - d), paired over the seeds that all four have."""
    runs = pooled(source, a, b, c, d)
    names = {a, b, c, d}
    seeds = [{run.seed for run in runs if run.name == name} for name in names]
    shared = set.intersection(*seeds)
    runs = tuple(run for run in runs if run.name in names and run.seed in shared)
    both = (minus(one, other)(runs) for one, other in ((a, b), (c, d)))
    return mean_of([x - y for x, y in zip(*both, strict=True)])


@number
def family(source: str, *pairs: str) -> dict[str, Interval]:
    """Effects "a - b", with Holm's correction over all that are named."""
    effects = {pair: effect(source, *pair.split(" - ")) for pair in pairs}
    corrected = correct_by_holm([effect_of.p for effect_of in effects.values()])
    return {
        pair: Interval(effect_of.mean, effect_of.low, effect_of.high, effect_of.n, effect_of.p, p)
        for (pair, effect_of), p in zip(effects.items(), corrected, strict=True)
    }


@number
def reached(source: str, arm: str) -> dict[str, float]:
    """The metric of a schedule in the unit of figures: mean, sd over seeds, n, and its floats as a
    share of low compression's."""
    table, _ = compare.table(records(source), ())
    row = row_of(table, schedule=arm)
    return {
        "value": float(row[str(table.columns[2])]),  # the metric, under its own name
        "sd": float(row["sd"]),
        "n": int(row["logged"]),
        "of_low": float(row["of_low"]),
    }


@number
def of_low(source: str, arm: str) -> float:
    """Floats sent, divided by what low compression in every step would have sent; mean over
    seeds.

    Raises:
        ValueError: the runs have no level "low".
    """
    shares = [share_of_low(run.header, run.rows) for run in records(source) if run.name == arm]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        raise ValueError(f'{arm} of {source} has no level "low"')
    return fmean(known)


@number
def run_count(source: str) -> int:
    """Runs of an archive."""
    with unpack_records(record_read(f"{source}.tar.xz")) as folder:
        return len(find_runs(folder))


@number
def runs_of_code(source: str, digest: str) -> int:
    """Runs of an archive by code with a digest that begins so."""
    return sum(str(run.header["code"]["digest"]).startswith(digest) for run in records(source))


@number
def all_run_count() -> int:
    """Runs of all committed archives."""
    return sum(run_count(path.name.removesuffix(".tar.xz")) for path in archives())


def archives() -> list[Path]:
    every = record_read("*.tar.xz")  # a number of all archives changes with a new one
    return sorted(every.parent.glob(every.name))


@number
def trial(source: str, schedule: str, rate: float) -> dict[str, float]:
    """A trial's score on held-out data, as recorded: mean and sd over its seeds."""
    (row,) = (row for row in trials(source) if row["schedule"] == schedule and row["rate"] == rate)
    return {"value": fmean(row["scores"]), "sd": stdev(row["scores"])}


@number
def chosen_rate(source: str, arm: str) -> float:
    """The learning rate of an arm's runs."""
    (rate,) = {float(run.config["optimizer"]["lr"]) for run in records(source) if run.name == arm}
    return rate


@number
def last_values(source: str, arm: str) -> list[float]:
    """The metric of each run's end, see `records.selection.last_metric`, in ascending order."""
    return sorted(last_metric(run) for run in records(source) if run.name == arm)


@number
def last_value(source: str, arm: str) -> Interval:
    """The mean over runs of `last_values`, with its interval."""
    return mean_of(last_values(source, arm))


@number
def published_row(network: str, level: str) -> dict[str, float]:
    """The paper's accuracy on CIFAR-10 with PowerSGD (Table 1), in %, and floats as a share of its
    low compression's."""
    rows = published.tables()
    same = rows[(rows["table"] == 1) & (rows["model"] == network)].set_index("level")
    sent = same["printed"].astype(float)  # millions
    return {"value": float(same["accuracy"][level]), "of_low": float(sent[level] / sent.max())}


# -- the same runs, made again ---------------------------------------------------------------


def _ends(source: str) -> dict[tuple[str, int], float]:
    return {(run.name, run.seed): 100 * last_metric(run) for run in records(source)}


@number
def same_bits(before: str, again: str) -> int:
    """How many runs of the first archive have, bit for bit, the same metric at their end in the
    second."""
    old, new = _ends(before), _ends(again)
    return sum(old[key] == new[key] for key in old)


# -- claims ----------------------------------------------------------------------------------


@functools.cache
def _judged() -> pd.DataFrame:
    return claims.judge(REFERENCE)


def judged() -> pd.DataFrame:
    """Every claim with its verdict."""
    for claim in (*claims.PAPER, *claims.QUESTIONS):
        for source in claim.sources:
            record_read(f"{source}.tar.xz")
    return _judged()


def _of_paper(rows: pd.DataFrame) -> pd.Series:
    return rows["item"].isin({claim.item for claim in claims.PAPER})


@number
def paper_table() -> str:
    """The paper's claims and what the records say of each, a line for each figure."""
    rows = judged()
    found = claims.as_text(rows[_of_paper(rows)])
    lines: list[str] = []
    for row in (dict(zip(found.heads, cells, strict=True)) for cells in found.rows):
        said = f"{row['claim']}: *{row['the claim is'].removesuffix(' at this scale')}*"
        if row["item"]:
            lines.append(f"- **{row['item']}**, n = {row['n']}: {said}")
        else:
            lines[-1] += f"; {said}"
    return "\n".join(lines)


OUTCOMES = {"supported": "supported", "not_reproduced": NOT_REPRODUCED, "open": "open"}


@number
def claim_counts() -> dict[str, int]:
    """The paper's claims by outcome, at one shared learning rate and at each schedule's own;
    "others" counts the questions of the study itself."""
    rows = judged()
    paper = rows[_of_paper(rows)]
    tuned = paper["item"].str.contains("own rates") | paper["claim"].str.contains("of its own")
    counts: dict[str, int] = {"others": len(rows) - len(paper), "paper": len(paper)}
    for name, kept in (("shared", paper[~tuned]), ("own", paper[tuned])):
        for word, outcome in OUTCOMES.items():
            counts[f"{name}_{word}"] = int((kept["outcome"] == outcome).sum())
    return counts


@number
def claim(item: str, words: str) -> Interval:
    """The effect of the one claim of an item whose sentence has these words."""
    rows = judged()
    (row,) = rows[(rows["item"] == item) & rows["claim"].str.contains(words, regex=False)].to_dict(
        "records"
    )
    ends = row["mean"], row["ci_low"], row["ci_high"]
    return Interval(*ends, n=int(row["n"]), p=row["p"], p_holm=row["p_holm"])


@number
def outcome(item: str, words: str) -> str:
    """What becomes of that claim (`analysis.findings.verdicts`)."""
    rows = judged()
    (row,) = rows[(rows["item"] == item) & rows["claim"].str.contains(words, regex=False)].to_dict(
        "records"
    )
    return str(row["outcome"])


# -- collapsed runs --------------------------------------------------------------------------


@number
def collapsed(source: str, schedule: str) -> dict[str, Any]:
    """How many runs of a schedule end nearer to guessing than to the best schedule's median
    (`analysis.rates.collapse`)."""
    row = row_of(collapse.table(collapse.entries(records(source))), schedule=schedule)
    share = Interval(row["share"], row["share_ci_low"], row["share_ci_high"], n=int(row["n"]))
    return {"count": int(row["collapsed"]), "share": share, "others": float(row["accuracy"])}
