"""Where critical periods are known: what deficits do to a deep linear network, and who sees it.

Run, then draw (11 minutes a seed on one core)::

    regimes ablate deep-linear --seeds 4 --jobs 2
    regimes figure deep_linear runs/deep-linear

A deficit's *harm* is the squared error at the end, over that of the same seed without a deficit
after as many steps on the right matrix. Left: by a deficit's length, from the start.
Middle: by its onset, of two lengths. Right: what detectors call critical in the training without a
deficit. A detector *finds* the critical period as far as it calls units critical inside the
deficits of the longest length that do harm (mean over seeds and layers), beyond what it calls so
inside those that do none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.console import stdout
from regimes.console.tables import Table
from regimes.console.units import p_text
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import groups
from regimes.plotting.looks import SPARE
from regimes.records import Record, load_all
from regimes.replay.replay import measured, replay
from regimes.replay.spelling import rule
from regimes.statistics import holm, p_value, t_interval

from ..common.command import Files
from ..common.compare import LAST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DETECTORS = (
    "norm-change:interval=4",
    "accordion:interval=4",
    "eigenvalue-change:interval=4",
    "sharpness-change:interval=4",
    "first-share:share=0.25",
    "random-windows:share=0.25",
)
NONE = "none"
RANK = 10  # of the other matrix, where a configuration does not say (`OtherMatrix`)
HEADS = ("from", "to", "n", "final error, of none's", "of the earliest's", "p (Holm)")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.5)))

# -- records to numbers ----------------------------------------------------------------------


def harms(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per deficit, by onset and length: its steps ``[first, stop)``, n, and the harm: the
    geometric mean over seeds of the ratio of final errors, with its 95 % t interval. Of those whose
    length has an earlier onset, too, the harm over that of the earliest (``later``), likewise, with
    p of their logarithms' t test, corrected by Holm over all of them; else nan.

    Raises:
        RecordError: no runs without a deficit, one that is too short, or no seed in common.
    """
    found = groups(runs, [NONE])
    plain = {run.seed: run for run in found[NONE]}
    logs: dict[tuple[int, int], dict[int, float]] = {}
    for name, each in found.items():
        if name == NONE:
            continue
        ((first, stop),) = each[0].config["deficit"]["windows"]
        logs[first, stop] = {r.seed: _harm_of(r, plain[r.seed]) for r in each if r.seed in plain}
        if not logs[first, stop]:
            raise RecordError(f"{name} and {NONE} have no seed in common: run both with the same")
    rows = []
    for (first, stop), each_log in sorted(logs.items()):
        later = _against_the_earliest(logs, first, stop)
        harm, other = _ratio("harm", "ci", [*each_log.values()]), _ratio("later", "later", later)
        row = {"first": first, "stop": stop, "n": len(each_log), **harm, **other}
        rows.append(row | {"p": p_value(later)})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"].to_list()))


def _harm_of(run: Record, plain: Record) -> float:
    """Its logarithm."""
    unit = int(run.config["unit_steps"])
    ((first, stop),) = run.config["deficit"]["windows"]
    right = len(run.epochs) - math.ceil((stop - first) / unit)
    if len(plain.epochs) < right:
        raise RecordError(
            f"{plain.folder} has {len(plain.epochs)} units, {run.folder} {right} on "
            "the right matrix: train the first for as many"
        )
    ends = (run.epochs["metric"].tail(LAST), plain.epochs["metric"].head(right).tail(LAST))
    return math.log(ends[0].mean() / ends[1].mean())


def _against_the_earliest(
    logs: Mapping[tuple[int, int], Mapping[int, float]], first: int, stop: int
) -> list[float]:
    """The logarithms' differences to those of the earliest onset of that length, by seed."""
    earliest = min(each for each in logs if each[1] - each[0] == stop - first)
    ours, theirs = logs[first, stop], logs[earliest]
    return [] if earliest[0] == first else [ours[s] - theirs[s] for s in ours if s in theirs]


def _ratio(name: str, ends: str, logs: Sequence[float]) -> dict[str, float]:
    values = [math.exp(x) for x in t_interval(logs)] if logs else [math.nan] * 3
    return dict(zip((name, f"{ends}_low", f"{ends}_high"), values, strict=True))


def calls(runs: Sequence[Record], texts: Sequence[str] = DETECTORS) -> dict[str, np.ndarray]:
    """Per detector whose signal all runs recorded, the share of runs and layers that it calls
    critical, by unit."""
    found = {}
    for text in texts:
        if all(measured(run, rule(text, run)) for run in runs):
            tables = [replay(run, rule(text, run)) for run in runs]
            shares = [table.groupby("epoch")["critical"].mean().to_numpy() for table in tables]
            found[text.partition(":")[0]] = np.mean(shares, axis=0)
    return found


