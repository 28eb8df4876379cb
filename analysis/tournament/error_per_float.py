"""Error per float: the error of each compressor on the same gradients, against what it sends.

Run, then draw (5 minutes on one core)::

    regimes ablate smoke-rivals --seeds 3
    regimes figure rivals runs/smoke-rivals

The training is dense; the instrument `rivals` compresses copies of its gradients. *A step*: without
error feedback, the mean over the epochs. *The sum*: all updates since the start, with the error
feedback of the compressor, at the end of the run. Both are relative errors in the norm of the whole
model's gradient; sending nothing has an error of 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from regimes.base.config import DENSE
from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import group_runs
from regimes.plotting.looks import SPARE, Look, level_text
from regimes.plotting.words import add_headline, label_ends
from regimes.records import Record, load_all

from ..common.command import Files, Out, Records
from ..common.estimates import as_table, estimate, number, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ERRORS = {
    "once": "relative error of a step",
    "summed": "relative error of all steps,\nwith error feedback",
}
NAMES = {  # of compressors
    "powersgd": "PowerSGD",
    "acp-sgd": "ACP-SGD",
    "acp-sgd, iterations 2": "ACP-SGD, 2 iterations",
    "topk": "TopK",
    "randomk": "RandomK",
    "dct-topk": "TopK of a cosine transform",
    "quantise": "quantised",
    "sign": "signs",
    "cast": "half precision",
}
FEW = 0.1  # of dense's bytes: what the title compares
KEY = ["compressor", "level"]
LINES = (("#000000", "-", "o"), *SPARE)

# -- records to numbers ----------------------------------------------------------------------


def errors(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per compressor and level, as the configuration has them: n, floats and bytes of a
    step as shares of dense's, and both errors: geometric means over seeds with their 95 % t
    intervals (of the logarithm).

    Raises:
        RecordError: a run without readings of the instrument, or runs of different settings.
    """
    readings = [
        row for group in group_runs(runs).values() for run in group for row in _readings(run)
    ]
    rows = []
    for (name, level), group in pd.DataFrame(readings).groupby(KEY, sort=False):
        row = {
            "compressor": name,
            "level": level,
            "n": len(group),
            "floats": group["floats"].iloc[0],
            "bytes": group["bytes"].iloc[0],
        }
        for error in ERRORS:
            row |= _geometric(group[error].to_list(), error)
        rows.append(row)
    return pd.DataFrame(rows)


def _readings(run: Record) -> list[dict[str, Any]]:
    lines = [line["rivals"] for line in run.details if line["instrument"] == "rivals"]
    if not lines:
        raise RecordError(
            f"{run.folder} has no readings of the instrument rivals: run the grid smoke-rivals or "
            "lm-rivals"
        )
    dense = run.header["per_step"][DENSE]
    steps = pd.DataFrame([[rival["once"] for rival in line] for line in lines], dtype=float)
    return [
        {
            "compressor": name_of(last["compressor"]),
            "level": str(last["level"]),
            "floats": last["floats"] / dense["floats"],
            "bytes": last["bytes"] / dense["bytes"],
            "once": once,
            "summed": last["summed"],
        }
        for last, once in zip(lines[-1], steps.mean(), strict=True)
    ]


def _geometric(values: Sequence[float], name: str) -> dict[str, float]:
    """Mean and interval of the logarithms; of the values where an error is 0."""
    if min(values) <= 0:
        return estimate(values, name)
    return estimate([math.log(x) for x in values], name, logs=True)


def name_of(table: dict[str, Any]) -> str:
    """A compressor with the fields that it was given: "acp-sgd, iterations 2"."""
    given = [f"{key} {json.dumps(value)}" for key, value in table.items() if key != "name"]
    return ", ".join([table["name"], *given])


def level_label(name: str, level: str) -> str:
    """A level in words, e.g. "rank 4"; empty if the compressor has only one."""
    return (level_text(name.partition(",")[0]) or "").format(level)


