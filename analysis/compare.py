"""Schedules compared: records to numbers, and numbers to a table. No drawing here.

The runs of one folder are grouped by schedule (``config["name"]``) and seed; comparisons are paired
over common seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import style
from regimes.agreement import interval
from regimes.errors import RecordError
from regimes.records import Record, summary

Groups = dict[str, list[Record]]
SCHEDULES = ("dense", "low", "high", "low-in-critical", "high-in-critical", "accordion", "low-late")
PAIRS = (
    ("low", "high"),
    ("low-in-critical", "high"),
    ("dense", "high-in-critical"),
    ("dense-deleted", "high-in-critical"),  # damage, or only lost time?
    ("accordion", "low"),
    ("low-in-critical", "low-late"),
    ("low-early", "low-late"),  # only where both were run
)
LAST = 3  # epochs whose mean is a run's accuracy
SAME = ("workers", "batch_size", "data", "model", "compressor", "levels", "signal", "quirks")

# -- records to numbers ----------------------------------------------------------------------


def groups(runs: Iterable[Record], needed: Sequence[str] = ()) -> Groups:
    """Runs by schedule, each list by seed.

    Raises:
        RecordError: an unfinished run, two of one schedule and seed, runs of different settings,
            or a schedule of ``needed`` that is missing.
    """
    found: Groups = {}
    first: Record | None = None
    for run in runs:
        first = first or run
        if not run.finished:
            raise RecordError(
                f"{run.folder} has {len(run.epochs)} of {run.config['epochs']} epochs: finish it "
                "with --resume before drawing"
            )
        ours, theirs = _setting(run), _setting(first)
        differ = [key for key in SAME if ours.get(key) != theirs.get(key)]
        if differ:
            raise RecordError(
                f"{run.folder} and {first.folder} differ in {', '.join(differ)}: a figure compares "
                "runs of one setting; move them to folders of their own"
            )
        others = found.setdefault(run.name, [])
        if any(run.seed == other.seed for other in others):
            raise RecordError(f"{run.folder}: there is another {run.name!r} run of seed {run.seed}")
        others.append(run)
    missing = [name for name in needed if name not in found]
    if missing:
        raise RecordError(
            f"no run of schedule {', '.join(missing)}; found {', '.join(found) or 'none'}: run the "
            "missing ones (regimes ablate GRID --schedules ...) before drawing"
        )
    return {name: sorted(found[name], key=lambda r: r.seed) for name in style.order(found)}


def _setting(run: Record) -> dict[str, Any]:
    """The configuration, with the images themselves in place of where they lay."""
    data = {k: v for k, v in run.config["data"].items() if k not in ("path", "download")}
    return {**run.config, "data": {**data, "digest": run.header["data"]["digest"]}}


def compressed(run: Record) -> list[dict[str, Any]]:
    """The compressed layers in network order."""
    return [layer for layer in run.header["layers"] if layer["compressed"]]


def windows(found: Groups) -> list[list[int]]:
    """The hand-made critical windows ``[first, stop)``; none if no run has them."""
    for name in ("low-in-critical", "high-in-critical"):
        if found.get(name):
            return found[name][0].config["policy"].get("windows", [])
    return []


def norms(runs: Sequence[Record]) -> pd.DataFrame:
    """Per epoch and compressed layer, the mean over ``runs`` of the detectors' statistic."""
    names = [layer["name"] for layer in compressed(runs[0])]
    rows = pd.concat([run.layers.rename(columns={run.statistic: "norm"}) for run in runs])
    rows = rows[rows["layer"].isin(names)]
    frame = rows.groupby(["layer", "epoch"], as_index=False).agg(
        norm=("norm", "mean"), n=("norm", "size")
    )
    frame.insert(1, "depth", frame["layer"].map(names.index))
    return frame.sort_values(["depth", "epoch"], ignore_index=True)


def curves(found: Groups) -> pd.DataFrame:
    """Per schedule and epoch: n, accuracy in % with its 95 % t interval, mean floats so far."""
    rows = []
    for name, runs in found.items():
        metric = 100 * np.stack([run.epochs["metric"].to_numpy() for run in runs])
        floats = np.stack([run.epochs["total_floats"].to_numpy() for run in runs]).mean(0)
        for epoch in range(metric.shape[1]):
            mean, low, high = interval(metric[:, epoch].tolist())
            rows.append((name, epoch, len(runs), mean, low, high, floats[epoch]))
    columns = ["schedule", "epoch", "n", "accuracy", "ci_low", "ci_high", "floats"]
    return pd.DataFrame(rows, columns=columns)


