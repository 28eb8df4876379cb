"""Numbers of calls of safe that other seeds judge (`analysis.criticality.held_out`), over all
archives of pulses that there are."""

from __future__ import annotations

import dataclasses
import functools

import pandas as pd

from ...criticality import held_out
from ..sources import REFERENCE, number, record_read, records

TREES = "harm-*.tar.xz"


@functools.cache
def _tree(source: str) -> held_out.Tree:
    return held_out.tree(source, records(source))


def _trees() -> list[held_out.Tree]:
    record_read(TREES)
    found = []
    for path in sorted(REFERENCE.glob(TREES)):
        source = path.name.removesuffix(".tar.xz")
        record_read(path.name)
        if any(run.config.get("branch") for run in records(source)):  # others are whole runs
            found.append(_tree(source))
    return found


@functools.cache
def _phases() -> pd.DataFrame:
    return pd.concat([held_out.judged(tree) for tree in _trees()], ignore_index=True)


@number
def held_out_table() -> str:
    """Calls of each tree with seeds that judge, and of all, and what these seeds say of them."""
    _trees()
    found = held_out.calls_table(_phases())
    share = found.heads.index("share [95 %]")
    kept = [row for row in found.rows if row[share] or row[0] == held_out.ALL]
    return dataclasses.replace(found, rows=kept).markdown()


@number
def held_out_calls() -> dict[str, float]:
    """Over all trees: the row `held_out.ALL` of `held_out.summary`, with trees (judged), wrong (of
    them, those with a call of safe that has others against it) and its interval, low and high."""
    _trees()
    whole = held_out.summary(_phases()).iloc[-1]
    trees = held_out.over_trees(_phases())
    known = {str(key): float(whole[key]) for key in whole.index if key != "tree"}
    known |= {"trees": trees["n"], "wrong": trees["count"]}
    return known | {"low": trees["share_low"], "high": trees["share_high"]}


@number
def held_out_law_table() -> str:
    """What three pulses of each arm say of its others, in the arms on a text (images have no harm
    to predict) that have two others or more."""
    rows = pd.concat([held_out.predictions(tree) for tree in _trees()], ignore_index=True)
    kept = rows[(rows["n"] > 1) & rows["tree"].str.startswith("harm-lm")]
    return held_out.law_table(kept.drop(columns="why")).markdown()


@number
def deletion_table() -> str:
    """Harm of each arm beside the harm of leaving out the same units; "" where no tree has such
    pulses."""
    rows = [table for tree in _trees() if len(table := held_out.lost_time(tree))]
    if not rows:
        return ""
    return held_out.deletion_table(pd.concat(rows, ignore_index=True)).markdown()


@number
def null_pulses() -> list[float]:
    """Pulses that change nothing in all trees: how many, and their largest harm."""
    found = pd.concat([held_out.nulls(tree) for tree in _trees()])
    return [float(found["n"].sum()), float(found["largest"].max())]
