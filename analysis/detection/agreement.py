"""Do the norm, the eigenvalue and the rest mark the same epochs? Agreement that no rule forces.

Train once with every statistic, then draw (`grids/detection-smoke.toml`)::

    regimes ablate detection-smoke --schedules signals --seeds 8 --out runs/signals
    regimes figure agreement runs/signals

`unforced` says how an epoch is scored and called: each detector calls as many, and none
by construction.

Agreement of two detectors in a run is Cohen's kappa of their calls, and Spearman's correlation of
their scores; both are 0 by chance. Intervals are 95 % t intervals over seeds. How far its calls
agree with those of the other detector in runs of *other* seeds is the calendar's part: two that
follow the schedule of the rate alone agree there as well. How far it agrees with itself in them
says how much of what it calls belongs to the training and not to the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.console import stdout
from regimes.console.tables import Table
from regimes.plotting import style
from regimes.plotting.heatmaps import draw_bands
from regimes.records import Record, load_all

from ..common.command import Files
from ..common.compare import groups
from ..common.panels import draw_forest
from ..common.verdicts import interval_text
from . import unforced
from .unforced import FIRST, REFERENCE, RELATIVE, SHARE, Change

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_text(rows: pd.DataFrame, others: pd.DataFrame, spent: pd.Series, reference: str) -> Table:
    """Agreement with the reference, `other_runs` and `costs`, rounded."""
    agreed = unforced.with_reference(rows, reference).set_index("detector")
    lines = []
    for name in map(str, others.index):
        here = _kappa(agreed.loc[name].to_dict()) if name in agreed.index else ("", "")
        apart = {key: float(others[key][name]) for key in ("with", "itself")}
        skip = {"with": name == reference, "itself": name == FIRST}  # 1 by definition, or the other
        words = ("" if skip[key] or np.isnan(x) else f"{x:+.2f}" for key, x in apart.items())
        cost = f"{100 * float(spent[name]):.1f} %" if name in spent else "0"
        lines.append((name, *here, *words, cost))
    heads = ("detector", "n", "kappa [95 %]", "in other runs", "itself", "cost")
    return Table(heads, lines)


def _kappa(row: dict[Any, Any]) -> tuple[str, str]:
    ends = interval_text(row["kappa_low"], row["kappa_high"], "+.2f")
    return str(row["n"]), f"{row['kappa']:+.2f} {ends}".strip()


def figure(
    runs: Sequence[Record], reference: str = REFERENCE, change: Change = RELATIVE
) -> tuple[Figure, pd.DataFrame]:
    """Which epochs each detector calls, and its kappa with the reference.

    Returns:
        The figure, and its numbers: per detector and epoch the share of seeds that call it, and
        per detector kappa with its interval.
    """
    tables = unforced.scored(runs, change)
    shares = pd.concat(map(unforced.calls, tables.values())).groupby(level="epoch").mean().T
    whole = shares.reindex(columns=range(int(shares.columns.max()) + 1))  # the warm-up is empty
    rows = unforced.over_seeds(unforced.pairs(tables))
    agreed = unforced.with_reference(rows, reference).set_index("detector")
    with style.theme():
        fig = style.figure(1.3 + 0.32 * len(shares))
        left, right = fig.subplots(1, 2, width_ratios=[3, 2])
        image = draw_bands(left, whole)
        left.set_xlabel(style.unit_of(runs[0].config))
        style.mark_decays(left, runs[0])
        fig.colorbar(image, ax=left, aspect=12, pad=0.02).set_label("share of seeds")
        ends = agreed.reindex(shares.index)[["kappa", "kappa_low", "kappa_high"]]
        draw_forest(right, ends, [True] * len(ends))
        right.set_xlabel(f"kappa with {reference}")
        right.set_yticks(range(len(ends)), [""] * len(ends))  # the lines are those of the bands
        style.caption(fig, _words(runs, len(shares.columns), reference, change))
    numbers = shares.rename_axis("detector").reset_index()
    numbers = numbers.melt("detector", var_name="epoch", value_name="called")
    kept = ["n", "kappa", "kappa_low", "kappa_high"]
    return fig, pd.concat([numbers, agreed[kept].reset_index()], ignore_index=True)


def _words(runs: Sequence[Record], counted: int, reference: str, change: Change) -> str:
    ago = "the epoch before" if change.back == 1 else f"{change.back} epochs before"
    return (
        f"Left: the epochs that each detector calls, share of {style.seeds_in_words([len(runs)])}: "
        f"the {round(SHARE * counted)} of {counted} behind the warm-up in which its statistic "
        f"changed most since {ago}{'' if change.absolute else ', relatively'}. Right: agreement "
        f"with {reference} beyond chance (Cohen's kappa, 0 by chance), mean and 95 % t interval. "
        f"{style.setting(runs[0])}."
    )


def main(
    records: Path,
    schedule: str = "signals",
    reference: str = REFERENCE,
    back: int = 1,
    absolute: bool = False,
    out: Path | None = None,
) -> list[Path]:
    """Draw which epochs detectors call, and print how far they agree.

    Args:
        records: a folder of runs with several instruments, or an archive of them.
        schedule: whose runs.
        reference: the detector that the others are held against.
        back: epochs that a score looks back.
        absolute: score the change itself, in place of its ratio to the older value.
        out: folder for tables and figure; default figures/NAME.
    """
    files, runs = Files(records, out), groups(load_all(records), [schedule])[schedule]
    change = Change(back, absolute)
    tables, spent = unforced.scored(runs, change), unforced.costs(runs)
    rows = unforced.over_seeds(unforced.pairs(tables))
    others = unforced.other_runs(tables, reference)
    stdout.console(highlight=False).print(as_text(rows, others, spent, reference).drawn())
    print(
        f"with {reference}; other runs are of other seeds; cost: of training time, its whole "
        "instrument"
    )
    each = {"cost": spent, "threshold": unforced.thresholds(tables)}
    files.figure("agreement", figure(runs, reference, change))
    files.table("agreement-pairs", rows)
    files.table("agreement-detectors", others.assign(**each).reset_index())
    return files.said()
