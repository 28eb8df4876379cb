"""Every claim with its effect, interval and verdict, at the scale of the records.

::

    regimes figure campaign --scale cpu                # about 4 hours on two cores
    regimes figure claims runs
    regimes figure claims data/reference --out data/reference/claims.md    # the committed ones

An effect is one number per seed, its interval the 95 % t interval of their mean. The margin is one
point of accuracy (1 % of the perplexity), on all of CIFAR-10 0.3 points, chosen before the first
interval was computed.
`sentences` has what is claimed, `verdicts` how an interval becomes a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.base.console.units import interval_text, p_text
from regimes.base.errors import RecordError
from regimes.base.statistics import (
    LEAST,
    correct_by_holm,
    least_p,
    p_ranks,
    p_value,
    t_interval,
)
from regimes.plotting.groups import check_setting, check_there, tested_by
from regimes.records import Record, load_all, write_output
from regimes.records import summary as ends_of

from ..common.compare import LAST
from ..common.estimates import Cell, Row, as_table, number, p, word
from .pools import pool, same_code
from .sentences import PAPER, QUESTIONS, REGIME, Claim
from .verdicts import Outcome, outcome, verdict

TASK = ("workers", "data.name", "data.digest", "model", "metric")  # what schedules of a claim share
WIDTH = 200  # letters that twelve columns need
DECIDE = ("expect", "ci_low", "ci_high", "margin", "p_holm", "reached")  # arguments of `outcome`
ABOUT = (
    "The mean effect over n seeds with its 95 % t interval, and the smallest effect that matters. "
    "p: t test of no effect, two-sided; by ranks: exact signed-rank test, or ≥ and the least that "
    "n seeds can reach (5 or fewer cannot reach 0.05); Holm: p corrected over the claims of the "
    "item. Verdict: of the interval alone; better and worse are above and below zero. A claim of "
    "more is supported if the effect is better, with p (Holm) < 0.05 and a mean of the margin or "
    "more, and contradicted if an effect of the margin is excluded; a claim of no less is the "
    "opposite of more in the other direction. A sentence of the paper about networks that reach "
    "what ours do not (90 % on CIFAR-10) is not contradicted, but not reproduced at this scale. †: "
    "the runs are of different code."
)

# -- records to verdicts ---------------------------------------------------------------------


def find(folder: Path, source: str) -> list[Record]:
    """The records of a grid in a folder: a folder or an archive of its name; none if not there."""
    for path in (folder / source, folder / f"{source}.tar.xz"):
        if path.exists():
            return load_all(path)
    return []


def judge(folder: Path, claims: Sequence[Claim] = (*PAPER, *QUESTIONS)) -> pd.DataFrame:
    """One row per claim that has its records.

    Columns: item, claim, records, effect, n, mean, ci_low, ci_high (of a 95 % t interval; nan where
    all seeds are alike), margin, p, p_ranks, p_holm (within the item), verdict, outcome, and
    mixed: whether the runs are of different code, and reached: whether they are of the quality that
    the sentence is about.

    Raises:
        RecordError: no records of any claim in the folder, or blocks that cannot be pooled.
    """
    known: dict[str, list[Record]] = {}
    rows = []
    for claim in claims:
        blocks = {source: known.get(source) or find(folder, source) for source in claim.sources}
        known |= blocks
        if all(blocks.values()):
            only = len(blocks) == 1
            runs = blocks[claim.sources[0]] if only else pool(blocks, claim.schedules)
            rows.append(judge_one(claim, runs))
    if not rows:
        raise RecordError(
            f"{folder} has no records that a claim is about: expected folders or archives named "
            "like grids, e.g. small or small.tar.xz"
        )
    return with_outcomes(rows)


def with_outcomes(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `judge_one` with p_holm and outcome."""
    frame = pd.DataFrame(rows)
    frame["p_holm"] = frame.groupby("item", sort=False)["p"].transform(
        lambda p: correct_by_holm(p.to_list())
    )
    cells = zip(*(frame[name] for name in DECIDE), strict=True)
    frame["outcome"] = [outcome(*cell) for cell in cells]
    return frame