# -- the table and the figure ----------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    """Rounded, from few bytes to many."""
    columns = {
        "compressor": word("compressor"),
        "level": lambda row: level_label(row["compressor"], row["level"]),
        "n": word("n"),
        "floats": number("floats", ".1%"),
        "bytes": number("bytes", ".1%"),
        "error of a step": number("once", ".3f"),
        "of the sum": number("summed", ".2%"),
    }
    return as_table(rows.sort_values("bytes", kind="stable"), columns, texts=2)


def figure(rows: pd.DataFrame, run: Record) -> style.Drawing:
    """Both errors against bytes: a line per compressor, a point per level."""
    with style.theme():
        fig = style.figure(3.9)
        panels = fig.subplots(1, 2)
        for ax, (error, label) in zip(panels, ERRORS.items(), strict=True):
            _draw(ax, rows, "bytes", error)
            ax.set(xlabel="bytes of a step, of dense's", ylabel=f"{label}\nlower is better")
        _name(panels[1], rows)
        add_headline(fig, _title(rows))
        style.add_caption(
            fig,
            "What each compressor makes of the gradients of one dense training, "
            f"{style.seeds_in_words(rows['n'].to_list())}, geometric means, bars: 95 % t "
            "interval. Left: a step without error feedback, mean over the run. Right: all "
            f"updates of the run, with the error feedback that each has by default. "
            f"{style.describe_setting(run, compression=False)}.",
        )
    return style.Drawing(fig, rows)


def _draw(ax: Axes, rows: pd.DataFrame, cost: str, error: str) -> None:
    for place, (name, levels) in enumerate(rows.groupby("compressor", sort=False)):
        colour, dash, marker = LINES[place % len(LINES)]
        points = levels.sort_values(cost)
        half = [
            points[error] - points[f"{error}_ci_low"],
            points[f"{error}_ci_high"] - points[error],
        ]
        ax.errorbar(
            points[cost],
            points[error],
            half,
            color=colour,
            linestyle=dash,
            marker=marker,
            markersize=5,
            linewidth=1.2,
            elinewidth=0.8,
            label=NAMES.get(str(name), str(name)),
        )
    if error == "summed":
        style.log_axis(ax)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def _name(ax: Axes, rows: pd.DataFrame) -> None:
    """The compressors' names, each joined to its level with the most bytes."""
    ends = []
    for place, (name, levels) in enumerate(rows.groupby("compressor", sort=False)):
        last, text = levels.sort_values("bytes").iloc[-1], NAMES.get(str(name), str(name))
        look = Look(text, *LINES[place % len(LINES)])
        ends.append((float(last["bytes"]), float(last["summed"]), text, look))
    label_ends(ax, ends)


def _title(rows: pd.DataFrame) -> str:
    """Which compressor has the smallest error of all steps at few bytes, and which is next."""
    few = rows[rows["bytes"] <= FEW].sort_values("summed")
    best = few.groupby("compressor", sort=False).first().reset_index()
    if len(best) < 2:
        return "The error of compressors against the bytes that they send"
    two = [
        _with_error({str(k): v for k, v in row.items()}) for row in best.iloc[:2].to_dict("records")
    ]
    return (
        f"At up to {100 * FEW:.0f}\xa0% of dense's bytes the error of all steps is smallest for "
        f"{two[0]}; next: {two[1]}"
    )


def _with_error(row: dict[str, Any]) -> str:
    """ "TopK, K = 3 % (1.1 %)"."""
    level = level_label(row["compressor"], row["level"])
    name = NAMES.get(row["compressor"], row["compressor"])
    return f"{name}{', ' if level else ''}{level} ({100 * row['summed']:.2g}\xa0%)"


def main(records: Records, out: Out = None) -> list[Path]:
    """Draw the error of compressors against what they send and print the table."""
    files, runs = Files(records, out), load_all(records)
    rows = errors(runs)
    files.page("rivals", f"{style.describe_setting(runs[0])}.", as_text(rows))
    files.figure("rivals", figure(rows, runs[0]))
    return files.print_paths()
