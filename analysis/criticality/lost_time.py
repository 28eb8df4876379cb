"""How much of the harm of pulses is lost time, and what three of them say of the others.

All tables, of trees with as many seeds as there are::

    regimes figure lost-time data/reference/lost-time-lm.tar.xz

*Deletion* leaves the units of a pulse out: its share of the harm is lost time. If harm is lost time
times a power of the learning rate, harm over deletion has this exponent. The law of three pulses of
an arm predicts its others (`analysis.criticality.law`). A *null* pulse changes nothing; its harm
must be 0 exactly, and no other table counts it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.base.statistics import interval_names, ratio_interval
from regimes.plotting.groups import tested_by
from regimes.records import Record, load_all

from ..common.command import Files, Out, Several, by_name
from ..common.estimates import as_table, estimate, mean, number, word
from . import fit as laws
from . import law, measured

ALL = "all"
TITLES = (
    "The law from three pulses",
    "Deletion: how much of the harm is lost time",
    "Exponents of the learning rate",
    "Null pulses",
)
FIRST = 3  # onset from which on the exponents of harm over deletion were predicted


@dataclass(frozen=True)
class Tree:
    """The pulses of one archive or folder.

    Attributes:
        pulses: one row per branch: the columns of `measured.by_run`, tree, trunk (the name of its
            trunk), rate (mean over its units, as a share of the peak), kind ("pulse", "deletion",
            "null").
        units: of harm, by the name of the trunk.
        unfinished: runs that are left out.
    """

    name: str
    pulses: pd.DataFrame
    units: dict[str, str]
    unfinished: int = 0


def tree(name: str, runs: Sequence[Record]) -> Tree:
    """The finished pulses of some runs.

    Raises:
        RecordError: as `measured.pair_branches`.
    """
    finished = [run for run in runs if run.finished and run.rows]
    found = measured.pair_branches(finished)
    trunks = {measured.arm_of(run): trunk.name for run, trunk in found}
    skipped = {measured.arm_of(run) for run, _ in found if run.config["branch"].get("skip")}
    parts = []
    for arm, trunk in trunks.items():
        table = law.pulses(name, finished, arm)
        null = measured.is_null(table["harm"].to_list())
        kind = "deletion" if arm in skipped else "null" if null else "pulse"
        parts.append(table.assign(trunk=trunk, kind=kind))
    each = pd.concat(parts, ignore_index=True)
    units = {trunk.name: tested_by(trunk).unit for _, trunk in found}
    return Tree(name, each, units, len(runs) - len(finished))


# -- the law, deletion, null pulses ----------------------------------------------------------


def predictions(found: Tree, three: Sequence[int] | None = None) -> pd.DataFrame:
    """One row per arm: tree, arm, n (pulses that are predicted), fitted (onsets of the three),
    exponent, r2, error (see `laws.Score`), why (in place of these, what is too little).

    Args:
        three: onsets of the three pulses; None: chosen by their rates.
    """
    rows = []
    there = law.lasting(found.pulses[found.pulses["kind"] == "pulse"])
    for arm, part in there.groupby("arm", sort=False):
        row: dict[str, Any] = {"tree": found.name, "arm": arm, "fitted": "", "why": ""}
        row |= {"n": 0, "exponent": math.nan, "r2": math.nan, "error": math.nan}
        try:
            said = law.from_three(part, three)
        except RecordError as error:
            rows.append(row | {"why": str(error)})
            continue
        onsets = said.loc[said["fitted"], "onset"]
        score = law.scored(said)
        row |= {"fitted": ", ".join(map(str, onsets)), "exponent": said["exponent"].iloc[0]}
        few = "" if score.n else "no pulse is left to predict"
        rows.append(row | {"n": score.n, "r2": score.r2, "error": score.error, "why": few})
    return pd.DataFrame(rows)


def scored_together(
    found: Sequence[Tree], three: Sequence[int] | None = None
) -> dict[str, laws.Score]:
    """How well three pulses of each arm predict its others, over all trees with more in their arms:
    by the unit of harm."""
    said: dict[str, list[pd.DataFrame]] = {}
    for one in found:
        there = law.lasting(one.pulses[one.pulses["kind"] == "pulse"])
        for _, part in there.groupby("arm"):
            unit = one.units[part["trunk"].iloc[0]]
            with contextlib.suppress(RecordError):  # too few pulses, or one rate
                predicted = law.from_three(part, three)
                said.setdefault(unit, []).append(predicted)
    return {unit: law.scored(pd.concat(each)) for unit, each in said.items()}


def beside_deletion(found: Tree) -> pd.DataFrame:
    """The pulses whose units the same seed also left out: the columns of `Tree.pulses`, and
    harm_deletion."""
    keys = ["trunk", "onset", "length", "seed"]
    left_out = found.pulses[found.pulses["kind"] == "deletion"]
    there = found.pulses[found.pulses["kind"] == "pulse"]
    return there.merge(left_out[[*keys, "harm"]], on=keys, suffixes=("", "_deletion"))


def lost_time(found: Tree) -> pd.DataFrame:
    """One row per arm and onset with the same units left out by the same seeds: tree, arm, onset,
    n, harm and deletion (means with 95 % t intervals), share (of the means); and for each arm a row
    of all its onsets (onset -1): means over them by seed, and the interval of the share over seeds.
    """
    rows: list[dict[str, Any]] = []
    for arm, of_arm in beside_deletion(found).groupby("arm", sort=False):
        whole = of_arm.groupby("seed")[["harm", "harm_deletion"]].mean()
        parts: dict[int, pd.DataFrame] = {-1: whole}
        parts |= {int(str(onset)): part for onset, part in of_arm.groupby("onset")}
        for onset, part in parts.items():
            row: dict[str, Any] = {"tree": found.name, "arm": arm, "onset": onset, "n": len(part)}
            row |= estimate(part["harm"].to_list(), "harm")
            row |= estimate(part["harm_deletion"].to_list(), "deletion")
            rows.append(row | {"share": row["deletion"] / row["harm"] if row["harm"] else math.nan})
        ends = ratio_interval(whole["harm_deletion"].to_list(), whole["harm"].to_list())
        rows[-len(parts)] |= dict(zip(interval_names("share"), ends, strict=True))
    return pd.DataFrame(rows)


def exponents(found: Tree, first: int = FIRST, left: int = 0) -> pd.DataFrame:
    """One row per arm: tree, arm, n (trunks), and exponents of the learning rate with 95 % t
    intervals over trunks: of harm, of deletion, and of harm over deletion; pulses (that were used),
    without (pulses without a logarithm, because harm or deletion is zero or less: left out).

    The exponent of one trunk is the slope of the logarithm over the logarithm of the rate.

    Args:
        first: onset from which on pulses count.
        left: units to recover in that a pulse leaves, at least.
    """
    rows: list[dict[str, Any]] = []
    both = beside_deletion(found)
    both = both[(both["onset"] >= first) & (both["left"] >= left)]
    for arm, part in both.groupby("arm", sort=False):
        used = part[(part["harm"] > 0) & (part["harm_deletion"] > 0)]
        harm, lost = used["harm"], used["harm_deletion"]
        row: dict[str, Any] = {"tree": found.name, "arm": arm}
        for name, values in {"harm": harm, "deletion": lost, "ratio": harm / lost}.items():
            given = values.to_list(), used["rate"].to_list(), used["seed"].to_list()
            of_trunk = laws.fit_exponents(*given) if len(used) else {}
            row |= {"n": len(of_trunk)} | estimate([*of_trunk.values()], name)
        rows.append(row | {"pulses": len(used), "without": len(part) - len(used)})
    return pd.DataFrame(rows)


def nulls(found: Tree) -> pd.DataFrame:
    """One row per arm that changes nothing: tree, arm, n (pulses), largest (size of harm)."""
    there = found.pulses[found.pulses["kind"] == "null"]
    return pd.DataFrame(
        {"tree": found.name, "arm": arm, "n": len(part), "largest": float(part["harm"].abs().max())}
        for arm, part in there.groupby("arm", sort=False)
    )


# -- tables ----------------------------------------------------------------------------------


def tables(
    found: Sequence[Tree], three: Sequence[int] | None = None
) -> tuple[dict[str, pd.DataFrame], list[Table]]:
    """(frames by name, the same rounded and with titles; those without rows are left out)."""
    frames = {
        "law": _together(predictions(one, three) for one in found),
        "deletion": _together(lost_time(one) for one in found),
        "exponents": _together(exponents(one) for one in found),
        "null": _together(nulls(one) for one in found),
    }
    made = []
    if len(frames["law"]):
        made.append(law_table(frames["law"]))
    if len(frames["deletion"]):
        made.append(deletion_table(frames["deletion"]))
    if len(frames["exponents"]):
        made.append(exponents_table(frames["exponents"]))
    if len(frames["null"]):
        columns = {"tree": word("tree"), "pulse": word("arm"), "pulses": word("n")}
        made.append(as_table(frames["null"], columns | {"largest harm": word("largest")}, 2))
        made[-1] = replace(made[-1], title=TITLES[3])
    return frames, made


def _together(parts: Iterator[pd.DataFrame]) -> pd.DataFrame:
    there = [part for part in parts if len(part)]
    return pd.concat(there, ignore_index=True) if there else pd.DataFrame()


def law_table(rows: pd.DataFrame) -> Table:
    """`predictions`, rounded; without the column ``why`` if they have none."""
    columns = {
        "tree": word("tree"),
        "pulse": word("arm"),
        "fitted to": word("fitted"),
        "exponent": number("exponent", ".2f"),
        "others": word("n"),
        "error": number("error", ".3f"),
        "R2": number("r2", ".2f"),
    }
    if "why" in rows:
        columns["too little"] = word("why")
    return replace(as_table(rows, columns, 2, int("why" in rows)), title=TITLES[0])


def deletion_table(rows: pd.DataFrame) -> Table:
    """`lost_time`, rounded."""
    columns = {
        "tree": word("tree"),
        "pulse": word("arm"),
        "from": lambda row: ALL if row["onset"] < 0 else str(row["onset"]),
        "n": word("n"),
        "harm [95 %]": mean("harm", ".3f"),
        "deletion [95 %]": mean("deletion", ".3f"),
        "share": mean("share", ".2f"),
    }
    return replace(as_table(rows, columns, 2), title=TITLES[1])


def exponents_table(rows: pd.DataFrame) -> Table:
    """`exponents`, rounded."""
    columns = {
        "tree": word("tree"),
        "pulse": word("arm"),
        "trunks": word("n"),
        "pulses": word("pulses"),
        "zero or less": word("without"),
        "harm [95 %]": mean("harm", ".2f"),
        "deletion [95 %]": mean("deletion", ".2f"),
        "harm over deletion [95 %]": mean("ratio", ".2f"),
    }
    return replace(as_table(rows, columns, 2), title=TITLES[2])


def sentences(found: Sequence[Tree], scores: Mapping[str, laws.Score]) -> list[str]:
    """How well the law predicts in all trees, and which runs are left out."""
    lines = [
        f"{one.name}: {one.unfinished} runs are not finished and left out"
        for one in found
        if one.unfinished
    ]
    lines += [
        f"the law from three pulses predicts {score.n} others with R2 {score.r2:.2f}, "
        f"error {score.error:.3f} {unit}"
        for unit, score in scores.items()
        if score.n
    ]
    return lines


def main(
    records: Several, out: Out = None, three: tuple[int, int, int] | None = None
) -> list[Path]:
    """How much of the harm is lost time, and what the law of three pulses says of the others.

    Args:
        records: folders of branches and their trunk, or archives of them.
        three: units where the pulses start that the law is fitted to; default by their rates.
    """
    if not records:
        raise RecordError("give trees of pulses, e.g. the folder of `regimes ablate harm-lm`")
    found = [tree(name, load_all(path)) for name, path in by_name(records).items()]
    frames, made = tables(found, three)
    said = sentences(found, scored_together(found, three))
    files = Files(records[0] if len(records) == 1 else "lost-time", out)
    for name, rows in frames.items():
        if len(rows):
            files.table(f"lost-time-{name}", rows)
    files.page("lost-time", "", *made)
    print(*said, sep="\n")
    return files.print_paths()
