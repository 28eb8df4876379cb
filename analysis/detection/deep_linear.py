"""Deficits in a deep linear network with a known critical period, and the detectors that see it.

Run, then draw (11 minutes a seed on one core)::

    regimes ablate deep-linear --seeds 4 --jobs 2
    regimes figure deep_linear runs/deep-linear

A deficit's *harm* is the squared error at the end, over the error of the same seed without a
deficit after as many steps on the right matrix. Left: by a deficit's length, from the start.
Middle: by its onset, of two lengths. Right: what detectors call critical in the training without a
deficit. The score *finds* of a detector is the share of units that it calls critical inside the
harmful deficits of the longest length (mean over seeds and layers), minus the share inside the
harmless ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.console.tables import Table
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import group_runs
from regimes.plotting.panels import draw_bands
from regimes.plotting.said import Estimate
from regimes.plotting.words import add_headline
from regimes.records import Record, last_metric, load_all, unit_name
from regimes.replay.detect import make_rule
from regimes.replay.replay import has_statistics, replay_rule
from regimes.statistics import correct_by_holm, p_value

from ..common.command import Files, Out, Records
from ..common.compare import LAST
from ..common.estimates import as_table, estimate, number, p, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.5)))

# -- records to numbers ----------------------------------------------------------------------


def harms(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per deficit, by onset and length: its steps ``[first, stop)``, n, and the harm: the
    geometric mean over seeds of the ratio of final errors, with its 95 % t interval. If a deficit
    of that length has an earlier onset, the harm over the harm of the earliest (``later``),
    likewise, with p of their logarithms' t test, corrected by Holm over all of them; else nan.

    Raises:
        RecordError: no runs without a deficit, one that is too short, or no seed in common.
    """
    by_name = group_runs(runs, [NONE])
    plain = {run.seed: run for run in by_name[NONE]}
    logs: dict[tuple[int, int], dict[int, float]] = {}
    for name, group in by_name.items():
        if name == NONE:
            continue
        ((first, stop),) = group[0].config["deficit"]["windows"]
        logs[first, stop] = {r.seed: _harm_of(r, plain[r.seed]) for r in group if r.seed in plain}
        if not logs[first, stop]:
            raise RecordError(f"{name} and {NONE} have no seed in common: run both with the same")
    rows = []
    for (first, stop), each_log in sorted(logs.items()):
        later = _against_the_earliest(logs, first, stop)
        row: dict[str, Any] = {"first": first, "stop": stop, "n": len(each_log)}
        row |= estimate([*each_log.values()], "harm", "ci", logs=True)
        row |= estimate(later, "later", logs=True)
        rows.append(row | {"p": p_value(later)})
    table = pd.DataFrame(rows)
    return table.assign(p_holm=correct_by_holm(table["p"].to_list()))


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
    return math.log(last_metric(run, LAST) / last_metric(plain, LAST, right))


def _against_the_earliest(
    logs: Mapping[tuple[int, int], Mapping[int, float]], first: int, stop: int
) -> list[float]:
    """Logarithms of harm minus the logarithms for the earliest onset of that length, by seed."""
    earliest = min(window for window in logs if window[1] - window[0] == stop - first)
    ours, theirs = logs[first, stop], logs[earliest]
    return [] if earliest[0] == first else [ours[s] - theirs[s] for s in ours if s in theirs]


def calls(runs: Sequence[Record], texts: Sequence[str] = DETECTORS) -> dict[str, np.ndarray]:
    """Per detector with a signal that all runs recorded, the share of runs and layers that it calls
    critical, by unit."""
    shares_by_detector = {}
    for text in texts:
        if all(has_statistics(run, make_rule(text, run)) for run in runs):
            tables = [replay_rule(run, make_rule(text, run)) for run in runs]
            shares = [table.groupby("epoch")["critical"].mean().to_numpy() for table in tables]
            shares_by_detector[text.partition(":")[0]] = np.mean(shares, axis=0)
    return shares_by_detector


