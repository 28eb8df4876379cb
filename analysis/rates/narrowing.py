"""Does compression narrow the range of usable rates early in training, or late?

Run, then draw (`grids/rates-when.toml`; 16 minutes on one core)::

    regimes ablate rates-when --seeds 8 --first-seed 4000
    regimes figure narrowing runs/rates-when

Each run has no compression but for one window of six epochs at rank 1; the rate is constant. A
rate is usable in a window if the training loss of its last epoch is at most so many nats (`LOSSES`)
above the lowest that runs without compression have in that epoch, mean over seeds (a rate at which
a seed's loss is not finite has none). From the best
rate upwards the range ends where a seed's line through its losses, over the logarithm of the rate,
first leaves that (`usable.end`). The range of the runs without compression is measured alike, in
the same epochs. If early training were critical to compression, the range with it would be the
smallest part of the range without it there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.base.statistics import p_value
from regimes.plotting import style
from regimes.plotting.looks import styles_of
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all

from ..common.command import Files, Out, Records
from ..common.estimates import as_table, estimate, mean, number, p, word
from ..common.paired import ALPHA
from ..common.panels import draw_over_rates, over_rates, rates_axis
from .usable import LOSSES, REFERENCE, arm_of, check_arms, end

WINDOW = re.compile(r"rank 1 in (\d+)-(\d+)")

# -- records to numbers ----------------------------------------------------------------------


def losses(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per window, seed and rate: the training loss of the window's last epoch, and the loss
    of the run without compression there (``dense``).

    Raises:
        RecordError: an unfinished run, one of another grid, one that ends before its window does,
            or one without its uncompressed twin; two runs with the same arm, rate and seed; or no
            window.
    """
    known: dict[tuple[str, int, float], Record] = {}
    for run in runs:
        run.check_finished()
        arm, at = arm_of(run)
        if not at or not (arm == REFERENCE or WINDOW.fullmatch(arm)):
            raise RecordError(
                f"{run.folder}: {run.name!r} is no window at a rate: see the grid rates-when"
            )
        if known.setdefault((arm, run.seed, run.rate), run) is not run:
            raise RecordError(f"two runs of {arm!r} at {run.rate:g} with seed {run.seed}")
    rows = []
    for (arm, seed, rate), run in known.items():
        if (match := WINDOW.fullmatch(arm)) is None:
            continue
        if (twin := known.get((REFERENCE, seed, rate))) is None:
            raise RecordError(
                f"{run.folder} has no run without compression at {rate:g} with seed "
                f"{seed} beside it"
            )
        last = int(match[2])
        if last >= min(len(run.rows), len(twin.rows)):
            raise RecordError(f"{run.folder} or its twin ends before epoch {last}")
        own, without = (float(one.epochs["train_loss"].astype(float)[last]) for one in (run, twin))
        rows.append(
            {
                "window": f"epochs {match[1]}-{last}",
                "first": int(match[1]),
                "seed": seed,
                "rate": rate,
                "loss": own,
                "dense": without,
            }
        )
    if not rows:
        raise RecordError("no run has rank 1 in a window: see the grid rates-when")
    check_arms(runs)
    order = ["first", "seed", "rate"]
    return pd.DataFrame(rows).sort_values(order, ignore_index=True)


def largest(by_run: pd.DataFrame) -> pd.DataFrame:
    """One row per limit, window and seed: the largest usable rate, with rank 1 in the window and
    without compression; inf if all from the best one up are, nan if the best one is not.

    Raises:
        RecordError: a seed was not run at a window's best rate.
    """
    rows = []
    for limit in LOSSES:
        for window, runs in by_run.groupby("window", sort=False):
            means = _means(runs)
            for seed, own in runs.groupby("seed"):
                rates = own["rate"].to_list()
                row: dict[str, Any] = {"limit": limit, "window": window, "seed": seed}
                for column in ("loss", "dense"):
                    if (rate := means[column].idxmin()) not in rates:
                        raise RecordError(
                            f"{window} has no run at {rate:g} with seed {seed}: run all rates "
                            "with the same seeds"
                        )
                    known = math.isfinite(means[column].min())
                    allowed = _lowest(runs) + limit if known else math.nan
                    row[column] = end(rates, own[column].to_list(), rates.index(rate), allowed)
                rows.append(row)
    return pd.DataFrame(rows)


