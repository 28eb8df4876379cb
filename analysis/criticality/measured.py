"""Harm of pulses, from records.

A *trunk* is a plain run. A *branch* continues it from some unit under another configuration. A
*pulse* is a branch that returns to the trunk's configuration after ``length`` units. An *arm* is
the set of pulses that differ in their onset and seed only.

The *harm* of a branch is its metric minus the trunk's of the same seed, in the unit of figures,
with the sign by which more is worse. The *onset* is the first unit of the branch. A *null* pulse
changes nothing that training depends on; its harm is 0 but for rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from regimes.base.errors import RecordError
from regimes.base.statistics import are_alike
from regimes.plotting.groups import tested_by
from regimes.records import Record, locate_trunk

Pair = tuple[Record, Record]  # a branch and its trunk


def pair_branches(runs: Sequence[Record]) -> list[Pair]:
    """Each branch with its trunk, in the order of the runs.

    Raises:
        RecordError: no branch, an unfinished run, or a trunk that is not among the runs or is
            itself a branch.
    """
    for run in runs:
        run.check_finished()
    by_folder = {os.path.realpath(run.folder): run for run in runs}
    found = []
    for run in runs:
        if branch := run.config.get("branch"):
            trunk = by_folder.get(os.path.realpath(locate_trunk(run.folder, branch["of"])))
            if trunk is None or trunk.config.get("branch"):
                raise RecordError(
                    f"{run.folder} is a branch of {branch['of']}, which is "
                    f"{'not among the runs' if trunk is None else 'a branch itself'}: give the "
                    "folder that holds both, and a trunk that is not itself a branch"
                )
            found.append((run, trunk))
    if not found:
        raise RecordError(
            "the runs have no branch; `regimes ablate harm-lm` trains a grid of pulses"
        )
    return found


def arm_of(run: Record) -> str:
    """The name of a branch without its onset: "rank 1" of "rank 1 from 3"."""
    return run.name.replace(f" from {run.config['branch']['at']}", "", 1)


def list_trunks(found: Sequence[Pair]) -> list[Record]:
    """The trunks, one per seed.

    Raises:
        RecordError: trunks of several experiments.
    """
    names = dict.fromkeys(trunk.name for _, trunk in found)
    if len(names) > 1:
        raise RecordError(f"the runs have branches of {', '.join(names)}: choose one with --where")
    by_folder: dict[Path, Record] = {trunk.folder: trunk for _, trunk in found}
    return sorted(by_folder.values(), key=lambda run: run.seed)


# -- numbers ---------------------------------------------------------------------------------


def by_unit(found: Sequence[Pair]) -> pd.DataFrame:
    """One row per branch and unit from its onset on in which both were tested: arm, onset, length
    (of a branch that never returns, all units that are left), seed, unit, harm, without (the metric
    of the trunk).

    Raises:
        RecordError: a branch that was tested in none of its units, or one whose metric is not
            finite in one of them.
    """
    tables = []
    for run, trunk in found:
        shown, at = tested_by(trunk), run.config["branch"]["at"]
        sign = shown.factor * (1 if shown.lower else -1)
        own = run.epochs["metric"].astype(float)
        broke = [row["epoch"] for row in run.tested_rows() if row["metric"] is None]
        if broke:
            raise RecordError(
                f"{run.folder}: the {shown.name} is not finite in unit {broke[0]}, which has no "
                "mean with others: leave the run out"
            )
        harm = sign * (own - trunk.epochs["metric"].astype(float))
        without = shown.factor * trunk.epochs["metric"].astype(float)
        table = pd.DataFrame({"unit": run.epochs["epoch"], "harm": harm, "without": without})
        table = table.iloc[at:].dropna()
        if table.empty:
            raise RecordError(f"{run.folder} was tested in none of its units")
        length = run.config["branch"].get("length") or len(run.rows) - at
        names = {"arm": arm_of(run), "onset": at, "length": length, "seed": run.seed}
        tables.append(table.assign(**names))
    columns = ["arm", "onset", "length", "seed", "unit", "harm", "without"]
    units = pd.concat(tables, ignore_index=True)[columns]
    order = {arm: place for place, arm in enumerate(dict.fromkeys(units["arm"]))}
    by = ["arm", "onset", "seed", "unit"]
    return units.sort_values(
        by, key=lambda c: c.map(order) if c.name == "arm" else c, kind="stable"
    )


def by_run(units: pd.DataFrame, last: int = 1) -> pd.DataFrame:
    """One row per branch: arm, onset, length, seed, harm (mean of the ``last`` units that were
    tested), without (the trunk's metric, the same mean), after (harm in the last unit of the pulse;
    nan if it was not tested), left (units after the pulse).

    Raises:
        RecordError: two branches that are alike.
    """
    rows = []
    keys = ["arm", "onset", "length", "seed"]
    for key, part in units.groupby(keys, sort=False):
        values: dict[str, Any] = dict(zip(keys, key, strict=True))
        end = values["onset"] + values["length"] - 1
        if part["unit"].duplicated().any():
            raise RecordError(f"two branches of {key[0]!r} from {key[1]} with seed {key[3]}")
        after = part.loc[part["unit"] == end, "harm"]
        means = {name: float(part[name].tail(last).mean()) for name in ("harm", "without")}
        at_end = {"after": float(after.iloc[0]) if len(after) else math.nan}
        rows.append(values | means | at_end | {"left": int(part["unit"].max()) - end})
    return pd.DataFrame(rows)


def is_null(harms: Sequence[float]) -> bool:
    """Are they 0 but for rounding?"""
    return are_alike([0.0, *harms])
