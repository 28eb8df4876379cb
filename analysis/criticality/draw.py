"""The figure of criticality: harm by onset, recovery, the trunk's signals and their scores."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns

from regimes.base.statistics import LEAST
from regimes.plotting import canvas, style
from regimes.plotting.groups import find_decays, tested_by
from regimes.plotting.looks import Look, Metric
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.records import Record, unit_name

from ..common import markov
from ..common.estimates import Row
from .harm import is_null
from .scores import DULL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 3  # arms whose recovery is drawn
BETWEEN = 0.36  # of a row, between the first arm's score and the last one's
LINES: Sequence[Any] = (  # of arms: colour, dash, marker
    ("#000000", "-", "o"),
    ("#d55e00", (0, (4, 1.5)), "s"),
    ("#0173b2", (0, (1.2, 1.2)), "^"),
    ("#029e73", (0, (5, 1.5, 1, 1.5)), "D"),
    ("#cc78bc", (0, (8, 2)), "v"),
    ("#949494", (0, (2, 3)), "X"),
)
NO_VALUE = "#cfe2f3"


def shades(signals: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """Signals x units: the rank of a signal's value in a run, 0 of the lowest unit to 1, mean over
    seeds."""
    ranks = [table.rank() for table in signals.values()]
    scaled = [(table - table.min()) / (table.max() - table.min()) for table in ranks]
    return (sum(scaled[1:], scaled[0]) / len(scaled)).T


def figure(
    trunk: Record,
    curve: pd.DataFrame,
    recovery: pd.DataFrame,
    scored: pd.DataFrame,
    signals: Mapping[int, pd.DataFrame],
    known: bool = False,
) -> style.Drawing:
    """The figure, and one row per point or cell (column panel says of what).

    Args:
        trunk: any of them, for the setting.
        curve, recovery: of `harm.curve` and `harm.recovery`.
        scored: of `scores.over_seeds`.
        signals: of `scores.by_seed`.
        known: whether measured signals were scored by their value before a pulse.
    """
    shown, names = tested_by(trunk), [*dict.fromkeys(curve["arm"])]
    looks = {arm: Look(arm, *LINES[i % len(LINES)]) for i, arm in enumerate(names)}
    felt = [a for a in names if not is_null(curve.loc[curve["arm"] == a, "harm"].to_list())]
    rows = list(dict.fromkeys(scored["signal"]))
    cells = shades(signals).loc[rows]
    with style.theme():
        fig, below = style.figure(6.0 + 0.17 * len(rows)), 0.9 + 0.17 * len(rows)
        heights = [1.5, 1.6, below] if canvas.is_stacked(fig) else [2.0, 1.6, below]
        grid = fig.add_gridspec(3, 1, height_ratios=heights)
        _harm(fig.add_subplot(grid[0]), curve, looks, trunk, shown)
        first = felt[:MOST] or names[:1]
        onsets = sorted({*recovery.loc[recovery["arm"].isin(first), "onset"]})
        axes = grid[1].subgridspec(1, len(first)).subplots(sharey=True, squeeze=False)[0]
        for ax, arm in zip(axes, first, strict=True):
            part = recovery[recovery["arm"] == arm]
            _recovery(ax, part, onsets, trunk, shown)
            ax.set_title(f"after {of_pulse(str(arm))}", loc="left")
            if canvas.is_stacked(fig) and ax is not axes[0]:  # it has no room beside
                ax.set_ylabel("")
        image, forest = _signals(fig, grid[2], cells, scored, looks, trunk)
        _legend(fig, looks, felt)
        add_headline(fig, worst(curve, trunk))
        style.add_caption(fig, _caption(trunk, curve, shown, known))
    drawn = recovery[recovery["arm"].isin(first)]
    tables = {"harm": curve, "recovery": drawn, "signals": image, "scores": forest}
    return style.Drawing(
        fig, pd.concat([t.assign(panel=n) for n, t in tables.items()], ignore_index=True)
    )


def worst_of(curve: pd.DataFrame) -> Row:
    """The pulse that `worst` names, a row of a curve in which some pulse changes something."""
    return _named(_by_harm(curve))


def _by_harm(curve: pd.DataFrame) -> Sequence[Row]:
    """Pulses of the first arm that changes anything, the one with most harm first; those after
    which the run goes on, if there are any."""
    felt = [
        arm
        for arm, part in curve.groupby("arm", sort=False)
        if part["harm"].notna().any() and not is_null(part["harm"].dropna().to_list())
    ]
    if not felt:
        return []
    part = curve[(curve["arm"] == felt[0]) & curve["harm"].notna()]
    part = part[part["left"] > 0] if (part["left"] > 0).any() else part
    return part.sort_values("harm", ascending=False).to_dict("records")


def _named(rows: Sequence[Row]) -> Row:
    """The first that is shown to harm; if none is, the first."""
    return next((row for row in rows if _harm_of(row).is_above(0)), rows[0])


def _harm_of(row: Row) -> MeanInterval:
    return MeanInterval.at(row, "harm")


def worst(curve: pd.DataFrame, trunk: Record) -> str:
    """When a pulse of the first arm that changes anything harms most, as far as that is shown, of
    what, and how much at most once the rate has fallen."""
    shown, rows = tested_by(trunk), _by_harm(curve)
    if not rows:
        return "No pulse changes anything"
    row = _named(rows)
    at, top = row["onset"], _harm_of(row)
    form, pulse = f".{max(1, shown.digits - 1)}f", of_pulse(str(row["arm"]))
    size = f"{top.numbers(form)} of {row['without']:{form}} {shown.unit}{top.seeds}"
    if top.is_above(0):
        said = f"{pulse[:1].upper()}{pulse[1:]} harms most from unit {at:.0f}: {size}"
        if row is not rows[0]:  # a larger mean has an interval around 0
            said = f"{pulse[:1].upper()}{pulse[1:]} is shown to harm from unit {at:.0f}: {size}"
    elif top.verdict() == "open":
        return f"Open whether {pulse} harms: at most {size}, from unit {at:.0f}"
    else:
        return f"No {pulse.removeprefix('a ')} is shown to harm: at most {size}, from unit {at:.0f}"
    fell = find_decays(trunk)
    late = [_harm_of(row) for row in rows if fell and row["onset"] >= fell[0][0]]
    if not late or at >= fell[0][0]:
        return said
    return f"{said}; once the learning rate has fallen, at most {late[0].text(form)}"


def of_pulse(arm: str) -> str:
    """What a pulse of an arm is called in a sentence.

    >>> of_pulse("rank 1"), of_pulse("pulse"), of_pulse("pulse-2")
    ('a pulse of rank 1', 'a pulse', 'a pulse ("pulse-2")')
    """
    if arm == "pulse":
        return "a pulse"
    return f'a pulse ("{arm}")' if "pulse" in arm or arm == "null" else f"a pulse of {arm}"


def _harm(
    ax: Axes, curve: pd.DataFrame, looks: Mapping[str, Look], trunk: Record, shown: Metric
) -> None:
    ax.axhline(0, color="#949494", linewidth=0.8)
    for arm, look in looks.items():
        part = curve[curve["arm"] == arm]
        bars = np.nan_to_num([part["harm"] - part["ci_low"], part["ci_high"] - part["harm"]])
        ax.errorbar(part["onset"], part["harm"], bars, elinewidth=0.9, capsize=2, **look.line)
    ax.set(xlabel=f"{unit_name(trunk.config)} in which the pulse starts")
    ax.set(
        ylabel=f"harm in the end ({shown.unit})\nlower is better",
        xlim=(-0.7, len(trunk.rows) - 0.3),
    )
    style.mark_decays(ax, trunk)


def _recovery(
    ax: Axes, part: pd.DataFrame, onsets: Sequence[int], trunk: Record, shown: Metric
) -> None:
    ax.axhline(0, color="#949494", linewidth=0.8)
    for onset, line in _by_onset(onsets).items():
        rows = part[part["onset"] == onset]
        if len(rows):
            ax.plot(rows["unit"], rows["harm"], **line)
    ax.set(xlabel=unit_name(trunk.config), ylabel=f"harm so far ({shown.unit})")
    ax.set_xlim(-0.5, len(trunk.rows) - 0.5)
    style.mark_decays(ax, trunk, labelled=False)


def _by_onset(onsets: Sequence[int]) -> dict[int, dict[str, Any]]:
    """From dark to light, and every second line broken, for a grey print."""
    colours = sns.color_palette("viridis", len(onsets) + 1).as_hex()
    lines = zip(onsets, colours, strict=False)
    return {
        onset: {"color": c, "linewidth": 1.3, "linestyle": (0, (4, 1.2)) if i % 2 else "-"}
        for i, (onset, c) in enumerate(lines)
    }


def _signals(
    fig: Figure,
    place: Any,
    cells: pd.DataFrame,
    scored: pd.DataFrame,
    looks: Mapping[str, Look],
    trunk: Record,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the image and of both panels of scores, one line per signal."""
    import matplotlib as mpl

    narrow = canvas.is_stacked(fig)
    size: Any = {"fontsize": 6} if narrow else {}
    columns = place.subgridspec(1, 3, width_ratios=[1.4 if narrow else 2, 1, 1])
    image = fig.add_subplot(columns[0])
    greys = mpl.colormaps["Greys"].with_extremes(bad=NO_VALUE)
    ends = (-0.5, cells.shape[1] - 0.5, len(cells) - 0.5, -0.5)
    values = np.ma.masked_invalid(cells.to_numpy())
    image.imshow(values, cmap=greys, vmin=0, vmax=1, aspect="auto", extent=ends)
    image.grid(False)
    image.set_yticks(range(len(cells)), [*cells.index], fontsize=6 if narrow else 7)
    image.set(xlabel=unit_name(trunk.config))
    image.set_title("the trunk's signals: light low, dark high", loc="left", **size)
    style.mark_decays(image, trunk, labelled=False, behind="white")
    points = _places(scored, [*cells.index])
    for number, column, chance, limits, label in (
        (1, "rank", 0.0, (-1.08, 1.08), "rank correlation\nwith harm"),
        (2, "auc", 0.5, (-0.04, 1.04), "ROC area, worst\nthird of harm"),
    ):
        ax = fig.add_subplot(columns[number])
        if number == 1:
            ax.set_title("do they mark the harm? grey: chance", loc="left", **size)
        ax.axvline(chance, color="#949494", linewidth=0.8)
        ax.axhline(len(cells) - len(DULL) - 0.5, color="#949494", linewidth=0.8)
        for arm, part in points.groupby("arm", sort=False):
            bars = [
                part[column] - part[f"{column}_ci_low"],
                part[f"{column}_ci_high"] - part[column],
            ]
            line = looks[str(arm)].line | {"linestyle": "none"}
            ax.errorbar(part[column], part["place"], xerr=np.nan_to_num(bars), capsize=1.5, **line)
        words = "\n".join(textwrap.wrap(label, 12)) if narrow else f"{label}\nright: better"
        ax.set_xlabel(words, **size)
        ax.set(ylim=(len(cells) - 0.5, -0.5), xlim=limits)
        ax.set_yticks(range(len(cells)), [""] * len(cells))
    return cells.rename_axis("signal").reset_index().melt("signal", var_name="unit"), points


