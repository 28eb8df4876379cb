"""Arms at their own learning rates, compared at the same floats: numbers for templates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.plotting.looks import Metric
from regimes.plotting.style import seeds_in_words

from ...common import estimates
from ...common.estimates import Cell, as_table, mean, p, word
from ...common.paired import ALIKE, difference_text
from ...tournament import tournament
from ...tournament.equal_floats import comparisons, timings
from ..sources import entries, number, record_read, records, row_of, trials
from ..values import Interval, mean_of

# -- one arm ---------------------------------------------------------------------------------


@functools.cache
def _arms(source: str) -> pd.DataFrame:
    return tournament.table(*entries(source)).set_index("arm")


def arms(source: str) -> pd.DataFrame:
    record_read(f"{source}.tar.xz")
    return _arms(source)


CONTROL_WORDS = {"static": "one rank", "period": "a constant period"}


@number
def arms_table(source: str, control: str = "") -> str:
    """Every arm from few floats to many: rate, metric, floats, and the arm minus controls of one
    kind at its floats.

    Args:
        control: that kind; none: the table lacks these columns.
    """
    rows, metric = arms(source).reset_index(), entries(source)[1]
    columns = _arm_columns(rows, metric)
    if control:
        pairs = _pairs(source)
        against = pairs[(pairs["control"] == control) & (pairs["n"] > 0)].set_index("arm")
        for head, cell in (
            (f"minus {CONTROL_WORDS[control]}, same floats [95 %]", difference_text(metric)),
            ("p (Holm)", p("p_holm")),
        ):
            texts = {str(name): cell(row.to_dict()) for name, row in against.iterrows()}
            columns[head] = _of_arm(texts)
    return as_table(rows, columns).markdown()


def _arm_columns(rows: pd.DataFrame, metric: Metric) -> dict[str, Cell]:
    """Name, rate, metric and floats of a table of arms."""
    return {
        "arm": word("arm"),
        "rate": estimates.number("rate", "g"),
        f"{metric.heading} [95 %], {seeds_in_words(rows['n'].to_list())}": mean(
            metric.name, f".{metric.digits}f", ALIKE
        ),
        "floats, % of dense": lambda row: f"{100 * row['floats_of_dense']:.1f}",
    }


def _of_arm(texts: Mapping[str, str]) -> Cell:
    return lambda row: texts.get(row["arm"], "")


@number
def arm(source: str, name: str) -> dict[str, Any]:
    """One of them, with predicted seconds on a fast, a middle and a slow network."""
    row, metric = row_of(arms(source).reset_index(), arm=name), entries(source)[1]
    numbers = {key: float(row[key]) for key in ("rate", "floats", "bytes")}
    return {
        **numbers,
        "value": Interval(row[metric.name], row["ci_low"], row["ci_high"], n=int(row["n"])),
        "of_dense": float(row["floats_of_dense"]),
        "bytes_of_dense": float(row["bytes_of_dense"]),
        "bytes_minus_floats_share": float(row["bytes_of_dense"] - row["floats_of_dense"]),
        "seconds": [float(row[network]) for network in tournament.NETWORKS],
    }


@number
def floats_ratio(source: str, a: str, b: str) -> float:
    """Floats of ``a`` divided by floats of ``b``."""
    return float(arms(source)["floats"][a] / arms(source)["floats"][b])


@number
def identical(source: str, a: str, b: str) -> bool:
    """Do two arms end in the same numbers for every seed?"""
    runs, metric = entries(source)
    wide = runs.pivot(index="seed", columns="name", values=metric.name)
    return bool((wide[a] == wide[b]).all())


@number
def seed_value(source: str, name: str, seed: int) -> float:
    """The metric of one run."""
    runs, metric = entries(source)
    return float(runs.set_index(["name", "seed"])[metric.name][name, seed])


# -- against controls ------------------------------------------------------------------------


@functools.cache
def _comparisons(source: str) -> pd.DataFrame:
    return comparisons(*entries(source))


@functools.cache
def _timings(source: str) -> pd.DataFrame:
    return timings(*entries(source))


def _pairs(source: str, timing: bool = False) -> pd.DataFrame:
    record_read(f"{source}.tar.xz")
    return _timings(source) if timing else _comparisons(source)


def interval_of(row: Any) -> Interval:
    ends = row["difference"], row["ci_low"], row["ci_high"]
    return Interval(*ends, n=int(row["n"]), p=row["p"], p_holm=row["p_holm"])


def _row(rows: pd.DataFrame, name: str, control: str) -> Interval:
    return interval_of(row_of(rows, arm=name, control=control))


@number
def minus_control(source: str, name: str, control: str) -> Interval:
    """An arm minus controls of one kind at its floats (see `analysis.tournament.equal_floats`)."""
    return _row(_pairs(source), name, control)


@number
def timing(source: str, name: str, control: str) -> Interval:
    """A control minus another kind of control, which has rank 4 at other times."""
    return _row(_pairs(source, timing=True), name, control)


@number
def minus_control_without_seed(source: str, name: str, control: str, seed: int) -> Interval:
    """`minus_control` without one seed."""
    runs, metric = entries(source)
    return _row(comparisons(runs[runs["seed"] != seed], metric), name, control)


@number
def comparisons_table(source: str) -> str:
    """All comparisons of an archive, a column for each kind of control."""
    rows, metric = _pairs(source), entries(source)[1]
    text, cells = difference_text(metric), rows.set_index(["arm", "control"]).to_dict("index")
    controls = [*dict.fromkeys(rows["control"])]
    lines = [
        [arm, *(text(cells[arm, control]) for control in controls)]
        for arm in dict.fromkeys(rows["arm"])
    ]
    heads = ["arm", *(f"minus {control}, {metric.unit} [95 %]" for control in controls)]
    return Table(heads, lines).markdown()


def _summed_up(rows: pd.DataFrame) -> dict[str, Any]:
    known = rows[rows["n"] > 0]
    significant = known[known["p_holm"] < 0.05]
    return {
        "tested": len(known),
        "significant": [f"{row['arm']} - {row['control']}" for _, row in significant.iterrows()],
        "largest_p": float(known["p_holm"].max()),
    }


@number
def policies_tested(source: str, control: str = "") -> dict[str, Any]:
    """How many comparisons were tested (with all controls or one kind), and which survive Holm's
    correction."""
    rows = _pairs(source)
    return _summed_up(rows[rows["control"] == control] if control else rows)


@number
def timings_tested(source: str) -> dict[str, Any]:
    """How many comparisons of two kinds of controls were tested, and which survive."""
    return _summed_up(_pairs(source, timing=True))


# -- trials ----------------------------------------------------------------------------------


@number
def at_an_end(source: str) -> list[str]:
    """Arms at the smallest or the largest rate that was tried."""
    path = record_read(f"{source}-tune.json")
    return tournament.edges(path, arms(source)["rate"])


@number
def trial_range(source: str, low: float, high: float) -> list[float]:
    """The lowest and highest mean score of all arms at rates in a range, as recorded."""
    scores = [fmean(row["scores"]) for row in trials(source) if low <= row["rate"] <= high]
    return [min(scores), max(scores)]


@number
def rates_tried(source: str) -> list[float]:
    return sorted({row["rate"] for row in trials(source)})


@number
def validation_difference(source: str, a: str, b: str) -> Interval:
    """Held-out accuracy in points, ``a`` minus ``b``, each at its chosen rate."""
    rates = {run.name: float(run.config["optimizer"]["lr"]) for run in records(source)}
    at = {
        row["schedule"]: row["scores"]
        for row in trials(source)
        if row["rate"] == rates.get(row["schedule"])
    }
    return mean_of([100 * (x - y) for x, y in zip(at[a], at[b], strict=True)])
