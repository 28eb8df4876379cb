"""Two panels per trunk: harm of pulses by the unit where they start, and the learning rate.

The first panel of `criticality`, for runs of several trees, side by side::

    regimes figure onset runs/harm-lm runs/harm-lm-constant
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regimes.base.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Look
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all, unit_name
from regimes.search.harms.rates import mean_rates

from ..common import markov
from ..common.command import Files, Out, Several
from ..common.estimates import Row
from . import harm, measured, settings
from .draw import LINES, worst, worst_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tree = tuple[Record, pd.DataFrame]  # one seed's trunk; `harm.curve` without null pulses
WAYS = {"step": "in steps", "cosine": "along a cosine", "wsd": "at the end"}  # schedules
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}  # as they are written
ROOM_ABOVE = 1.12  # the axis ends at so many times the highest interval of a lasting pulse


def tree(runs: Sequence[Record]) -> Tree:
    """A trunk of the runs, and its pulses' harm by onset.

    Raises:
        RecordError: as `measured.pair_branches` and `measured.list_trunks`; or no pulse changes
            anything.
    """
    found = measured.pair_branches(runs)
    trunks = measured.list_trunks(found)
    curve = harm.curve(measured.by_run(measured.by_unit(found)))
    by_arm = curve.groupby("arm")["harm"]
    curve = curve[~by_arm.transform(lambda values: measured.is_null(values.to_list())).astype(bool)]
    if curve.empty:
        raise RecordError("no pulse of these runs changes anything: there is no harm to draw")
    return trunks[0], curve.reset_index(drop=True)


def figure(trees: Sequence[Tree]) -> style.Drawing:
    """The figure, and one row per point or unit: ``panel`` is
    "harm" (rows of `harm.curve`) or "rate"."""
    from matplotlib.lines import Line2D

    names = dict.fromkeys(name for _, curve in trees for name in curve["arm"])
    looks = {arm: Look(arm, *LINES[i % len(LINES)]) for i, arm in enumerate(names)}
    every = pd.concat([curve for _, curve in trees])
    lasting = every.loc[every["left"] > 0, ["harm", "ci_high"]].max(axis=1)
    top = ROOM_ABOVE * (lasting if len(lasting) else every["harm"]).max()
    top = top if top > 0 else ROOM_ABOVE * float(every["harm"].abs().max())  # no pulse harms
    tables = []
    with style.theme():
        fig = style.figure(4.3, style.WIDTH if len(trees) > 1 else 0.7 * style.WIDTH)
        axes = fig.subplots(
            2, len(trees), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 0.9]
        )
        named = titles([trunk for trunk, _ in trees])
        for column, ((trunk, curve), title) in enumerate(zip(trees, named, strict=True)):
            tables.append(_harm(axes[0, column], curve, looks, trunk, top))
            tables.append(_rate(axes[1, column], trunk))
            if column == 0:
                _pulse(axes[0, 0], axes[1, 0], worst_of(curve), trunk)
            axes[0, column].set_title(title, loc="left")
            if len(trees) < 3 or column == len(trees) // 2:  # the labels of three would overlap
                axes[1, column].set_xlabel(f"{unit_name(trunk.config)} in which the pulse starts")
        tables = [t.assign(tree=i // 2) for i, t in enumerate(tables)]
        least = every[["harm", "ci_low"]].min().min()
        axes[0, 0].set(ylim=(min(-0.05 * top, 1.2 * float(least)), top))
        unit = tested_by(trees[0][0]).unit
        axes[0, 0].set(ylabel=f"harm in the end ({unit})\nlower is better")
        axes[1, 0].set_ylabel("learning rate\n(of its peak)", fontsize=7)
        lines = [Line2D([], [], label=look.label, **look.line) for look in looks.values()]
        fig.legend(handles=lines, loc="outside upper left", ncols=3, handlelength=3.5)
        says = worst(trees[0][1], trees[0][0])
        add_headline(fig, f"Left: {says[0].lower()}{says[1:]}" if len(trees) > 1 else says)
        style.add_caption(fig, _caption(trees, top))
    return style.Drawing(fig, pd.concat(tables, ignore_index=True))


def _harm(
    ax: Axes, curve: pd.DataFrame, looks: Mapping[str, Look], trunk: Record, top: float
) -> pd.DataFrame:
    """One line per arm. The axis fits the pulses after which the run goes on; a higher value is
    written at its upper edge."""
    ax.axhline(0, color="#949494", linewidth=0.8)
    for arm, look in looks.items():
        part = curve[curve["arm"] == arm]
        bars = np.nan_to_num([part["harm"] - part["ci_low"], part["ci_high"] - part["harm"]])
        ax.errorbar(part["onset"], part["harm"], bars, elinewidth=0.9, capsize=2, **look.line)
        above = part[part["harm"] > top]
        for at, value in zip(
            above["onset"].astype(float), above["harm"].astype(float), strict=True
        ):
            x = min(at + 0.3, len(trunk.rows) - 2)
            ax.text(x, 0.95 * top, f"{value:.2f} ↑", fontsize=7, color=look.line["color"])
    ax.set(xlim=(-0.7, len(trunk.rows) - 0.3))
    style.mark_decays(ax, trunk, labelled=False)
    return curve.assign(panel="harm")


def _pulse(above: Axes, below: Axes, row: Row, trunk: Record) -> None:
    """The units of the pulse that the title names, shaded in both panels of a tree."""
    first, stop = float(row["onset"]), float(len(trunk.rows) - row["left"])
    for ax in (above, below):
        ax.axvspan(first - 0.5, stop - 0.5, color="#e4e4e4", linewidth=0, zorder=0)
    below.text(
        (first + stop - 1) / 2,
        0.45,
        "the pulse\nfrom " + f"{first:.0f}",
        ha="center",
        va="center",
        fontsize=6,
    )


def _rate(ax: Axes, trunk: Record) -> pd.DataFrame:
    rates = mean_rates(trunk)
    units, share = trunk.epochs["epoch"], rates / rates.max()
    ax.plot(units, share, color="#555555", linewidth=1.4, drawstyle="steps-mid")
    ax.set(ylim=(0, 1.15))
    style.mark_decays(ax, trunk, labelled=False)
    return pd.DataFrame({"panel": "rate", "onset": units, "share": share})


def titles(trunks: Sequence[Record]) -> list[str]:
    """What the learning rate of each does; where it falls in several, how; where optimisers differ,
    which."""
    falls = [bool(settings.phases(trunk)[settings.FALLEN]) for trunk in trunks]
    optimizers = [str(trunk.config["optimizer"]["name"]) for trunk in trunks]
    optimizers = [OPTIMIZERS.get(name, name) for name in optimizers]
    found = []
    for trunk, falling, optimizer in zip(trunks, falls, optimizers, strict=True):
        way = WAYS.get(trunk.config["optimizer"]["schedule"], "") if sum(falls) > 1 else ""
        words = f"rate falls {way}".rstrip() if falling else "rate stays constant"
        apart = f"{optimizer}: " if len(set(optimizers)) > 1 else "the learning "
        found.append(apart + words)
    return found


def _caption(trees: Sequence[Tree], top: float) -> str:
    trunk = trees[0][0]
    counts = [int(n) for _, curve in trees for n in curve["n"]]
    above = any((curve["harm"] > top).any() for _, curve in trees)
    beyond = "Above the axis: a pulse that lasts to the end of the run. " if above else ""
    return (
        f"Harm: {tested_by(trunk).label} at the end of a run with a pulse minus the same run's "
        "without it, by seed, signed so that a positive number is a worse result; "
        f"{style.seeds_in_words(counts)}, {style.intervals_in_words(counts, bands=False)}. "
        f"{beyond}Dotted: the learning rate falls. "
        f"{markov.caption(trunk)}{style.describe_setting(trunk)}."
    )


def main(records: Several, out: Out = None) -> list[Path]:
    """Draw harm by onset, one column for each folder or archive.

    Args:
        records: folders of branches and their trunk, or archives of them.
    """
    if not records:
        raise RecordError(
            "give a folder of runs with pulses, e.g. that of `regimes ablate harm-lm`"
        )
    files = Files(records[0], out)
    files.figure("onset", figure([tree(load_all(path)) for path in records]))
    return files.print_paths()