def _places(scored: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """`scores.over_seeds` with the height of each point."""
    names = [*dict.fromkeys(scored["arm"])]
    offsets = np.linspace(-BETWEEN / 2, BETWEEN / 2, len(names)) if len(names) > 1 else [0.0]
    places = [
        rows.index(signal) + offsets[names.index(arm)]
        for arm, signal in zip(scored["arm"], scored["signal"], strict=True)
    ]
    return scored.assign(place=places)


def _legend(fig: Figure, looks: Mapping[str, Look], felt: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    words = {
        arm: look.label if arm in felt else f"nothing changed ({look.label})"
        for arm, look in looks.items()
    }
    lines = [Line2D([], [], label=words[arm], **look.line) for arm, look in looks.items()]
    place: Any = "outside upper left"
    fig.legend(handles=lines, loc=place, ncols=4, handlelength=3.5, fontsize=7)


def _caption(trunk: Record, curve: pd.DataFrame, shown: Metric, known: bool) -> str:
    of = "value in the unit before a pulse" if known else "mean over the units of a pulse"
    counts = curve["n"].to_list()
    over = ", with intervals over seeds" if max(counts) >= LEAST else ""
    return (
        f"Harm: {shown.label} of a branch with a pulse minus its trunk's, by the same seed, "
        f"signed so that a positive number is a worse result; {style.seeds_in_words(counts)}, "
        f"{style.intervals_in_words(counts, bands=False)}. In the middle a line begins with its "
        "pulse. Below: "
        "rank of each signal in its run (blue: no value), mean over seeds; at the right its "
        f"scores, of its {of}{over}; under the line those that measure nothing. "
        f"{markov.caption(trunk)}{style.describe_setting(trunk)}."
    )