def judge_one(claim: Claim, runs: Sequence[Record]) -> dict[str, Any]:
    """A claim's row of `judge` without what the other claims of its item decide."""
    chosen = [run for run in runs if run.name in claim.schedules]
    check_there(runs, claim.schedules)
    check_setting(chosen, TASK)
    values = claim.effect(chosen)
    mean, low, high = t_interval(values)
    codes = [str(run.header.get("code", {}).get("digest")) for run in chosen]
    return {
        "item": claim.item,
        "claim": claim.says,
        "records": " + ".join(claim.sources),
        "effect": claim.name,
        "n": len(values),
        "mean": mean - claim.base,
        "ci_low": low - claim.base,
        "ci_high": high - claim.base,
        "margin": claim.margin,
        "p": p_value(values, claim.base),
        "p_ranks": p_ranks(values, claim.base),
        "verdict": verdict(low - claim.base, high - claim.base, claim.margin),
        "expect": claim.expect,
        "mixed": not same_code(codes),
        "reached": _reached(claim, runs),
    }


def _reached(claim: Claim, runs: Sequence[Record]) -> bool:
    """Does the best schedule reach what the sentence is about? Questions of ours are about any."""
    if claim in QUESTIONS:
        return True
    names = claim.sources[0], runs[0].config["data"]["name"]
    least, shown = next((REGIME[n] for n in names if n in REGIME), None), tested_by(runs[0])
    if least is None or shown.name != "accuracy":
        return False
    ends = ends_of(runs, LAST).groupby("name")["metric"].mean()
    return bool(shown.factor * ends.max() >= least)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per item: how many of its claims there are, and how many have each outcome."""
    kinds = [*get_args(Outcome)]
    counts = pd.crosstab(rows["item"], rows["outcome"]).reindex(columns=kinds, fill_value=0)
    counts.insert(0, "claims", counts.sum(axis=1))
    return counts.loc[rows["item"].unique()].rename_axis(columns=None).reset_index()


# -- verdicts to a table ---------------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    """Rows of `judge` as rounded text, the paper's first; an item is named once."""
    columns: dict[str, Cell] = {
        "item": word("item"),
        "claim": word("claim"),
        "effect": word("effect"),
        "n": word("n"),
        "mean [95 % interval]": _mean,
        "margin": number("margin", "g"),
        "p": p("p"),
        "p by ranks": _ranks,
        "p (Holm)": p("p_holm"),
        "verdict": word("verdict"),
        "the claim is": word("outcome"),
        "records": lambda row: row["records"] + " †" * row["mixed"],
    }
    once = rows["item"].where(rows["item"] != rows["item"].shift(), "")
    return as_table(rows.assign(item=once), columns, texts=3, ends=3)


def _mean(row: Row) -> str:
    few = "[one seed]" if row["n"] == 1 else "[two seeds]"
    missing = "[all alike]" if row["n"] >= LEAST else few
    return f"{row['mean']:+.2f} {interval_text(row['ci_low'], row['ci_high'], '+.2f') or missing}"


def _ranks(row: Row) -> str:
    least = least_p(row["n"])
    text = p_text(row["p_ranks"]) if least < 0.05 else f"≥ {least:.3g}"
    return "" if math.isnan(row["p"]) else text


def page(rows: pd.DataFrame) -> str:
    """The table as Markdown, below what its columns are."""
    return f"{ABOUT}\n\n{as_text(rows).markdown()}\n"


def main(folder: Path, out: Path | None = None, paper: bool = False) -> pd.DataFrame:
    """Print the verdict on every claim that has its records in FOLDER.

    Args:
        folder: of grids' records, each a folder or an archive of the grid's name.
        out: file for the same as Markdown.
        paper: only the paper's claims.
    """
    rows = judge(folder, PAPER if paper else (*PAPER, *QUESTIONS))
    if out:
        write_output(out, page(rows))
    items = summary(rows).astype(str)
    console = stdout.make_console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(as_text(rows).drawn(), "")
    console.print(Table(list(items.columns), items.to_numpy().tolist()).drawn(), "")
    console.print(ABOUT)
    return rows