def levels(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per seed, epoch and compressed layer: the level."""
    names = [layer["name"] for layer in compressed(runs[0])]
    parts = [
        run.layers.loc[run.layers["layer"].isin(names), ["epoch", "layer", "level"]].assign(
            seed=run.seed
        )
        for run in runs
    ]
    return pd.concat(parts, ignore_index=True)[["seed", "epoch", "layer", "level"]]


# -- the table -------------------------------------------------------------------------------


def table(runs: Iterable[Record]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per schedule, one row per comparison).

    Accuracy is the mean of a run's last three epochs, in %; sd over seeds. A comparison is the
    mean over common seeds of the difference in points, with its 95 % t interval, and the ratio of
    the two schedules' traffic.
    """
    found = groups(runs, SCHEDULES)
    each = summary([run for group in found.values() for run in group], LAST)
    each["accuracy"], each["floats"] = 100 * each["metric"], each["floats"] / 1e6
    rows = each.groupby("name", sort=False).agg(
        n=("seed", "size"), accuracy=("accuracy", "mean"), sd=("accuracy", "std"),
        floats_M=("floats", "mean"),
    )  # fmt: skip
    rows["of_low"] = rows["floats_M"] / float(rows["floats_M"]["low"])
    pairs = [_pair(each, a, b) for a, b in PAIRS if {a, b} <= found.keys()]
    return rows.rename_axis("schedule").reset_index(), pd.DataFrame(pairs)


def _pair(each: pd.DataFrame, a: str, b: str) -> dict[str, Any]:
    wide = each.pivot(index="seed", columns="name", values="accuracy")[[a, b]].dropna()
    floats = each.groupby("name")["floats"].mean()
    if wide.empty:
        raise RecordError(f"{a} and {b} have no seed in common: run both with the same seeds")
    differences = (wide[a] - wide[b]).to_list()
    mean, low, high = interval(differences)
    above = sum(d > 0 for d in differences)
    return {
        "comparison": f"{a} - {b}", "n": len(wide), "difference": mean, "ci_low": low,
        "ci_high": high, "positive": above, "traffic_ratio": floats[a] / floats[b],
    }  # fmt: skip


def as_text(rows: pd.DataFrame, pairs: pd.DataFrame) -> tuple[list[list[str]], list[list[str]]]:
    """Both tables as rounded text, titles first."""
    first = [["schedule", "n", "accuracy %", "floats (M)", "of low"]]
    for row in rows.to_dict("records"):
        sd = "" if math.isnan(row["sd"]) else f" ± {row['sd']:.1f}"
        first.append([row["schedule"], str(row["n"]), f"{row['accuracy']:.1f}{sd}",
                      f"{row['floats_M']:.4g}", f"{row['of_low']:.2f}"])  # fmt: skip
    second = [["difference", "n", "points", "95 % t interval", "> 0", "traffic ratio"]]
    for pair in pairs.to_dict("records"):
        low, high = pair["ci_low"], pair["ci_high"]
        ends = "-" if math.isnan(low) else f"[{low:+.1f}, {high:+.1f}]"
        second.append([pair["comparison"], str(pair["n"]), f"{pair['difference']:+.1f}", ends,
                       f"{pair['positive']}/{pair['n']}",
                       f"{pair['traffic_ratio']:.2f}"])  # fmt: skip
    return first, second


def write_tables(folder: Path, rows: pd.DataFrame, pairs: pd.DataFrame, about: str) -> list[Path]:
    """``table.csv``, ``differences.csv`` (full precision) and ``table.md`` (rounded)."""
    folder.mkdir(parents=True, exist_ok=True)
    rows.to_csv(folder / "table.csv", index=False, lineterminator="\n")
    pairs.to_csv(folder / "differences.csv", index=False, lineterminator="\n")
    parts = []
    for lines in as_text(rows, pairs):
        cells = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    text = "\n\n".join([about, *parts])
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    return [folder / name for name in ("table.csv", "differences.csv", "table.md")]