def finds(harm: pd.DataFrame, called: Mapping[str, np.ndarray], unit: int) -> pd.DataFrame:
    """One row per detector: the share of units that it calls critical inside the deficits of one
    length that do harm (their interval lies above 1), inside the others, and the difference.

    Args:
        harm: of `harms`, for deficits of one length.
        unit: steps.
    """
    rows = []
    for name, share in called.items():
        inside: dict[bool, list[float]] = {True: [], False: []}
        for row in harm.to_dict("records"):
            span = share[row["first"] // unit : math.ceil(row["stop"] / unit)]
            inside[row["ci_low"] > 1].append(float(span.mean()) if len(span) else math.nan)
        hit, false = (float(np.mean(x)) if x else math.nan for x in inside.values())
        rows.append({"detector": name, "harmful": hit, "harmless": false, "finds": hit - false})
    return pd.DataFrame(rows)


def by_length(harm: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The deficits of each length that begin at several steps, the longest first."""
    found = {int(length): rows for length, rows in harm.groupby(harm["stop"] - harm["first"])}
    return {length: found[length] for length in sorted(found)[::-1] if len(found[length]) > 1}


# -- the tables and the figure ---------------------------------------------------------------


def as_text(harm: pd.DataFrame, found: pd.DataFrame) -> tuple[Table, Table]:
    """Both, rounded."""
    first = [
        (
            f"{row['first']:,}",
            f"{row['stop']:,}",
            str(row["n"]),
            _rounded(row["harm"], row["ci_low"], row["ci_high"]),
            _rounded(row["later"], row["later_low"], row["later_high"]),
            p_text(row["p_holm"]),
        )
        for row in harm.to_dict("records")
    ]
    second = [
        (
            row["detector"],
            *(
                "" if math.isnan(row[key]) else f"{row[key]:.2f}"
                for key in ("harmful", "harmless", "finds")
            ),
        )
        for row in found.to_dict("records")
    ]
    return (
        Table(HEADS, first, texts=0),
        Table(("detector", "critical in harmful", "in harmless", "finds"), second),
    )


def _rounded(*numbers: float) -> str:
    """A ratio and its ends; empty where there is none."""
    mean, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.2g}" for x in numbers)
    return "" if math.isnan(numbers[0]) else f"{mean} [{low}, {high}]"


def figure(
    runs: Sequence[Record], harm: pd.DataFrame, called: Mapping[str, np.ndarray]
) -> tuple[Figure, pd.DataFrame]:
    """Harm by length and by onset, and the detectors' calls."""
    with style.theme():
        fig = style.figure(3.5)
        left, middle, right = fig.subplots(1, 3)
        middle.sharey(left)
        early = harm[harm["first"] == 0]
        _harm(left, early["stop"], early, "length of the deficit (steps)")
        for (length, moved), dashes in zip(by_length(harm).items(), DASHES, strict=False):
            _harm(
                middle,
                moved["first"],
                moved,
                "onset of the deficit (step)",
                linestyle=dashes,
                label=f"{length:,} steps",
            )
        middle.legend()
        left.set_ylabel("final error, of none's")
        unit = int(runs[0].config["unit_steps"])
        for (name, share), (colour, dash, _) in zip(called.items(), SPARE, strict=False):
            steps = unit * np.arange(len(share))
            right.step(steps, share, color=colour, linestyle=dash, where="post", label=name)
        right.set(xlabel="step, without a deficit", ylabel="share called critical")
        fig.legend(
            *right.get_legend_handles_labels(),
            loc="outside upper right",
            ncols=3,
            title="right",
            handlelength=4,
        )
        style.caption(
            fig,
            f"{style.seeds_in_words(harm['n'].to_list())}, bars: 95 % t interval of the mean "
            "logarithm. In a deficit the entries are those of another matrix, of rank "
            f"{_other(runs)}; 'none' has as many steps on the right matrix. "
            f"{style.setting(runs[0])} (without a deficit).",
        )
    table = pd.DataFrame(called).rename_axis("unit").reset_index()
    return fig, pd.concat([harm, table], axis=1)


def _other(runs: Sequence[Record]) -> int:
    found = (deficit for run in runs if (deficit := run.config.get("deficit")))
    return int(next(found).get("rank", RANK))


def _harm(ax: Axes, x: pd.Series, rows: pd.DataFrame, xlabel: str, **line: Any) -> None:
    ends = [rows["harm"] - rows["ci_low"], rows["ci_high"] - rows["harm"]]
    ax.errorbar(x, rows["harm"], ends, color="black", marker="o", markersize=4, capsize=2, **line)
    ax.axhline(1, color="#888888", linewidth=0.8)
    ax.set_xlabel(xlabel)
    style.log_axis(ax)


def main(records: Path, out: Path | None = None) -> list[Path]:
    """Draw deficits and detectors from the runs of the grid deep-linear and print both tables.

    Args:
        records: a folder of runs, or an archive of them.
        out: folder for the figure; default figures/NAME.
    """
    files, runs = Files(records, out), load_all(records)
    harm, plain = harms(runs), [run for run in runs if run.name == NONE]
    called = calls(plain)
    found = finds(next(iter(by_length(harm).values())), called, int(plain[0].config["unit_steps"]))
    console = stdout.console(highlight=False)
    texts = as_text(harm, found)
    for text in texts:
        console.print(text.drawn(), "")
    files.figure("deep-linear", figure([*plain, *runs], harm, called))
    about = f"{style.setting(plain[0])} (without a deficit)."
    files.text("deep-linear.md", "\n\n".join((about, *(t.markdown() for t in texts))) + "\n")
    return files.said()