def _means(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean losses of a window by rate; infinite where a seed has none."""
    means = runs.groupby("rate")[["loss", "dense"]].agg(lambda x: x.mean(skipna=False))
    return means.fillna(math.inf)


def _lowest(runs: pd.DataFrame) -> float:
    """The lowest mean loss without compression at the end of a window; nan if none is finite."""
    lowest = float(_means(runs)["dense"].min())
    return lowest if math.isfinite(lowest) else math.nan


def table(by_run: pd.DataFrame) -> pd.DataFrame:
    """One row per limit and window: n of seeds with both ranges ending within the rates tried, the
    largest usable rate with rank 1 and without compression, and their ratio (geometric means with
    95 % t intervals); p of a ratio as in the last window, on common seeds (nan of that itself)."""
    limits, rows = largest(by_run), []
    known = np.isfinite(limits["loss"]) & np.isfinite(limits["dense"])
    logs = limits.assign(loss=np.log(limits["loss"]), dense=np.log(limits["dense"]))[known]
    logs["ratio"] = logs["loss"] - logs["dense"]
    for limit in LOSSES:
        part = logs[logs["limit"] == limit]
        wide = part.pivot(index="seed", columns="window", values="ratio")
        windows = list(dict.fromkeys(by_run["window"]))
        for window in windows:
            seeds = part[part["window"] == window]
            row: dict[str, Any] = {"limit": limit, "window": window, "n": len(seeds)}
            for column in ("loss", "dense", "ratio"):
                row |= estimate(seeds[column].to_list(), column, logs=True)
            both = {window, windows[-1]} <= {*wide} and window != windows[-1]
            against = (wide[window] - wide[windows[-1]]).dropna().to_list() if both else []
            row["p"] = p_value(against) if against else math.nan
            rows.append(row)
    return pd.DataFrame(rows)


# -- numbers to text and figure --------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    """`table`, rounded."""
    columns = {
        "nats": number("limit", "g"),
        "at": lambda row: row["window"].removeprefix("epochs "),
        "n": word("n"),
        "rank 1, up to": mean("loss", ".2g"),
        "dense, up to": mean("dense", ".2g"),
        "of dense's": mean("ratio", ".2g"),
        "p": p("p"),
    }
    return as_table(rows, columns, texts=2)


def figure(by_run: pd.DataFrame, run: Record) -> style.Drawing:
    """Training loss against the rate, a panel per window, with rank 1 in it and with none.

    Args:
        run: any of them, for the setting.
    """
    numbers, words = [], {"loss": "rank 1", "dense": "dense"}
    looks = styles_of(("rank 1", "dense"))
    with style.theme():
        fig = style.figure(3.1)
        windows = list(dict.fromkeys(by_run["window"]))
        panels = fig.subplots(1, len(windows), sharey=True, squeeze=False)[0]
        for ax, window in zip(panels, windows, strict=True):
            part = by_run[by_run["window"] == window]
            for column, name in words.items():
                points = over_rates(part, column)
                numbers.append(points.assign(window=window, run=name))
                draw_over_rates(ax, points, looks[name])
            for limit in LOSSES:
                ax.axhline(
                    _lowest(part) + limit,
                    color="black",
                    linewidth=0.8,
                    linestyle=style.DOTTED,
                )
            ax.set_title(f"rank 1 in {window}", loc="left")
            ax.set(yscale="log", xlabel="learning rate")
            rates_axis(ax)
        panels[0].set_ylabel("training loss (nats)\nlower is better")
        panels[0].set_ylim(bottom=float(pd.concat(numbers)["mean"].min()) / 1.5)
        look: Any = {"fontsize": 6.5, "va": "bottom", "ha": "left"}
        for limit in LOSSES:
            first = by_run[by_run["window"] == windows[0]]
            at, y = panels[0].get_yaxis_transform(), limit + _lowest(first)
            panels[0].text(0.03, 1.04 * y, f"usable below: + {limit:g}", transform=at, **look)
        fig.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
        add_headline(fig, _title(table(by_run)))
        counts = by_run.groupby(["window", "rate"]).size().to_list()
        style.add_caption(fig, _words(counts, run))
    return style.Drawing(fig, pd.concat(numbers, ignore_index=True))


def _title(rows: pd.DataFrame) -> str:
    """Where rank 1's range ends, of dense's, in the first window and the last."""
    part = rows[rows["limit"] == LOSSES[0]]
    first, last = part.iloc[0], part.iloc[-1]
    early, late = (MeanInterval.at(row, "ratio") for row in (first, last))
    if not early.n or not late.n:
        return "Where does rank 1's range of usable learning rates end, of dense's?"
    said = (
        f"the usable learning rates most early: to {early.text('.2f')} of dense's "
        f"in {first['window']}, to {late.text('.2f')} in {last['window']}"
    )
    if "open" in (early.verdict(), late.verdict()) or math.isnan(first["p"]):
        return f"Open whether rank 1 narrows {said}"
    known = first["p"] < ALPHA and early.value < late.value
    return f"Rank 1 {'narrows' if known else 'is not shown to narrow'} {said}"


def _words(counts: list[int], run: Record) -> str:
    nats = " and ".join(f"{limit:g}" for limit in LOSSES)
    return (
        "Training loss of the last of six epochs at rank 1 in runs that have no compression "
        "otherwise, beside "
        f"runs without any. Dotted: {nats} nats above the lowest loss without compression, up to "
        f"which a rate is called usable. {style.seeds_in_words(counts)}; bars: 95 % t intervals; "
        "constant rates after a warm-up. PowerSGD. "
        f"{style.describe_setting(run, compression=False)}."
    )


def main(records: Records, out: Out = None) -> list[Path]:
    """Draw the loss of rank 1 by window and rate; print the largest usable rate of each window."""
    files, runs = Files(records, out), load_all(records)
    by_run = losses(runs)
    rows = table(by_run)
    files.page("largest", f"{style.describe_setting(runs[0])}.", as_text(rows))
    files.figure("narrowing", figure(by_run, runs[0]))
    files.table("largest", rows)
    return files.print_paths()
