"""Harm by phase of the learning rate, and scores of signals, of several trees of pulses at once.

A row for each tree and arm::

    regimes figure settings data/reference/harm-lm.tar.xz data/reference/harm-smoke.tar.xz

*High* are the units with a learning rate above half of its peak, *fallen* the units after them. The
pulse in the middle of a phase has its middle nearest to the phase's (of two, the later), among
those that start after unit 0 and leave units to recover in; none for a phase of no unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.plotting.groups import tested_by
from regimes.records import Record, load_all
from regimes.search.harms.rates import mean_rates

from ..common.command import Files, Out, Several, by_name
from ..common.estimates import as_table, estimate, mean, number, over_seeds, word
from . import harm, measured, scores

Arms = tyro.conf.UseAppendAction[tuple[str, ...]]
START, HIGH, FALLEN = PHASES = ("start", "high rate", "after its fall")
ARM = "rank 1"
ALL = "mean of all"
TITLES = (
    "Harm of a pulse (in brackets the unit where it starts), by phase of the learning rate",
    "Rank correlation of signals with harm",
    "Area under the ROC curve, worst third of harm",
)
SIGNALS = (  # columns of the tables, those that measure nothing first
    *scores.DULL,
    "norm",
    "change of norm",
    "norm x rate",
    "eigenvalue",
    "change of eigenvalue",
    "sharpness",
    "error",
)


def phases(trunk: Record) -> dict[str, list[int]]:
    """The units of the high rate, and those after it has fallen to at most half of its peak."""
    rates = mean_rates(trunk).to_numpy(float)
    above = np.flatnonzero(rates > rates.max() / 2)
    every = range(len(rates))
    high = [unit for unit in every if above[0] <= unit <= above[-1]]
    return {HIGH: high, FALLEN: [unit for unit in every if unit > above[-1]]}


def onset_of(units: Sequence[int], pulses: pd.DataFrame) -> int | None:
    """The onset of the pulse in the middle of some units.

    Args:
        pulses: rows of `measured.by_run`, for onset, length and left.
    """
    there = pulses[(pulses["onset"] > 0) & (pulses["left"] > 0)]
    if not len(units) or there.empty:
        return None
    centre = (units[0] + units[-1]) / 2
    middles = there["onset"] + (there["length"] - 1) / 2
    away = (middles - centre).abs()
    return int(there.loc[away == away.min(), "onset"].max())


def by_phase(trunk: Record, pulses: pd.DataFrame) -> pd.DataFrame:
    """One row per phase: onset, n, harm with its 95 % t interval over seeds.

    Args:
        pulses: rows of `measured.by_run` of one arm.
    """
    onsets: dict[str, int | None] = {START: 0 if (pulses["onset"] == 0).any() else None}
    onsets |= {phase: onset_of(units, pulses) for phase, units in phases(trunk).items()}
    rows = []
    for phase, onset in onsets.items():
        values = pulses.loc[pulses["onset"] == onset, "harm"].to_list() if onset is not None else []
        row: dict[str, Any] = {"phase": phase, "onset": onset, "n": len(values)}
        rows.append(row | estimate(values, "harm"))
    return pd.DataFrame(rows)


def described(trunk: Record) -> dict[str, Any]:
    """The data of a trunk, its optimiser and schedule, peak rate, thousands of parameters, unit."""
    data, optimizer = trunk.config["data"], trunk.config["optimizer"]
    path = data.get("path")
    size = sum(math.prod(layer["shape"]) for layer in trunk.header["layers"])
    return {
        "data": Path(path).name.partition(".")[0] if data["name"] == "folder" else data["name"],
        "optimiser": f"{optimizer['name']}, {optimizer['schedule']}",
        "rate": optimizer["lr"],
        "parameters": f"{size / 1000:.0f} k",
        "unit": tested_by(trunk).unit,
    }


def of_tree(name: str, runs: Sequence[Record], arm: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(`by_phase` of one arm, with the setting; `scores.scores` of that arm, with the setting; the
    second is empty where no harm differs from 0).

    Raises:
        RecordError: as `measured.pair_branches`; or the tree has no such arm.
    """
    found = [pair for pair in measured.pair_branches(runs) if measured.arm_of(pair[0]) == arm]
    if not found:
        raise RecordError(f"{name} has no pulses {arm!r}: choose others with --arm")
    trunks, each = measured.list_trunks(found), measured.by_run(measured.by_unit(found))
    shape = harm.arms(each).iloc[0]
    label = name if arm == ARM else f"{name}: {arm}"
    about = {"setting": label, **described(trunks[0]), "reliability": shape["reliability"]}
    try:
        scored = scores.scores(each, scores.by_seed(trunks, runs))
    except RecordError:  # no harm, or too few onsets
        scored = pd.DataFrame(columns=["arm", "seed", "signal", "rank", "auc"])
    return by_phase(trunks[0], each).assign(**about), scored.assign(setting=label)


