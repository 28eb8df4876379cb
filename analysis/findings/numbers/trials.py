"""Jobs that ask themselves by trials (``policies.trial``): numbers for templates."""

from __future__ import annotations

import numpy as np

from regimes.config import DENSE
from regimes.console.tables import Table
from regimes.plotting.style import seeds_in_words
from regimes.plotting.trials import tabulate_harms
from regimes.records import Record

from ...tournament.equal_floats import at_same_floats
from ..sources import entries, number, records
from ..values import Interval, mean_of
from .tournaments import arms

RANKS = ["rank 1", "rank 2", "rank 4"]


def _of(source: str, arm: str) -> list[Record]:
    return [run for run in records(source) if run.name == arm]


def _levels(run: Record) -> list[set[str]]:
    """Those of the compressed layers, by unit."""
    return [{*row["layers"]["level"]} - {DENSE} for row in run.rows]


# -- what the policy does --------------------------------------------------------------------


@number
def minus_rank_at_bytes(source: str, arm: str, priced: bool = True) -> Interval:
    """Minus one rank throughout at the arm's bytes, on lines over their logarithm.

    Args:
        priced: with the bytes of the arm's trials.
    """
    runs, metric = entries(source)
    runs = runs.assign(floats=runs["bytes"])
    if not priced:
        price = {(run.name, run.seed): float(run.trials["bytes"].sum()) for run in records(source)}
        keys = zip(runs["name"], runs["seed"], strict=True)
        runs["floats"] -= [price[key] for key in keys]
    return mean_of(at_same_floats(runs, arm, RANKS, metric.name))


@number
def against_another(source: str, arm: str, other: str) -> Interval:
    """One arm minus one rank at its bytes, less what another one has."""
    runs, metric = entries(source)
    runs = runs.assign(floats=runs["bytes"])
    mine, others = (at_same_floats(runs, name, RANKS, metric.name) for name in (arm, other))
    return mean_of([a - b for a, b in zip(mine, others, strict=True)])


@number
def trial_price(source: str, arm: str, level: str, alone: str) -> float:
    """Bytes of an arm in the units in which it is at a level, beside those of the arm that is at
    it throughout; the mean over runs that have such units."""
    plain = {run.seed: run.epochs["bytes"].mean() for run in _of(source, alone)}
    shares = []
    for run in _of(source, arm):
        sent = run.epochs["bytes"][[levels == {level} for levels in _levels(run)]]
        shares += [float(sent.mean() / plain[run.seed])] if len(sent) else []
    return float(np.mean(shares))


@number
def trial_levels(source: str, arm: str, level: str, decay: int) -> dict[str, int]:
    """How many runs there are, how many left a level before unit ``decay``, how many are at it in
    the last unit, and in how many it was shown to harm."""
    runs = _of(source, arm)
    harmed = [tabulate_harms(run) for run in runs]
    return {
        "runs": len(runs),
        "left": sum(any(levels != {level} for levels in _levels(run)[:decay]) for run in runs),
        "back": sum(_levels(run)[-1] == {level} for run in runs),
        "harmed": sum(bool(table["shown"].any()) for table in harmed),
    }


@number
def trial_table(source: str) -> str:
    """Every arm from few bytes to many: rate, metric, bytes, and the arm minus one rank at its
    bytes."""
    rows, metric = arms(source).reset_index().sort_values("bytes"), entries(source)[1]
    form = f".{metric.digits}f"
    lines = []
    for row in rows.to_dict("records"):
        name, minus = str(row["arm"]), ""
        if name not in (*RANKS, DENSE):
            found = minus_rank_at_bytes(source, name)
            minus = f"{found.mean:+{form}} [{found.low:+{form}}, {found.high:+{form}}]"
        lines.append(
            [
                name,
                f"{row['rate']:g}",
                f"{row[metric.name]:{form}} [{row['ci_low']:{form}}, {row['ci_high']:{form}}]",
                f"{100 * row['bytes_of_dense']:.1f}",
                minus,
            ]
        )
    seeds = seeds_in_words(rows["n"].to_list())
    heads = ["arm", "rate", f"{metric.heading} [95 %], {seeds}", "bytes, % of dense"]
    return Table([*heads, "minus one rank, same bytes [95 %]"], lines).markdown()
