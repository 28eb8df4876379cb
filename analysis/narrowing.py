"""Does compression narrow the range of usable rates early in training, or late?

Run, then draw (`regimes.presets.mechanism` has the grid; 16 minutes on one core)::

    regimes ablate rates-when --seeds 8 --first-seed 4000
    regimes figure narrowing runs/rates-when

Each run has no compression but for one window of six epochs at rank 1; the rate is constant. The
*excess* is the training loss of a window's last epoch minus that of the run of the same seed and
rate without compression, in the same epoch. A rate is usable in a window if the excess is at most
so many nats (`LOSSES`); the range ends where a seed's line through the excesses, over the logarithm
of the rate, first leaves it, from the smallest rate upwards (`mechanism.end`). If early training
were critical to compression, its range would be the narrowest.
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
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.presets.mechanism import AT
from regimes.records import Record, load_all
from regimes.replay.agreement import interval

from .command import Files
from .mechanism import LOSSES, REFERENCE, end
from .verdicts import ends_text, p_text, p_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW = re.compile(r"rank \d+ in (\d+)-(\d+)")

# -- records to numbers ----------------------------------------------------------------------


def excesses(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per window, seed and rate: its last epoch, the training losses there of the run and
    of the one without compression, and their difference; nan where either is not finite.

    Raises:
        RecordError: an unfinished run, one of another grid, or one whose uncompressed twin lacks.
    """
    known: dict[tuple[str, int, float], Record] = {}
    for run in runs:
        run.check_finished()
        arm, at, _ = run.name.rpartition(AT)
        if not at or not (arm == REFERENCE or WINDOW.fullmatch(arm)):
            raise RecordError(f"{run.folder}: {run.name!r} is no window at a rate: see the grid "
                              "rates-when")  # fmt: skip
        known[arm, run.seed, float(run.config["optimizer"]["lr"])] = run
    rows = []
    for (arm, seed, rate), run in known.items():
        if (match := WINDOW.fullmatch(arm)) is None:
            continue
        if (twin := known.get((REFERENCE, seed, rate))) is None:
            raise RecordError(f"{run.folder} has no run without compression at {rate:g} with seed "
                              f"{seed} beside it")  # fmt: skip
        last = int(match[2])
        losses = [float(one.epochs["train_loss"].astype(float)[last]) for one in (run, twin)]
        rows.append({"window": f"epochs {match[1]}-{last}", "first": int(match[1]), "seed": seed,
                     "rate": rate, "loss": losses[0], "dense": losses[1],
                     "excess": losses[0] - losses[1]})  # fmt: skip
    order = ["first", "seed", "rate"]
    return pd.DataFrame(rows).sort_values(order, ignore_index=True)


def largest(each: pd.DataFrame) -> pd.DataFrame:
    """One row per limit, window and seed: the largest usable rate; inf if all that were tried are,
    nan if the smallest is not."""
    rows = []
    for limit in LOSSES:
        for (window, seed), runs in each.groupby(["window", "seed"], sort=False):
            rates, losses = runs["rate"].to_list(), runs["excess"].to_list()
            rows.append({"limit": limit, "window": window, "seed": seed, "most": rates[-1],
                         "largest": end(rates, losses, 0, limit)})  # fmt: skip
    return pd.DataFrame(rows)


def table(each: pd.DataFrame) -> pd.DataFrame:
    """One row per limit and window: n of seeds with a range, the largest usable rate (geometric
    mean with its 95 % t interval; the last tried where all are), at how many seeds that is so, and
    its ratio to that of the last window, on common seeds, with p of no difference."""
    found = largest(each)
    found["largest"] = (
        found["largest"]
        .where(np.isfinite, np.nan)
        .fillna(found["most"].where(found["largest"] == math.inf))
    )
    beyond = found["largest"] == found["most"]
    rows = []
    for limit, part in found.groupby("limit", sort=False):
        wide = np.log(part.pivot(index="seed", columns="window", values="largest"))
        windows = list(dict.fromkeys(part["window"]))
        for window in windows:
            kept = wide[window].dropna().to_list()
            against = (wide[window] - wide[windows[-1]]).dropna().to_list()
            row: dict[str, Any] = {"limit": limit, "window": window, "n": len(kept)}
            row |= _means("largest", kept) | _means("of_last", against)
            row["beyond"] = int(
                beyond[(found["limit"] == limit) & (found["window"] == window)].sum()
            )
            row["p"] = p_value(against) if window != windows[-1] else math.nan
            rows.append(row)
    return pd.DataFrame(rows)