def over_trees(scored: pd.DataFrame, pooled: bool = False) -> pd.DataFrame:
    """One row per setting and signal: n, rank and auc with 95 % t intervals over seeds; none where
    no setting is scored.

    Args:
        pooled: also a row per signal over all settings, `ALL`, with n, means and intervals over the
            settings' means. It is true of settings that share no runs.
    """
    by = ["setting", "signal"]
    table = over_seeds(scored, by, ["rank", "auc"])
    if not pooled:
        return table
    means = table.dropna(subset="rank")[["signal", "rank", "auc"]].assign(setting=ALL)
    return pd.concat([table, over_seeds(means, by, ["rank", "auc"])], ignore_index=True)


def tables(harms: pd.DataFrame, scored: pd.DataFrame) -> tuple[Table, Table, Table]:
    """Harm by phase; rank correlations; areas: rounded, a row per setting."""
    lines = []
    for setting, part in harms.groupby("setting", sort=False):
        row: dict[str, Any] = {"setting": setting, **part.iloc[0][["rate", "parameters", "unit"]]}
        row |= {"optimiser": part.iloc[0]["optimiser"], "n": part["n"].max()}
        for phase, cell in zip(part["phase"], part.to_dict("records"), strict=True):
            form = "+.3f" if cell["unit"] == "bits" else "+.2f"
            at = "" if math.isnan(cell["harm"]) else f" ({cell['onset']:.0f})"
            row[phase] = mean("harm", form)(cell) + at
        lines.append(row | {"reliability": part.iloc[0]["reliability"]})
    first = {name: word(name) for name in ("setting", "optimiser", "parameters", "rate", "unit")}
    first |= {"n": word("n")} | {f"{name} (from)": word(name) for name in PHASES}
    first |= {"reliability": number("reliability", ".2f")}
    made = [as_table(pd.DataFrame(lines), first, 2)]
    for column, form in (("rank", "+.2f"), ("auc", ".2f")):
        rows = []
        for setting, part in scored.groupby("setting", sort=False):
            cells = {row["signal"]: mean(column, form)(row) for row in part.to_dict("records")}
            rows.append({"setting": setting, "n": part["n"].max()} | cells)
        columns = {"setting": word("setting"), "n": word("n")}
        columns |= {name: _cell(name) for name in SIGNALS if any(name in row for row in rows)}
        made.append(as_table(pd.DataFrame(rows), columns, 1))
    titled = [replace(table, title=title) for table, title in zip(made, TITLES, strict=True)]
    return titled[0], titled[1], titled[2]


def _cell(name: str) -> Any:
    return lambda row: row[name] if isinstance(row[name], str) else ""


def main(records: Several, out: Out = None, arm: Arms = (ARM,)) -> list[Path]:
    """Harm by phase of the learning rate and scores of signals, a row for each tree of pulses.

    Args:
        records: folders of branches and their trunk, or archives of them.
        arm: which pulses, a row for each that a tree has; may be given several times.
    """
    if not records:
        raise RecordError("give trees of pulses, e.g. the folder of `regimes ablate harm-lm`")
    parts = []
    for name, path in by_name(records).items():
        runs = load_all(path)
        there = {measured.arm_of(run) for run, _ in measured.pair_branches(runs)}
        wanted = [one for one in dict.fromkeys(arm) if one in there or not there & {*arm}]
        parts += [of_tree(name, runs, one) for one in wanted]
    harms = pd.concat([part[0] for part in parts], ignore_index=True)
    by_seed = pd.concat([part[1] for part in parts if len(part[1])] or [parts[0][1]])
    by_seed = by_seed.reset_index(drop=True)
    scored = over_trees(by_seed, pooled=len(parts) == len(records) > 1)
    files = Files(records[0] if len(records) == 1 else "settings", out)
    files.table("settings-harm", harms)
    files.table("settings-scores", scored)
    files.table("settings-scores-by-seed", by_seed)
    files.page("settings", "", *tables(harms, scored))
    return files.print_paths()