def finds(harm: pd.DataFrame, called: Mapping[str, np.ndarray], unit: int) -> pd.DataFrame:
    """One row per detector: the share of units that it calls critical inside the deficits of one
    length that do harm (their interval lies above 1), inside the others, and the difference. A
    deficit without an interval, as of two seeds, is in neither; nan where there is none.

    Args:
        harm: of `harms`, for deficits of one length.
        unit: steps.
    """
    rows = []
    for name, share in called.items():
        inside: dict[bool, list[float]] = {True: [], False: []}
        for row in harm[harm["ci_low"].notna()].to_dict("records"):
            span = share[row["first"] // unit : math.ceil(row["stop"] / unit)]
            inside[row["ci_low"] > 1].append(float(span.mean()) if len(span) else math.nan)
        hit, false = (float(np.mean(x)) if x else math.nan for x in inside.values())
        rows.append({"detector": name, "harmful": hit, "harmless": false, "finds": hit - false})
    return pd.DataFrame(rows)


def by_length(harm: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The deficits of each length that begin at several steps, the longest first."""
    grouped = {int(length): rows for length, rows in harm.groupby(harm["stop"] - harm["first"])}
    return {length: grouped[length] for length in sorted(grouped)[::-1] if len(grouped[length]) > 1}


# -- the tables and the figure ---------------------------------------------------------------


def as_text(harm: pd.DataFrame, finding: pd.DataFrame) -> tuple[Table, Table]:
    """Both, rounded."""
    harms_of = {
        "from": number("first", ","),
        "to": number("stop", ","),
        "n": word("n"),
        "final error, of none's": lambda row: _rounded(row["harm"], row["ci_low"], row["ci_high"]),
        "of the earliest's": lambda row: _rounded(
            row["later"], row["later_low"], row["later_high"]
        ),
        "p (Holm)": p("p_holm"),
    }
    detectors = {
        "detector": word("detector"),
        "critical in harmful": number("harmful", ".2f"),
        "in harmless": number("harmless", ".2f"),
        "finds": number("finds", ".2f"),
    }
    return as_table(harm, harms_of, texts=0), as_table(finding, detectors)


def _rounded(*numbers: float) -> str:
    """A ratio and its ends; empty where there is none."""
    mean, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.2g}" for x in numbers)
    return "" if math.isnan(numbers[0]) else f"{mean} [{low}, {high}]"


def figure(
    runs: Sequence[Record], harm: pd.DataFrame, called: Mapping[str, np.ndarray]
) -> style.Drawing:
    """Harm by length and by onset, and the detectors' calls."""
    with style.theme():
        fig = style.figure(3.5)
        left, middle, right = fig.subplots(1, 3, width_ratios=[2, 2, 2.4])
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
                label=f"{length:,} steps long",
            )
        middle.legend(loc="upper left", fontsize=6.5, borderpad=0)
        left.set_ylabel("final error, of that without a deficit\nlower is better")
        image = draw_bands(right, pd.DataFrame(called).T)
        right.set_xlabel(unit_name(runs[0].config))
        right.locator_params(axis="x", nbins=5)
        fig.colorbar(image, ax=right, aspect=14, pad=0.02).set_label("share called critical")
        for ax, title in zip(
            (left, middle, right),
            ("from step 0 on", "by onset", "what detectors mark"),
            strict=True,
        ):
            ax.set_title(title, loc="left")
        add_headline(fig, _title(harm))
        style.add_caption(
            fig,
            f"{style.seeds_in_words(harm['n'].to_list())}, bars: 95 % t interval of the mean "
            "logarithm. In a deficit the entries are those of another matrix, of rank "
            f"{_other(runs)}; 'none' has as many steps on the right matrix. "
            f"{style.describe_setting(runs[0])} (without a deficit).",
        )
    table = pd.DataFrame(called).rename_axis("unit").reset_index()
    return style.Drawing(fig, pd.concat([harm, table], axis=1))


def _title(harm: pd.DataFrame) -> str:
    """How the harm of the longest moved deficit goes from its earliest onset to its latest."""
    moved = next(iter(by_length(harm).values())).sort_values("first")
    early, late = moved.iloc[0], moved.iloc[-1]
    change = Estimate.at(late, "later")  # over the harm of the earliest
    verdict = change.verdict(1)
    words = {
        "above": "A deficit harms the later the more",
        "below": "A deficit harms the later the less",
        "not shown": "A deficit harms as much late as early, as far as is shown",
        "open": "Open whether a deficit harms more late than early",
    }
    return (
        f"{words[verdict]}: {early['stop'] - early['first']:,.0f} steps from step "
        f"{early['first']:,.0f} leave {early['harm']:,.0f} times the error, from "
        f"step {late['first']:,.0f} on {late['harm']:,.0f} times"
    )


def _other(runs: Sequence[Record]) -> int:
    deficits = (deficit for run in runs if (deficit := run.config.get("deficit")))
    return int(next(deficits).get("rank", RANK))


def _harm(ax: Axes, x: pd.Series, rows: pd.DataFrame, xlabel: str, **line: Any) -> None:
    ends = [rows["harm"] - rows["ci_low"], rows["ci_high"] - rows["harm"]]
    ax.errorbar(x, rows["harm"], ends, color="black", marker="o", markersize=4, capsize=2, **line)
    ax.axhline(1, color="#888888", linewidth=0.8)
    ax.set_xlabel(xlabel)
    style.log_axis(ax)


def main(records: Records, out: Out = None) -> list[Path]:
    """Draw deficits and detectors from the runs of the grid deep-linear and print both tables."""
    files, runs = Files(records, out), load_all(records)
    harm, plain = harms(runs), [run for run in runs if run.name == NONE]
    called = calls(plain)
    finding = finds(
        next(iter(by_length(harm).values())), called, int(plain[0].config["unit_steps"])
    )
    about = f"{style.describe_setting(plain[0])} (without a deficit)."
    files.page("deep-linear", about, *as_text(harm, finding))
    files.figure("deep-linear", figure([*plain, *runs], harm, called))
    return files.print_paths()