def _means(key: str, values: list[float]) -> dict[str, float]:
    """Geometric, of logarithms."""
    ends = map(math.exp, interval(values)) if values else (math.nan,) * 3
    return dict(zip((key, f"{key}_low", f"{key}_high"), ends, strict=True))


# -- numbers to text and figure --------------------------------------------------------------


def as_text(rows: pd.DataFrame) -> Table:
    lines = []
    for row in rows.to_dict("records"):
        more = ">= " if row["beyond"] else ""
        ratio = "" if math.isnan(row["p"]) else f"{row['of_last']:.2g} {_ends(row, 'of_last')}"
        lines.append((f"{row['limit']:g}", row["window"], str(row["n"]),
                      f"{more}{row['largest']:.2g} {_ends(row, 'largest')}", ratio,
                      "" if math.isnan(row["p"]) else p_text(row["p"])))  # fmt: skip
    heads = ("nats", "rank 1 in", "n", "largest usable rate [95 %]", "of the last window's", "p")
    return Table(heads, lines, texts=2)


def _ends(row: dict[Any, Any], key: str) -> str:
    return ends_text(row[f"{key}_low"], row[f"{key}_high"], ".2g")


def figure(each: pd.DataFrame, run: Record) -> tuple[Figure, pd.DataFrame]:
    """The excess against the rate, a line per window, and beside it the loss without compression.

    Args:
        run: any of them, for the setting.
    """
    numbers = []
    looks = style.styles_of(dict.fromkeys(each["window"]))
    with style.theme():
        fig = style.figure(3.0)
        panels = fig.subplots(1, 2)
        for ax, column in zip(panels, ("excess", "dense"), strict=True):
            for window, look in looks.items():
                points = _points(each[each["window"] == window], column)
                numbers.append(points.assign(window=window, panel=column))
                _draw(ax, points, look)
            ax.set(xscale="log", xlabel="learning rate")
        panels[0].set_yscale("symlog", linthresh=0.1)
        panels[0].set_ylabel("excess of the training loss (nats)")
        panels[1].set_ylabel("training loss without compression")
        panels[1].set_yscale("log")
        for limit in LOSSES:
            panels[0].axhline(limit, color="black", linewidth=0.8, linestyle=(0, (1, 1.6)))
        panels[0].legend(title="rank 1 in")
        counts = each.groupby(["window", "rate"]).size().to_list()
        style.caption(fig, _words(counts, run))
    return fig, pd.concat(numbers, ignore_index=True)


def _points(part: pd.DataFrame, column: str) -> pd.DataFrame:
    rows = []
    for rate, seeds in part.groupby("rate"):
        values = seeds[column].to_list()
        known = all(map(math.isfinite, values))
        mean, low, high = interval(values) if known else (math.nan,) * 3
        rows.append({"rate": rate, "n": len(values), "mean": mean, "ci_low": low, "ci_high": high})
    return pd.DataFrame(rows)


def _draw(ax: Axes, points: pd.DataFrame, look: Any) -> None:
    bars = [points["mean"] - points["ci_low"], points["ci_high"] - points["mean"]]
    ax.errorbar(points["rate"], points["mean"], np.nan_to_num(bars), label=look.label,
                elinewidth=0.6, **look.line)  # fmt: skip


def _words(counts: list[int], run: Record) -> str:
    return (
        "Left: training loss of the last of six epochs at rank 1, minus that of the same seed and "
        "rate without compression; dotted: the limits of what is called usable. Right: that run "
        f"without compression, in the same epochs. {style.seeds_in_words(counts)}; bars: 95 % t "
        f"intervals; constant rates after a warm-up. {style.setting(run)}."
    )


def main(records: Path, out: Path | None = None) -> list[Path]:
    """Draw what rank 1 costs by window and rate, and print the largest usable rate of each window.

    Args:
        records: a folder of runs of rates-when, or an archive of them.
        out: folder for the figure; default figures/NAME.
    """
    files, runs = Files(records, out), load_all(records)
    each = excesses(runs)
    rows = table(each)
    text = as_text(rows)
    stdout.console(highlight=False).print(text.drawn())
    files.figure("narrowing", figure(each, runs[0]))
    files.table("largest", rows)
    files.text("largest.md", f"{style.setting(runs[0])}.\n\n{text.markdown()}\n")
    return files.said()


if __name__ == "__main__":
    from .command import start

    start(main)
