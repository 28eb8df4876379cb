"""Does compression narrow the range of usable rates early in training, or late?

Run, then draw (`grids/rates-when.toml`; 16 minutes on one core)::

    regimes ablate rates-when --seeds 8 --first-seed 4000
    regimes figure narrowing runs/rates-when

Each run has no compression but for one window of six epochs at rank 1; the rate is constant. A
rate is usable in a window if the training loss of its last epoch is at most so many nats (`LOSSES`)
above the lowest that runs without compression have in that epoch, mean over seeds. From the best
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
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.console import stdout
from regimes.console.tables import Table
from regimes.console.units import interval_text, p_text
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.records import Record, load_all
from regimes.statistics import p_value, t_interval

from ..common.command import Files
from ..common.panels import draw_over_rates, over_rates, rates_axis
from .usable import LOSSES, REFERENCE, arm_of, check_arms, end

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = re.compile(r"rank \d+ in (\d+)-(\d+)")

# -- records to numbers ----------------------------------------------------------------------


def losses(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per window, seed and rate: the training loss of the window's last epoch, and that of
    the run without compression there (``dense``).

    Raises:
        RecordError: an unfinished run, one of another grid, or one whose uncompressed twin lacks.
    """
    known: dict[tuple[str, int, float], Record] = {}
    for run in runs:
        run.check_finished()
        arm, at = arm_of(run)
        if not at or not (arm == REFERENCE or WINDOW.fullmatch(arm)):
            raise RecordError(
                f"{run.folder}: {run.name!r} is no window at a rate: see the grid rates-when"
            )
        known[arm, run.seed, run.rate] = run
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
    check_arms(runs)
    order = ["first", "seed", "rate"]
    return pd.DataFrame(rows).sort_values(order, ignore_index=True)


def largest(each: pd.DataFrame) -> pd.DataFrame:
    """One row per limit, window and seed: the largest usable rate, with rank 1 in the window and
    without compression; inf if all from the best one up are, nan if the best one is not."""
    rows = []
    for limit in LOSSES:
        for window, runs in each.groupby("window", sort=False):
            means = runs.groupby("rate")[["loss", "dense"]].mean()
            allowed = float(means["dense"].min()) + limit
            for seed, own in runs.groupby("seed"):
                rates = own["rate"].to_list()
                row: dict[str, Any] = {"limit": limit, "window": window, "seed": seed}
                for column in ("loss", "dense"):
                    best = rates.index(means[column].idxmin())
                    row[column] = end(rates, own[column].to_list(), best, allowed)
                rows.append(row)
    return pd.DataFrame(rows)


def table(each: pd.DataFrame) -> pd.DataFrame:
    """One row per limit and window: n of seeds whose ranges both end within the rates tried, the
    largest usable rate with rank 1 and without compression, and their ratio (geometric means with
    95 % t intervals); p of a ratio as in the last window, on common seeds (nan of that itself)."""
    found, rows = largest(each), []
    known = np.isfinite(found["loss"]) & np.isfinite(found["dense"])
    logs = found.assign(loss=np.log(found["loss"]), dense=np.log(found["dense"]))[known]
    logs["ratio"] = logs["loss"] - logs["dense"]
    for limit in LOSSES:
        part = logs[logs["limit"] == limit]
        wide = part.pivot(index="seed", columns="window", values="ratio")
        windows = list(dict.fromkeys(each["window"]))
        for window in windows:
            seeds = part[part["window"] == window]
            row: dict[str, Any] = {"limit": limit, "window": window, "n": len(seeds)}
            for column in ("loss", "dense", "ratio"):
                row |= _means(column, seeds[column].to_list())
            both = {window, windows[-1]} <= {*wide} and window != windows[-1]
            against = (wide[window] - wide[windows[-1]]).dropna().to_list() if both else []
            row["p"] = p_value(against) if against else math.nan
            rows.append(row)
    return pd.DataFrame(rows)


def _means(key: str, values: list[float]) -> dict[str, float]:
    """Geometric, of logarithms."""
    ends = map(math.exp, t_interval(values)) if values else (math.nan,) * 3
    return dict(zip((key, f"{key}_low", f"{key}_high"), ends, strict=True))


# -- numbers to text and figure --------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    lines = [
        (
            f"{row['limit']:g}",
            row["window"].removeprefix("epochs "),
            str(row["n"]),
            *(_ends(row, key) for key in ("loss", "dense", "ratio")),
            "" if math.isnan(row["p"]) else p_text(row["p"]),
        )
        for row in rows.to_dict("records")
    ]
    heads = ("nats", "at", "n", "rank 1, up to", "dense, up to", "of dense's", "p")
    return Table(heads, lines, texts=2)


def _ends(row: dict[Any, Any], key: str) -> str:
    ends = interval_text(row[f"{key}_low"], row[f"{key}_high"], ".2g")
    return "" if math.isnan(row[key]) else f"{row[key]:.2g} {ends}".rstrip()


def figure(each: pd.DataFrame, run: Record) -> tuple[Figure, pd.DataFrame]:
    """Training loss against the rate, a panel per window, with rank 1 in it and with none.

    Args:
        run: any of them, for the setting.
    """
    numbers, words = [], {"loss": "rank 1", "dense": "dense"}
    looks = style.styles_of(("rank 1", "dense"))
    with style.theme():
        fig = style.figure(2.9)
        windows = list(dict.fromkeys(each["window"]))
        panels = fig.subplots(1, len(windows), sharey=True, squeeze=False)[0]
        for ax, window in zip(panels, windows, strict=True):
            part = each[each["window"] == window]
            for column, name in words.items():
                points = over_rates(part, column)
                numbers.append(points.assign(window=window, run=name))
                draw_over_rates(ax, points, looks[name])
            lowest = float(part.groupby("rate")["dense"].mean().min())
            for limit in LOSSES:
                ax.axhline(lowest + limit, color="black", linewidth=0.8, linestyle=style.DOTTED)
            ax.set_title(window, loc="left")
            ax.set(yscale="log", xlabel="learning rate")
            rates_axis(ax)
        panels[0].set_ylabel("training loss of the window's\nlast epoch (nats)")
        panels[0].set_ylim(bottom=float(pd.concat(numbers)["mean"].min()) / 3)
        panels[0].legend()
        counts = each.groupby(["window", "rate"]).size().to_list()
        style.caption(fig, _words(counts, run))
    return fig, pd.concat(numbers, ignore_index=True)


def _words(counts: list[int], run: Record) -> str:
    nats = " and ".join(f"{limit:g}" for limit in LOSSES)
    return (
        "Six epochs at rank 1 (of each panel) in runs that have no compression otherwise, beside "
        f"runs without any. Dotted: {nats} nats above the lowest loss without compression, up to "
        f"which a rate is called usable. {style.seeds_in_words(counts)}; bars: 95 % t intervals; "
        f"constant rates after a warm-up. {style.setting(run)}."
    )


def main(records: Path, out: Path | None = None) -> list[Path]:
    """Draw what rank 1 costs by window and rate, and print the largest usable rate of each window.

    Args:
        records: a folder of runs of rates-when, or an archive of them.
        out: folder for the figure; default figures/NAME.
    """
    files, runs = Files(records, out), load_all(records)
    each = losses(runs)
    rows = table(each)
    text = as_text(rows)
    stdout.console(highlight=False).print(text.drawn())
    files.figure("narrowing", figure(each, runs[0]))
    files.table("largest", rows)
    files.text("largest.md", f"{style.setting(runs[0])}.\n\n{text.markdown()}\n")
    return files.said()
