"""Do signals of a group of layers say when, or where, a pulse of compression harms?

Pulses of one trunk, each in one group of layers alone (`grids/harm-layers.toml`)::

    regimes figure layers data/reference/harm-layers.tar.xz

The group of an arm are the layers that have another level than the trunk's during its pulse; an arm
that changes every compressed layer is left out. A group's norm in a unit is the root of the sum of
squares of its layers' norms. A signal of a pulse is a mean over the units of the pulse. Scores are
Spearman's rank correlations with harm, by seed:

- *all*: over all pulses, of every group and onset;
- *when*: over the onsets of a group, mean over the groups;
- *where*: over the groups at an onset, mean over the onsets.

Beside the measured signals are those that measure nothing: the learning rate and time, which are
the same for all groups, and how many weights a group has, which is the same at all onsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regimes.console.tables import Table
from regimes.errors import RecordError
from regimes.harms import measured
from regimes.harms.rates import mean_rates
from regimes.records import Record, load_all

from ..common.command import Files, Out, Records
from ..common.estimates import as_table, mean, over_seeds, word
from .scores import RATE, TIME, ranks

WEIGHTS = "weights"
SIGNALS = ("norm", "norm x rate", "norm of a weight", "change of norm", WEIGHTS, RATE, TIME)
COLUMNS = ("all", "when", "where")


def group_of(branch: Record, trunk: Record) -> list[int]:
    """The places of the layers with another level than the trunk's in the first unit of a
    branch."""
    at = branch.config["branch"]["at"]
    own, others = (run.rows[at]["layers"]["level"] for run in (branch, trunk))
    return [place for place, (a, b) in enumerate(zip(own, others, strict=True)) if a != b]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def norms(trunk: Record, group: Sequence[int]) -> pd.Series:
    """The norm of a group's update in each unit."""
    values = [row["statistics"]["norm:update"] for row in trunk.rows]
    return pd.Series([math.hypot(*(_number(unit[place]) for place in group)) for unit in values])


def signals_of(trunk: Record, group: Sequence[int], at: int, length: int) -> dict[str, float]:
    """The values of `SIGNALS` for a pulse in one group of layers."""
    norm, rate = norms(trunk, group), mean_rates(trunk)
    change = norm.diff().abs() / norm.shift()
    units = slice(at, at + length - 1)
    size = sum(math.prod(trunk.header["layers"][place]["shape"]) for place in group)
    return {
        "norm": norm.loc[units].mean(),
        "norm x rate": (norm * rate).loc[units].mean(),
        "norm of a weight": norm.loc[units].mean() / math.sqrt(size),
        "change of norm": change.loc[units].mean(),
        WEIGHTS: float(size),
        RATE: rate.loc[units].mean(),
        TIME: -float(at),
    }


def pulses(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per pulse in a part of the layers: arm, onset, seed, harm and `SIGNALS`.

    Raises:
        RecordError: as `measured.pair_branches`; or fewer than two arms change a part of the
            layers.
    """
    found = measured.pair_branches(runs)
    each = measured.by_run(measured.by_unit(found)).set_index(["arm", "onset", "seed"])
    by_key = dict(zip(each.index, each.to_dict("records"), strict=True))
    rows = []
    for branch, trunk in found:
        group = group_of(branch, trunk)
        compressed = sum(layer["compressed"] for layer in trunk.header["layers"])
        if 0 < len(group) < compressed:
            key = (measured.arm_of(branch), branch.config["branch"]["at"], branch.seed)
            one = by_key[key]
            names = dict(zip(("arm", "onset", "seed"), key, strict=True))
            values = signals_of(trunk, group, key[1], int(one["length"]))
            rows.append(names | {"harm": float(one["harm"])} | values)
    table = pd.DataFrame(rows)
    if table.empty or table["arm"].nunique() < 2:
        raise RecordError("no two arms change a part of the layers: `regimes ablate harm-layers`")
    return table


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """One row per seed and signal: all, when, where (nan for a signal that is the same there)."""
    rows = []
    for seed, part in table.groupby("seed"):
        for signal in SIGNALS:
            row: dict[str, Any] = {"seed": seed, "signal": signal, "all": _rank(part, signal)}
            for name, by in (("when", "arm"), ("where", "onset")):
                row[name] = float(np.mean([_rank(p, signal) for _, p in part.groupby(by)]))
            rows.append(row)
    return pd.DataFrame(rows)


def _rank(part: pd.DataFrame, signal: str) -> float:
    one, other = ranks(part[signal]), ranks(part["harm"])
    return float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) and np.ptp(other) else math.nan


def table_of(scored: pd.DataFrame) -> Table:
    """`scores`, mean over seeds with intervals, rounded."""
    rows = over_seeds(scored, ["signal"], COLUMNS)
    columns = {"signal": word("signal"), "n": word("n")}
    heads = {"all": "all pulses", "when": "when, in a group", "where": "where, at an onset"}
    columns |= {f"{heads[name]} [95 %]": mean(name, "+.2f") for name in COLUMNS}
    return as_table(rows, columns, 1)


def main(records: Records, out: Out = None) -> list[Path]:
    """Score signals of groups of layers by the harm of pulses in these groups."""
    each = pulses(load_all(records))
    scored = scores(each)
    files = Files(records, out)
    files.table("layers-pulses", each)
    files.table("layers-scores", scored)
    files.page("layers", "", table_of(scored))
    return files.said()
