"""What high compression and ACCORDION lose by epoch: the authors' logs beside runs of ours.

Ten seconds; no run is needed for the authors' part::

    regimes figure equal-epochs
    regimes figure equal-epochs data/reference/paper-cifar10-short.tar.xz

The paper's tables have ends of 300 epochs, where ACCORDION is level with low compression. Short
trainings of ours are compared with its logs at the epochs that both have, before any decay of the
learning rate. The *clock* of a schedule is k if after N epochs it is where low compression was
after k N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.base.errors import LackingError
from regimes.plotting import canvas, style
from regimes.plotting.groups import decay_epochs, separate_experiments
from regimes.plotting.looks import SPARE, level_text
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all

from ..common.command import Files, Out, Several, by_name
from ..common.estimates import frame_table
from . import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# epochs where bins end: narrow in the warm-up and after each decay (150, 250)
ENDS = (0, 2, 5, 10, 15, 20, 30, 60, 100, 150, 160, 200, 250, 300)
BINS = tuple(pairwise(ENDS))  # epochs, whose mean is a point
DECAY = 150  # the authors' first
SMOOTH = 5  # epochs of a running mean, from which clocks are read
FIRST = 5  # clocks of earlier epochs depend on the warm-up
PARTS: Mapping[str, tuple[str, ...]] = {  # by role, or by these names; the first that there is
    "low": ("low", "rank 4"),
    "high": ("high", "rank 1 at 0.4", "rank 1"),
    "accordion": ("accordion", "accordion 4-1"),
}
TITLES = {"high": "high compression", "accordion": "ACCORDION"}
SPOKEN = {
    "resnet18": "ResNet-18",
    "resnet20": "ResNet-20",
    "vgg19bn": "VGG-19bn",
    "senet": "SENet",
    "densenet": "DenseNet",
}
SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


# -- the numbers -----------------------------------------------------------------------------


def of_authors() -> pd.DataFrame:
    """The logs with PowerSGD on images: network, schedule, epoch, accuracy (%), seed, decay."""
    frame = published.runs()
    frame = frame[(frame["compressor"] == "powersgd") & (frame["metric"] == "accuracy")]
    levels = frame[frame["schedule"] != "accordion"]
    ranks = levels.drop_duplicates([*published.KEYS, "schedule"]).set_index(published.KEYS)
    names = {}
    for key, group in ranks.groupby(level=published.KEYS):
        data, model, compressor = map(str, key)
        both = group.set_index("schedule")["level"].str.removeprefix("rank ")
        words = f"{SPOKEN.get(model, model)}, {SETS.get(data, data)}"
        names[data, model, compressor] = f"{words} ({both['low']}, {both['high']})"
    keys = frame[published.KEYS].itertuples(index=False, name=None)
    return pd.DataFrame(
        {
            "network": [names[key] for key in keys],
            "schedule": frame["schedule"].to_numpy(),
            "epoch": frame["epoch"].to_numpy(),
            "accuracy": 100 * frame["value"].to_numpy(),
            "seed": 0,
            "decay": DECAY,
            "whose": "authors",
        }
    )


def of_runs(name: str, runs: Iterable[Record]) -> pd.DataFrame:
    """The same of our runs.

    Raises:
        LackingError: one of the schedules of `PARTS` is missing.
    """
    runs, rows = separate_experiments(runs), []
    for part, names in PARTS.items():
        chosen = next(filter(None, (_called(runs, part, each) for each in names)), None)
        if chosen is None:
            raise LackingError(f"{name}: no run is {part!r} by its name or its role")
        for run in chosen:
            tested = run.epochs.dropna(subset="metric")
            frame = pd.DataFrame({"epoch": tested["epoch"], "accuracy": 100 * tested["metric"]})
            decay = min(decay_epochs(run), default=math.inf)
            about = {"network": _describe(chosen[0]), "schedule": part, "whose": "ours"}
            rows.append(frame.assign(seed=run.seed, decay=decay, **about))
    return pd.concat(rows, ignore_index=True)


def _called(runs: Sequence[Record], part: str, name: str) -> list[Record]:
    return [run for run in runs if run.name == name or run.config.get("role") == part]


def _describe(run: Record) -> str:
    model = str(run.config["model"]["name"]).removesuffix("-cifar10").removesuffix("-cifar100")
    sizes, form = run.config["levels"], level_text(run.config["compressor"]["name"]) or "{}"
    ranks = [form.format(x).removeprefix("rank ") for x in sizes.values() if isinstance(x, int)]
    end = f" ({max(ranks)}, {min(ranks)})" if ranks else ""
    length = len(run.rows)
    return f"ours, {length} epochs: {SPOKEN.get(model, model)}{end}"


def differences(curves: pd.DataFrame) -> pd.DataFrame:
    """Points above low compression, the mean over the epochs of a bin that lie before the decay, or
    after it, and over common seeds."""
    keys = ["whose", "network", "seed", "epoch", "decay"]
    wide = curves.pivot_table("accuracy", keys, "schedule").reset_index()
    rows = []
    for (whose, network), group in wide.groupby(["whose", "network"], sort=False):
        for (first, stop), schedule in ((b, s) for b in BINS for s in TITLES if s in group):
            inside = group[group["epoch"].between(first, stop - 1)]
            inside = inside[inside["epoch"] < inside["decay"]] if first < DECAY else inside
            gaps = (inside[schedule] - inside["low"]).groupby(inside["seed"]).mean().dropna()
            if len(gaps):
                begin, end = inside["epoch"].min(), inside["epoch"].max()
                at = {"first": begin, "last": end, "at": math.sqrt((begin + 1) * (end + 1))}
                row = {"whose": whose, "network": network, "schedule": schedule, "bin": first, **at}
                rows.append({**row, "n": len(gaps), "points": float(gaps.mean())})
    return pd.DataFrame(rows)


def clock(low: Sequence[float], other: Sequence[float], first: int = FIRST) -> float:
    """The mean over epochs, from ``first`` on, of the share k of them after which low compression
    had the accuracy that the other has. Both by epoch, up to the decay.

    >>> round(clock([float(x) for x in range(40)], [x / 2 for x in range(40)]), 2)
    0.5
    """
    steady = [
        pd.Series(x, dtype=float).rolling(SMOOTH, min_periods=1, center=True).mean()
        for x in (low, other)
    ]
    reached = np.maximum.accumulate(steady[0].to_numpy())
    epochs = np.arange(1, len(reached) + 1)
    values = steady[1].to_numpy()[: len(reached)]
    then = np.interp(values, reached, epochs)
    share = (then / epochs[: len(values)])[first:]
    return float(share.mean()) if len(share) else math.nan


def clocks(curves: pd.DataFrame, until: int = 30) -> pd.DataFrame:
    """The clock of each schedule before the first decay, of at most ``until`` epochs: the mean over
    seeds."""
    rows = []
    before = curves[(curves["epoch"] < curves["decay"]) & (curves["epoch"] < until)]
    for (whose, network), group in before.groupby(["whose", "network"], sort=False):
        row: dict[str, Any] = {"whose": whose, "network": network}
        for schedule in TITLES:
            found = []
            for _, own in group.groupby("seed"):
                wide = own.pivot_table("accuracy", "epoch", "schedule")
                if {"low", schedule} <= {*wide} and wide.index.max() > FIRST:
                    every = wide.reindex(range(wide.index.max() + 1))  # not each epoch was tested
                    both = every[["low", schedule]].interpolate(limit_direction="both")
                    found.append(clock(both["low"].tolist(), both[schedule].tolist()))
            mean = float(np.mean(found)) if found else math.nan
            row |= {f"k of {schedule}": mean, f"n of {schedule}": len(found)}
        rows.append(row)
    return pd.DataFrame(rows)


# -- the figure ------------------------------------------------------------------------------


def figure(curves: pd.DataFrame) -> style.Drawing:
    """Points above low compression against the epoch: left high compression, right ACCORDION."""
    numbers = differences(curves)
    with style.theme():
        fig = style.figure(3.2)
        axes = fig.subplots(1, 2, sharey=True, squeeze=False)[0]
        for ax, (schedule, title) in zip(axes, TITLES.items(), strict=True):
            ax.axhline(0, color="#444444", linewidth=0.8, zorder=1)
            shown = numbers[numbers["schedule"] == schedule]
            for i, ((whose, network), rows) in enumerate(
                shown.groupby(["whose", "network"], sort=False)
            ):
                _draw(ax, rows, str(network), whose == "ours", i)
            ax.set_xscale("log")
            ax.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
            ax.minorticks_off()
            ax.axvline(DECAY, color="black", linewidth=1, linestyle=style.DOTTED)
            ax.set(xlabel="epoch", title=f"{title} minus low compression")
        axes[0].set_yscale("symlog", linthresh=3, linscale=1.2)
        axes[0].set_yticks([-30, -10, -3, 0, 3], ["-30", "-10", "-3", "0", "3"])
        axes[0].set_ylabel("points\nhigher is better")  # of a panel an inch high
        handles, labels = axes[0].get_legend_handles_labels()
        columns = canvas.legend_columns(labels, style.WIDTH, 3)
        fig.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=3)
        add_headline(fig, _title(numbers))
        style.add_caption(
            fig,
            "Points of test accuracy, means over the epochs up to the next one; in brackets the "
            "ranks of low and high compression. Thin, open: the authors' logs of 300 epochs with "
            "PowerSGD, one seed each; dotted: their first decay. Thick, filled: runs of ours, mean "
            f"over {style.seeds_in_words(_counts(numbers))}, up to their own first decay.",
        )
    return style.Drawing(fig, numbers)


def _counts(numbers: pd.DataFrame) -> list[int]:
    ours = numbers.loc[numbers["whose"] == "ours", "n"].tolist()
    return ours or [1]


def _draw(ax: Axes, rows: pd.DataFrame, name: str, ours: bool, place: int) -> None:
    colour, dash, marker = SPARE[place]
    look: Any = {"color": colour, "marker": marker, "markeredgecolor": colour, "label": name}
    if ours:
        ax.plot(rows["at"], rows["points"], linewidth=2.4, markersize=6, zorder=5, **look)
    else:
        look |= {"markerfacecolor": "white", "markersize": 4, "linestyle": dash}
        ax.plot(rows["at"], rows["points"], linewidth=0.9, **look)


def _title(numbers: pd.DataFrame) -> str:
    """In how many of the authors' logs ACCORDION is below low compression in epochs 20 to 29."""
    theirs = numbers[(numbers["whose"] == "authors") & (numbers["schedule"] == "accordion")]
    early = theirs[theirs["bin"] == 20]["points"]
    return (
        "In epochs 20 to 29 of the authors' logs ACCORDION is below low compression in "
        f"{int((early < 0).sum())} of {len(early)} networks"
    )


# -- the command -----------------------------------------------------------------------------


def main(records: Several = (), out: Out = None) -> list[Path]:
    """Draw how far high compression and ACCORDION are from low compression by epoch, in the
    authors' logs and in records of ours, and print their clocks.

    Args:
        records: of grids that have low and high compression and ACCORDION; none: the logs alone.
    """
    files = Files("equal-epochs", out)
    ours = [of_runs(name, load_all(path)) for name, path in by_name(records).items()]
    curves = pd.concat([of_authors(), *ours], ignore_index=True)
    files.figure("equal-epochs", figure(curves))
    known = clocks(curves)
    files.table("equal-epochs-clocks", known)
    files.show(frame_table(known, 2, 2))
    return files.print_paths()
