"""What is lost by epoch in the authors' logs and in runs of ours: numbers for templates."""

from __future__ import annotations

import functools
import math
from typing import Any

import pandas as pd

from ...common.estimates import as_table, word
from ...paper import equal_epochs
from ..sources import number, records

OURS = ("paper-cifar10-short", "cifar10-resnet20")
BINS = (5, 10, 20)  # first epochs of those that the table has


@functools.cache
def _curves() -> pd.DataFrame:
    ours = [equal_epochs.of_runs(name, records(name)) for name in OURS]
    return pd.concat([equal_epochs.of_authors(), *ours], ignore_index=True)


def _read() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Differences and clocks; every call notes the archives."""
    for name in OURS:
        records(name)
    return equal_epochs.differences(_curves()), equal_epochs.clocks(_curves())


@number
def authors_behind(first: int) -> dict[str, Any]:
    """How far ACCORDION is below low compression in the authors' logs, in the epochs of a bin: in
    how many networks, of how many, and the least and the largest of these points."""
    gaps, _ = _read()
    chosen = gaps[(gaps["whose"] == "authors") & (gaps["schedule"] == "accordion")]
    points = -chosen.loc[chosen["bin"] == first, "points"]
    below = int((points > 0).sum())
    return {"below": below, "of": len(points), "least": points.min(), "most": points.max()}


@number
def authors_ends() -> list[float]:
    """ACCORDION minus low compression in the last bin of each of the authors' logs, in points,
    ascending."""
    gaps, _ = _read()
    chosen = gaps[(gaps["whose"] == "authors") & (gaps["schedule"] == "accordion")]
    return sorted(chosen.groupby("network")["points"].last())


@number
def clocks_before_decay(whose: str, schedule: str) -> list[float]:
    """The clock of a schedule in each network, ascending."""
    _, known = _read()
    return sorted(known.loc[known["whose"] == whose, f"k of {schedule}"])


@number
def equal_epochs_table() -> str:
    """Points above low compression by epoch, and clocks, of every network."""
    gaps, known = _read()
    by = gaps.set_index(["network", "schedule", "bin"])["points"]
    rows = []
    for row in known.to_dict("records"):
        for schedule, spoken in equal_epochs.TITLES.items():
            found = {f"from {b}": by.get((row["network"], schedule, b), math.nan) for b in BINS}
            own = gaps[(gaps["network"] == row["network"]) & (gaps["schedule"] == schedule)]
            end = float(own["points"].iloc[-1]) if row["whose"] == "authors" else math.nan
            about = {"network": row["network"], "schedule": spoken, "k": row[f"k of {schedule}"]}
            rows.append({**about, **found, "end": end})

    def points(column: str) -> Any:
        return lambda row: "" if math.isnan(row[column]) else f"{row[column]:+.1f}"

    columns = {
        "network (ranks)": word("network"),
        "minus low compression": word("schedule"),
        "epochs 5-9": points("from 5"),
        "10-14": points("from 10"),
        "20-29": points("from 20"),
        "end": points("end"),
        "clock": lambda row: f"{row['k']:.2f}",
    }
    return as_table(pd.DataFrame(rows), columns, texts=2).markdown()
