"""Calls of safe by the first seeds of trees of pulses, judged by the other seeds.

All tables, of trees with as many seeds as there are::

    regimes figure held-out data/reference/harm-smoke.tar.xz data/reference/harm-batch.tar.xz

A *phase* is the units of a pulse: an arm from one unit on, in one tree. The rule of `regimes harm`
(`regimes.harms.decide`) looks at it after three seeds, and after each more up to ``first``; its
first call of safe or harmful stands. The other seeds judge: they are *against* a call of safe if
their mean harm is the margin or more, and *refute* it if all of their 95 % t interval is; against a
call of harmful if their mean is below the margin, and refute it if all of their interval is.

Phases of one tree have the same trunks, so that their errors are not independent. The tree is the
unit of replication: of trees it is counted in how many some call of safe has the others against it.

*Deletion* leaves the units of a pulse out: its share of the harm is lost time. A *null* pulse
changes nothing; its harm must be 0 exactly. Neither is judged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regimes.console.tables import Table
from regimes.errors import RecordError, require
from regimes.harms import law as laws
from regimes.harms import measured
from regimes.harms.decide import WORDS, Verdict, judge_harms
from regimes.harms.records import facts_of_trunk
from regimes.harms.search import Facts
from regimes.records import Record, load_all
from regimes.statistics import LEAST, t_interval

from ..common.command import Files, Out, Several, by_name
from ..common.estimates import Cell, Row, as_table, estimate, exact, mean, number, word
from . import law

ALL = "all"
TITLES = (
    "Calls by the first seeds, judged by the others",
    "The law from three pulses",
    "Deletion: how much of the harm is lost time",
    "Null pulses",
)


@dataclass(frozen=True)
class Tree:
    """The pulses of one archive or folder.

    Attributes:
        pulses: one row per branch: the columns of `measured.by_run`, tree, trunk (the name of its
            trunk), rate (mean over its units, as a share of the peak), kind ("pulse", "deletion",
            "null").
        facts: metric, margin and grain, by the name of the trunk.
        unfinished: runs that are left out.
    """

    name: str
    pulses: pd.DataFrame
    facts: dict[str, Facts]
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
    # the first seed's trunk stays
    firsts = {trunk.name: trunk for _, trunk in sorted(found, key=lambda pair: -pair[1].seed)}
    facts = {name: facts_of_trunk(trunk) for name, trunk in firsts.items()}
    return Tree(name, each, facts, len(runs) - len(finished))


# -- calls -----------------------------------------------------------------------------------


def called(harms: Sequence[float], margin: float, grain: float = 0.0) -> Verdict:
    """The first call of a phase that is not open, with a look after three seeds and after each
    more; else the last.

    >>> called([0.1, 0.2, 0.3, 9.0], margin=1.0).call
    'safe'
    """
    looks = [judge_harms(harms[:n], margin, grain) for n in range(LEAST, len(harms) + 1)]
    return next((look for look in looks if look.call != "open"), looks[-1])


def judged(found: Tree, first: int | None = None, margin: float | None = None) -> pd.DataFrame:
    """One row per phase with enough seeds for a call: tree, arm, onset, trunk, margin, unit (of
    harm), seeds, n (of them by which the call is), call, harm (theirs, with the ends of its
    interval), others (seeds that judge), mean (theirs, with a 95 % t interval), against, refuted
    (nan where no other seed is left, or the call is unresolved).

    Args:
        first: seeds that may call; None: half of a phase's, at least three.
        margin: in the unit of harm; None: the margin of `regimes harm`.
    """
    rows = []
    there = found.pulses[found.pulses["kind"] == "pulse"]
    for (arm, onset), part in there.groupby(["arm", "onset"], sort=False):
        harms = part.sort_values("seed")["harm"].to_list()
        count = max(LEAST, len(harms) // 2) if first is None else first
        if len(harms) < LEAST:
            continue
        trunk = part["trunk"].iloc[0]
        facts = found.facts[trunk]
        edge = facts.margin if margin is None else margin
        look, others = called(harms[:count], edge, facts.grain), harms[count:]
        row: dict[str, Any] = {"tree": found.name, "arm": arm, "onset": onset, "trunk": trunk}
        row |= {"margin": edge, "unit": facts.shown.unit, "seeds": len(harms), "n": look.n}
        row |= {"call": WORDS[look.call]}
        row |= {"harm": look.harm, "harm_low": look.low, "harm_high": look.high}
        row |= {"others": len(others)} | estimate(others, "mean")
        rows.append(row | _judgement(look, others, edge))
    return pd.DataFrame(rows)


def _judgement(look: Verdict, others: Sequence[float], margin: float) -> dict[str, float]:
    if look.call == "open" or not others:
        return {"against": math.nan, "refuted": math.nan}
    centre, low, high = t_interval(others)
    if look.call == "safe":
        return {"against": float(centre >= margin), "refuted": float(low >= margin)}
    return {"against": float(centre < margin), "refuted": float(high < margin)}


def summary(each: pd.DataFrame) -> pd.DataFrame:
    """One row per tree, and one of `ALL` if there are several: phases, seeds (of the phase with the
    fewest), resolved (share of the phases), safe and harmful (calls), of either ``_judged`` (those
    with other seeds), ``_against`` and ``_refuted``; and share (of the judged calls of safe, that
    with others against it), with its exact interval as if phases were independent.

    Args:
        each: rows of `judged`, of all trees.
    """
    parts = [(str(name), part) for name, part in each.groupby("tree", sort=False)]
    rows = [_counted(name, part) for name, part in parts]
    return pd.DataFrame(rows + ([_counted(ALL, each)] if len(parts) > 1 else []))


def _counted(name: str, part: pd.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {"tree": name, "phases": len(part), "seeds": int(part["seeds"].min())}
    row |= {"resolved": float((part["call"] != WORDS["open"]).mean())}
    for call in ("safe", "harmful"):
        calls = part[part["call"] == call]
        counts = {"judged": int((calls["others"] > 0).sum())}
        counts |= {what: int(calls[what].sum()) for what in ("against", "refuted")}
        row |= {call: len(calls)} | {f"{call}_{what}": n for what, n in counts.items()}
    return row | _share(row["safe_against"], row["safe_judged"])


def _share(count: int, of: int) -> dict[str, float]:
    """A share with its exact interval, as columns."""
    low, high = exact(count, of) if of else (math.nan, math.nan)
    return {"share": count / of if of else math.nan, "share_low": low, "share_high": high}


def over_trees(each: pd.DataFrame) -> dict[str, float]:
    """Trees with a call of safe that is judged (n), those in which some call has the other seeds
    against it (count), and the share of these with its exact interval (share, share_low,
    share_high)."""
    safe = each[(each["call"] == WORDS["safe"]) & (each["others"] > 0)]
    worst = safe.groupby("tree")["against"].max()
    count, n = int(worst.sum()), len(worst)
    return {"n": n, "count": count} | _share(count, n)


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
            unit = one.facts[part["trunk"].iloc[0]].shown.unit
            with contextlib.suppress(RecordError):  # too few pulses, or one rate
                predicted = law.from_three(part, three)
                said.setdefault(unit, []).append(predicted)
    return {unit: law.scored(pd.concat(each)) for unit, each in said.items()}


def lost_time(found: Tree) -> pd.DataFrame:
    """One row per arm and onset with the same units left out by the same seeds: tree, arm, onset,
    n, harm and deletion (means with 95 % t intervals), share (of the means); and for each arm a row
    of all its onsets (onset -1): means over them by seed, and the interval of the share over seeds.
    """
    rows: list[dict[str, Any]] = []
    keys = ["trunk", "onset", "length", "seed"]
    left_out = found.pulses[found.pulses["kind"] == "deletion"]
    there = found.pulses[found.pulses["kind"] == "pulse"]
    both = there.merge(left_out[[*keys, "harm"]], on=keys, suffixes=("", "_deletion"))
    for arm, of_arm in both.groupby("arm", sort=False):
        whole = of_arm.groupby("seed")[["harm", "harm_deletion"]].mean()
        parts: dict[int, pd.DataFrame] = {-1: whole}
        parts |= {int(str(onset)): part for onset, part in of_arm.groupby("onset")}
        for onset, part in parts.items():
            row: dict[str, Any] = {"tree": found.name, "arm": arm, "onset": onset, "n": len(part)}
            row |= estimate(part["harm"].to_list(), "harm")
            row |= estimate(part["harm_deletion"].to_list(), "deletion")
            rows.append(row | {"share": row["deletion"] / row["harm"] if row["harm"] else math.nan})
        rows[-len(parts)] |= _share_by_seed(whole)
    return pd.DataFrame(rows)


def _share_by_seed(whole: pd.DataFrame) -> dict[str, float]:
    """The interval of a ratio of means over seeds (Fieller 1954); nan where it has no two ends."""
    from scipy.stats import t

    x, y = whole["harm"].to_numpy(float), whole["harm_deletion"].to_numpy(float)
    n = len(x)
    if n < LEAST:
        return {"share_low": math.nan, "share_high": math.nan}
    (xx, xy), (_, yy) = np.cov(x, y) / n
    quantile = float(t.ppf(0.975, n - 1)) ** 2
    # the shares r at which the mean of y - r x is not significantly different from 0
    a, b, c = (
        x.mean() ** 2 - quantile * xx,
        x.mean() * y.mean() - quantile * xy,
        y.mean() ** 2 - quantile * yy,
    )
    inside = b * b - a * c
    if a <= 0 or inside < 0:  # harm itself may be 0
        return {"share_low": math.nan, "share_high": math.nan}
    return {
        "share_low": float((b - math.sqrt(inside)) / a),
        "share_high": float((b + math.sqrt(inside)) / a),
    }


def nulls(found: Tree) -> pd.DataFrame:
    """One row per arm that changes nothing: tree, arm, n (pulses), largest (size of harm)."""
    there = found.pulses[found.pulses["kind"] == "null"]
    return pd.DataFrame(
        {"tree": found.name, "arm": arm, "n": len(part), "largest": float(part["harm"].abs().max())}
        for arm, part in there.groupby("arm", sort=False)
    )


# -- tables ----------------------------------------------------------------------------------


def tables(
    found: Sequence[Tree],
    first: int | None = None,
    margin: float | None = None,
    three: Sequence[int] | None = None,
) -> tuple[dict[str, pd.DataFrame], list[Table]]:
    """(frames by name, the same rounded and with titles; those without rows are left out)."""
    frames = {
        "phases": _together(judged(one, first, margin) for one in found),
        "law": _together(predictions(one, three) for one in found),
        "deletion": _together(lost_time(one) for one in found),
        "null": _together(nulls(one) for one in found),
    }
    made = []
    if len(frames["phases"]):
        made.append(calls_table(frames["phases"]))
    if len(frames["law"]):
        made.append(law_table(frames["law"]))
    if len(frames["deletion"]):
        made.append(deletion_table(frames["deletion"]))
    if len(frames["null"]):
        columns = {"tree": word("tree"), "pulse": word("arm"), "pulses": word("n")}
        made.append(as_table(frames["null"], columns | {"largest harm": word("largest")}, 2))
        made[-1] = replace(made[-1], title=TITLES[3])
    return frames, made


def _together(parts: Iterator[pd.DataFrame]) -> pd.DataFrame:
    there = [part for part in parts if len(part)]
    return pd.concat(there, ignore_index=True) if there else pd.DataFrame()


def calls_table(each: pd.DataFrame) -> Table:
    """`summary`, rounded."""

    def of(call: str) -> Cell:
        def text(row: Row) -> str:
            if not row[f"{call}_judged"]:
                return ""
            return f"{row[f'{call}_against']} ({row[f'{call}_refuted']}) of {row[f'{call}_judged']}"

        return text

    def share(row: Row) -> str:
        if math.isnan(row["share"]):
            return ""
        return f"{row['share']:.0%} [{row['share_low']:.0%}, {row['share_high']:.0%}]"

    columns = {
        "tree": word("tree"),
        "phases": word("phases"),
        "seeds": word("seeds"),
        "resolved": lambda row: f"{row['resolved']:.0%}",
        "safe": word("safe"),
        "against safe (refuted)": of("safe"),
        "share [95 %]": share,
        "harmful": word("harmful"),
        "against harmful (refuted)": of("harmful"),
    }
    return replace(as_table(summary(each), columns, 1), title=TITLES[0])


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
    return replace(as_table(rows, columns, 2, int("why" in rows)), title=TITLES[1])


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
    return replace(as_table(rows, columns, 2), title=TITLES[2])


def sentences(
    found: Sequence[Tree], each: pd.DataFrame, scores: Mapping[str, laws.Score]
) -> list[str]:
    """What the tables say of all trees, and what is too little."""
    lines = [
        f"{one.name}: {one.unfinished} runs are not finished and left out"
        for one in found
        if one.unfinished
    ]
    whole = over_trees(each) if len(each) else {"n": 0}
    if whole["n"]:
        ends = f"[{whole['share_low']:.0%}, {whole['share_high']:.0%}]"
        lines.append(
            f"in {whole['count']:.0f} of {whole['n']:.0f} trees other seeds are against a call of "
            f"safe (95 % over trees: {ends})"
        )
    else:
        lines.append(
            f"no call of safe has other seeds to judge it: a phase needs {LEAST + 1} seeds or more"
        )
    lines += [
        f"the law from three pulses predicts {score.n} others with R2 {score.r2:.2f}, "
        f"error {score.error:.3f} {unit}"
        for unit, score in scores.items()
        if score.n
    ]
    return lines


def main(
    records: Several,
    out: Out = None,
    first: int | None = None,
    margin: float | None = None,
    three: tuple[int, int, int] | None = None,
) -> list[Path]:
    """Judge calls of safe by the first seeds of each tree of pulses with its other seeds.

    Args:
        records: folders of branches and their trunk, or archives of them.
        first: seeds that may call; default half of a phase's, at least three.
        margin: below which a harm is safe, in its unit; default 1 point, or 2 % of the trunk's.
        three: units where the pulses start that the law is fitted to; default by their rates.
    """
    if not records:
        raise RecordError("give trees of pulses, e.g. the folder of `regimes ablate harm-lm`")
    require(first is None or first >= LEAST, "first", first, f"{LEAST} or more")
    found = [tree(name, load_all(path)) for name, path in by_name(records).items()]
    frames, made = tables(found, first, margin, three)
    said = sentences(found, frames["phases"], scored_together(found, three))
    files = Files(records[0] if len(records) == 1 else "held-out", out)
    for name, rows in frames.items():
        if len(rows):
            files.table(f"held-out-{name}", rows)
    files.page("held-out", "", *made)
    print(*said, sep="\n")
    return files.print_paths()
