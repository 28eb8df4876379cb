"""Harm of pulses by the unit where they start, and scores of the trunk's signals against it.

Branches of one trunk, with one pulse each (`grids/harm-lm.toml` is a tree of them)::

    regimes ablate harm-lm --seeds 3 --first-seed 11000 --out runs/harm-lm
    regimes figure criticality runs/harm-lm
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from regimes.base.console.tables import Table
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Metric
from regimes.records import load_all

from ..common.command import Files, Out, Records
from ..common.estimates import as_table, mean, number, p, word
from . import draw, harm, measured, scores


def onset_table(curve: pd.DataFrame, shown: Metric) -> Table:
    """`harm.curve`, rounded."""
    columns = {
        "pulse": word("arm"),
        "from": word("onset"),
        "units left": word("left"),
        "n": word("n"),
        "without": number("without", f".{max(2, shown.digits - 1)}f"),
        f"harm, {shown.unit} [95 %]": mean("harm", f"+.{shown.digits + 1}f"),
        "right after": number("after", f"+.{shown.digits + 1}f"),
        "p (Holm)": p("p_holm"),
    }
    return replace(as_table(curve, columns, 1), title="Harm by onset")


def tables(
    curve: pd.DataFrame, arms: pd.DataFrame, scored: pd.DataFrame, dull: pd.DataFrame, shown: Metric
) -> tuple[Table, ...]:
    """`harm.curve`, `harm.arms`, `scores.over_seeds` and `scores.against_dull`, rounded."""
    each = {
        "pulse": word("arm"),
        "onsets": word("onsets"),
        "n": word("n"),
        "reliability": number("reliability", ".2f"),
        "spread": number("spread", f".{shown.digits + 1}f"),
        "right after and end, rank corr. [95 %]": mean("after", "+.2f"),
    }
    signals = {
        "signal": word("signal"),
        "n": word("n"),
        "rank corr. [95 %]": mean("rank", "+.2f"),
        "p (Holm)": p("p_holm"),
        "area [95 %]": mean("auc", ".2f"),
    }
    compared = {
        "signal": word("arm"),
        "minus": word("control"),
        "n": word("n"),
        "rank corr. [95 %]": mean("difference", "+.2f"),
        "p (Holm)": p("p_holm"),
    }
    made = [("Each pulse", arms, each, 1)]
    made += [
        (f"Signals of the trunk: {arm}", rows, signals, 1)
        for arm, rows in scored.groupby("arm", sort=False)
    ]
    made += [
        (f"Measured signals minus those that measure nothing: {arm}", rows, compared, 2)
        for arm, rows in dull.groupby("of", sort=False)
    ]
    parts = [as_table(rows, columns, words) for _, rows, columns, words in made]
    titled = [replace(table, title=title) for table, (title, *_) in zip(parts, made, strict=True)]
    return onset_table(curve, shown), *titled


def main(records: Records, out: Out = None, known: bool = False, last: int = 1) -> list[Path]:
    """Draw harm by onset and recovery, and score the trunk's signals.

    Args:
        records: a folder of branches and their trunk, or an archive of it.
        known: score what is known before a pulse, not the values in its units.
        last: how many units at the end are averaged; with more than one, units of a late pulse may
            be among them.
    """
    runs = load_all(records)
    found = measured.pair_branches(runs)
    trunks = measured.list_trunks(found)
    units = measured.by_unit(found)
    each = measured.by_run(units, last)
    signals = scores.by_seed(trunks, runs)
    by_seed = scores.scores(each, signals, known)
    curve, arms, scored = harm.curve(each), harm.arms(each), scores.over_seeds(by_seed)
    recovered, dull = harm.recovery(units), scores.against_dull(by_seed)
    files = Files(records, out)
    figure = draw.figure(trunks[0], curve, recovered, scored, signals, known)
    files.figure("criticality", figure)
    for name, rows in (("onsets", curve), ("pulses", arms), ("runs", each)):
        files.table(f"criticality-{name}", rows)
    files.table("criticality-recovery", recovered)
    for name, rows in (("scores", scored), ("scores-by-seed", by_seed), ("against-dull", dull)):
        files.table(f"criticality-{name}", rows)
    files.page("criticality", "", *tables(curve, arms, scored, dull, tested_by(trunks[0])))
    return files.print_paths()
