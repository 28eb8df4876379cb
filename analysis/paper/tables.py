"""Tables 1-6: the data sent in every static row, by rule; the rest from records.

::

    regimes figure tables                               # the static rows
    regimes figure tables runs/paper-table1-resnet18    # and what runs of the same setting say

`table_rules` has the rule and where the paper's rows depart from it. ACCORDION's rows of
Tables 1 to 4 have none: what it sends is what its runs decide; in Tables 5 and 6 it is a fixed
window. Accuracy and seconds of ours have columns where there are runs of the very same setting:
network, whole data set, workers, batch, levels and epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.records import Record, check_same_experiment, last_metric, load_all

from ..common.command import Files, Out, Several
from ..common.compare import LAST
from . import published
from .curves import training_seconds
from .table_rules import BATCH, EPOCHS, UNITS, WORKERS, agrees, explained, rule, window

Key = tuple[str, str, str, str]  # data, network, compressor, level
TITLES = {
    1: "PowerSGD, CIFAR-10",
    2: "PowerSGD, CIFAR-100",
    3: "TopK, CIFAR-10",
    4: "TopK, CIFAR-100",
    5: "batch size, CIFAR-10",
    6: "batch size, CIFAR-100",
}
HEADINGS = [
    "network",
    "level",
    "accuracy %",
    "authors' log",
    "ours",
    "sent",
    "by the rule",
    "ours",
    "s",
    "ours",
    "the rule",
]
WIDTH = 120  # letters that eleven columns need
ABOUT = (
    "Accuracy: the paper's (3 seeds), the authors' log at its end (1 seed), ours (mean of the last "
    f"{LAST} epochs, mean ± sd over seeds). Sent: floats of the whole training; by the rule: "
    "floats per step x steps, as explained in the last column. s: seconds, ours without evaluation."
)


# -- records ---------------------------------------------------------------------------------


def row_of(config: dict[str, Any]) -> Key | None:
    """(data, network, compressor, level) of a configuration, as a row may have it (`known_keys`);
    None if it is not at the paper's scale, or of no such schedule.

    ACCORDION's level is "accordion LOW HIGH": a row's neighbours tell which two it has.
    """
    data, network = config["data"], config["model"]["name"]
    all_data = not any(data.get(key) for key in ("train_size", "test_size", "image_size"))
    scale = (config["workers"], config.get("batch_size"), config["epochs"])
    if not all_data or scale != (WORKERS, BATCH, EPOCHS):
        return None
    name, _, compressor = published.setting(config)
    table = config["batch_policy"] if compressor == "batch" else config["policy"]
    if table["name"] == "static":
        return name, network, compressor, published.level(config, table.get("level", "low"))
    if table["name"] in ("accordion", "accordion-batch"):
        both = [published.level(config, table.get(end, end)) for end in ("low", "high")]
        return name, network, compressor, " ".join(["accordion", *both])
    return None


def keys(row: dict[str, Any], rows: pd.DataFrame) -> list[Key]:
    """What `row_of` gives for runs of a row of ``rows``, the network that the paper used first."""
    level, network = row["level"], f"{row['model']}-{row['data']}"
    if level == "accordion":
        same = rows[(rows["table"] == row["table"]) & (rows["model"] == row["model"])]
        level = " ".join(["accordion", *(x for x in same["level"] if x != "accordion")])
    senets = [f"se-resnet18-{row['data']}", f"senet18-{row['data']}"]
    networks = senets if row["model"] == "senet" else [network]
    return [(row["data"], name, row["compressor"], level) for name in networks]


def known_keys() -> set[Key]:
    """The keys of all rows."""
    rows = published.tables()
    lines: list[Any] = rows.to_dict("records")
    return {key for line in lines for key in keys(line, rows)}


def table(runs: Iterable[Record] = ()) -> pd.DataFrame:
    """One row per row of Tables 1-6.

    Columns: as `published.tables`; ``plain`` (floats that the row would send as printed) and
    ``floats`` (as explained), ``agrees`` and ``why`` (rows with a rule); ``log`` (accuracy at the
    end of the authors' curve); of our runs ``n``, ``ours``, ``sd`` (accuracy in %),
    ``ours_floats``, ``ours_seconds``.

    Raises:
        RecordError: a run of a row that is not finished, or runs of a row that are not of one
            experiment.
    """
    rows, logs, known = published.tables(), _logs(), known_keys()
    runs_by_row: dict[Key, list[Record]] = {}
    for run in runs:
        if (key := row_of(run.config)) in known:
            if not run.finished:
                raise RecordError(f"{run.folder} is not finished: resume it to have it in a table")
            runs_by_row.setdefault(key, []).append(run)
    lines = []
    for alike in runs_by_row.values():
        check_same_experiment(alike)
    for line in rows.to_dict("records"):
        row = {str(name): value for name, value in line.items()}
        here = next((runs_by_row[key] for key in keys(row, rows) if key in runs_by_row), [])
        log = logs.get((row["data"], row["model"], row["compressor"], row["level"]), math.nan)
        lines.append({**row, **_static(row), "log": log, **_ours(here)})
    return pd.DataFrame(lines)


def _static(row: dict[str, Any]) -> dict[str, Any]:
    accordion = row["level"] == "accordion"
    if accordion and row["compressor"] != "batch":
        return {"plain": math.nan, "floats": math.nan, "agrees": None, "why": ""}
    chosen = window(row) if accordion else explained(row)
    same = agrees(chosen.floats, row["printed"], row["unit"])
    plain = math.nan if accordion else rule(row).floats
    return {"plain": plain, "floats": chosen.floats, "agrees": same, "why": chosen.why}


def _logs() -> dict[Any, float]:
    """Accuracy in % at the end of each of the authors' curves."""
    frame = published.runs()
    last = frame.groupby(["data", "model", "compressor", "level"])["value"].last()
    return {key: 100 * float(value) for key, value in last.items()}


def _ours(runs: Sequence[Record]) -> dict[str, Any]:
    if not runs:
        return {"n": 0} | dict.fromkeys(("ours", "sd", "ours_floats", "ours_seconds"), math.nan)
    last = [100 * last_metric(run, LAST) for run in runs]
    return {
        "n": len(runs),
        "ours": float(np.mean(last)),
        "sd": float(np.std(last, ddof=1)) if len(runs) > 1 else math.nan,
        "ours_floats": float(np.mean([run.epochs["floats"].sum() for run in runs])),
        "ours_seconds": float(np.mean([training_seconds(run)[-1] for run in runs])),
    }


# -- out -------------------------------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    """The rows of one table as rounded text."""
    lines, number = [], int(rows["table"].iloc[0])
    for row in rows.to_dict("records"):
        unit, digits = row["unit"], len(row["printed"].partition(".")[2])

        def sent(floats: float, unit: str = unit, digits: int = digits) -> str:
            return "" if math.isnan(floats) else f"{floats / UNITS[unit]:.{digits + 1}f} {unit}"

        spread = "" if math.isnan(row["sd"]) else f" ± {row['sd']:.1f}"
        verdict = {True: "agrees", False: "DIFFERS", None: ""}[row["agrees"]]
        lines.append(
            [
                row["model"],
                row["level"],
                f"{row['accuracy']:.1f}",
                f"{row['log']:.2f}",
                f"{row['ours']:.1f}{spread} (n = {row['n']})" if row["n"] else "",
                f"{row['printed']} {unit}",
                sent(row["floats"]),
                sent(row["ours_floats"]),
                f"{row['seconds']:,}",
                f"{row['ours_seconds']:,.0f}" if row["n"] else "",
                f"{verdict}: {row['why']}" if row["why"] else verdict,
            ]
        )
    return Table(HEADINGS, lines, title=f"Table {number}: {TITLES[number]}", texts=2, ends=1)


def markdown(rows: pd.DataFrame) -> str:
    """All tables, rounded."""
    parts = [ABOUT]
    for number, group in rows.groupby("table"):
        words = f"**Table {number}.** {TITLES[int(str(number))]}"
        parts.append(f"{words}\n\n{as_text(group).markdown()}")
    return "\n\n".join(parts) + "\n"


def main(
    records: Several = (),
    out: Out = None,
) -> list[Path]:
    """Print Tables 1-6: the numbers of the paper, of the rule, and of the runs under RECORDS."""
    runs = load_all(*records) if records else []
    rows, console = table(runs), stdout.make_console(highlight=False)
    files = Files("tables", out)
    files.table("tables", rows)
    files.text("tables.md", markdown(rows))
    console.width = max(console.width, WIDTH)
    for _, group in rows.groupby("table"):
        console.print(as_text(group).drawn(), "")
    console.print(ABOUT, "")
    known = known_keys()
    left = sum(row_of(run.config) not in known for run in runs)
    if left:
        console.print(f"{left} of {len(runs)} runs are at no row's setting and were left out.")
    return files.print_paths()
