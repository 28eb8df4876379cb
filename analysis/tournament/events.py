"""An event in the middle of a training: do policies use their floats better than a fixed rank does?

Tune and run each setting (commands in `grids/shift-smoke.toml`), then draw them together::

    regimes figure events runs/shift-smoke runs/restarts-smoke runs/ramp-smoke runs/pruned-smoke

`PAIRS` compares arms with controls that send as many floats (`equal_floats`): the same rank
throughout, rank 4 first, and rank 4 at the event by an arm that knows it. If the event matters, a
policy that detects it comes near the last control and is better than the other two. Holm's
correction is over all comparisons of a setting, as ``regimes figure tournament`` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.console.tables import Table
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Metric
from regimes.plotting.said import Estimate
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all

from ..common.command import Files, Out, Several, by_name
from ..common.estimates import Row
from ..common.names import spoken
from ..common.paired import ALPHA, are_shown, difference_text, draw_forest, verdicts
from .equal_floats import comparisons
from .tournament import entries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POLICIES = ("accordion 1", "accordion 3", "forced 3", "random 6")
PAIRS = (  # arm, control
    *((arm, "static") for arm in ("event 6", "event 12", *POLICIES)),
    *((arm, "first") for arm in ("event 6", "event 12", *POLICIES)),
    *((arm, "event") for arm in POLICIES),
)
WORDS = {  # of a grid; a line break, because panels are narrow
    "shift-smoke": "another task\nuntil epoch 12",
    "restarts-smoke": "learning rate\nrestarts at 8, 16",
    "ramp-smoke": "batches x 4\nfrom epoch 12",
    "pruned-smoke": "90 % of weights\npruned at epoch 12",
}

MINUS = {  # controls
    "static": "minus a constant rank",
    "first": "minus rank 4 first",
    "event": "minus rank 4\nat the event",
}

# -- records to numbers ----------------------------------------------------------------------


def differences(runs: list[Record]) -> pd.DataFrame:
    """`PAIRS` of one setting: a row each of `equal_floats.comparisons`.

    Raises:
        RecordError: the runs lack one of the arms.
    """
    table = comparisons(entries(runs, ()), tested_by(runs[0])).set_index(["arm", "control"])
    lacking = [f"{arm} - {control}" for arm, control in PAIRS if (arm, control) not in table.index]
    if lacking:
        raise RecordError(
            f"no runs for {', '.join(lacking)}: run shift-smoke, ramp-smoke or restarts-smoke"
        )
    return table.loc[list(PAIRS)].reset_index()


# -- numbers to text and figure --------------------------------------------------------------


def as_text(by_setting: Mapping[str, pd.DataFrame], metric: Metric) -> Table:
    """A column per setting; * where p is below 0.05 after the setting's correction."""
    lines = []
    for i, (arm, control) in enumerate(PAIRS):
        cells = (_cell(rows.iloc[i].to_dict(), metric) for rows in by_setting.values())
        lines.append((arm, control, *cells))
    return Table(("arm", "minus", *by_setting), lines, texts=2)


def _cell(row: Row, metric: Metric) -> str:
    if not row["n"]:
        return "other floats"
    return difference_text(metric, if_alike="")(row) + ("*" if row["p_holm"] < ALPHA else "")


def figure(by_setting: Mapping[str, pd.DataFrame], run: Record, metric: Metric) -> style.Drawing:
    """A panel per setting, a line per pair; filled where the difference survives correction.

    Args:
        run: any of them, for the setting that all share.
    """
    with style.theme():
        fig = style.figure(1.6 + 0.19 * len(PAIRS))
        axes = fig.subplots(1, len(by_setting), sharex=True, sharey=True, squeeze=False)[0]
        for ax, (name, rows) in zip(axes, by_setting.items(), strict=True):
            _panel(ax, rows)
            ax.set_title(WORDS.get(name, name), loc="left")
            side = "left" if metric.lower else "right"
            ax.set_xlabel(f"difference, {metric.unit}\n{side}: better")
        axes[0].set_yticks(range(len(PAIRS)), [spoken(arm) for arm, _ in PAIRS])
        _name_controls(axes[-1])
        counts = [int(n) for rows in by_setting.values() for n in rows["n"] if n]
        add_headline(fig, _title(pd.concat(by_setting.values()), metric))
        style.add_caption(fig, _words(counts, run))
    return style.Drawing(
        fig, pd.concat([rows.assign(setting=name) for name, rows in by_setting.items()])
    )


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    draw_forest(ax, rows, "difference", "ci", are_shown(rows))
    kinds = [control for _, control in PAIRS]
    for place in np.flatnonzero(rows["n"] == 0).tolist():
        look: Any = {"va": "center", "ha": "center", "fontsize": 7, "color": "#666666"}
        ax.text(0.5, place, "other floats", transform=ax.get_yaxis_transform(), **look)
    for place in range(1, len(kinds)):
        if kinds[place] != kinds[place - 1]:
            ax.axhline(place - 0.5, color="#bbbbbb", linewidth=0.8)


def _name_controls(ax: Axes) -> None:
    """Write right of the panel with what each group of lines is compared."""
    kinds = [control for _, control in PAIRS]
    for kind, words in MINUS.items():
        middle = float(np.mean([place for place, one in enumerate(kinds) if one == kind]))
        look: Any = {"rotation": -90, "va": "center", "ha": "left", "fontsize": 7}
        ax.text(1.04, middle, words, transform=ax.get_yaxis_transform(), **look)


def _title(rows: pd.DataFrame, metric: Metric) -> str:
    """How many arms are better than a control, or worse."""
    known = rows[rows["n"] > 0]
    if len(known) and {*verdicts(known)} == {"open"}:
        seeds = Estimate.at(known.iloc[0], "difference", "ci").seeds
        return f"Open whether rank 4 at an event beats controls of as many floats{seeds}"
    gain = known.loc[are_shown(known), "difference"] * (-1 if metric.lower else 1)
    return (
        f"Rank 4 at an event: of {len(known)} comparisons with controls of as many floats, "
        f"{(gain > 0).sum()} is shown to be better and {(gain < 0).sum()} worse"
    )


def _words(counts: list[int], run: Record) -> str:
    return (
        "A schedule minus what the controls at the right reach with as many floats (other floats: "
        "they never do); the last group is held against rank 4 at the event, which that control "
        "knows. Mean and 95 % t interval, "
        f"{style.seeds_in_words(counts)}, every schedule at its own learning rate. "
        f"Filled: p < {ALPHA} after "
        f"Holm's correction over all comparisons of the setting. {style.describe_setting(run)} "
        "(the first)."
    )


def main(records: Several, out: Out = None) -> list[Path]:
    """Print and draw arms against controls at the same floats; one folder per setting."""
    files, by_setting = Files("events", out), {}
    ones = []  # a run of each setting
    for name, path in by_name(records, "settings").items():
        runs = load_all(path)
        by_setting[name] = differences(runs)
        ones.append(runs[0])
    metric = tested_by(ones[0])
    files.page("events", "", as_text(by_setting, metric))
    files.figure("events", figure(by_setting, ones[0], metric))
    return files.print_paths()
