"""Do the norm, the eigenvalue and other statistics mark the same epochs?

Train once with every statistic, then draw (`grids/detection-smoke.toml`)::

    regimes ablate detection-smoke --schedules signals --seeds 8 --out runs/signals
    regimes figure agreement runs/signals

Each detector calls the same number of epochs (`unforced`), so that agreement does not follow from
the rule.

Agreement of two detectors in a run is Cohen's kappa of their calls, and Spearman's correlation of
their scores; both are 0 by chance. Intervals are 95 % t intervals over seeds. Agreement with the
other detector in runs of *other* seeds is the part that the schedule of the rate explains: two
detectors that follow the schedule alone agree there as well. Agreement of a detector with itself in
other runs is the part of its calls that is the same in every run of the setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.plotting import style
from regimes.plotting.panels import draw_bands
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.records import Record, load_all, unit_name

from ..common.command import Files, Out, Records
from ..common.compare import group_runs
from ..common.estimates import as_table, mean, number, word
from . import unforced
from .unforced import FIRST, REFERENCE, RELATIVE, SHARE, Change

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_text(
    rows: pd.DataFrame, in_other_runs: pd.DataFrame, spent: pd.Series, reference: str
) -> Table:
    """Agreement with the reference, `other_runs` and `costs`, rounded."""
    agreed = unforced.with_reference(rows, reference).set_index("detector")
    table = in_other_runs.join(agreed[["n", "kappa", "kappa_ci_low", "kappa_ci_high"]]).assign(
        cost=spent
    )
    table.loc[table.index == reference, "with"] = np.nan  # 1 by definition, or the kappa
    table.loc[table.index == FIRST, "itself"] = np.nan
    columns = {
        "detector": word("detector"),
        "n": number("n", ".0f"),
        "kappa [95 %]": mean("kappa", "+.2f"),
        "in other runs": number("with", "+.2f"),
        "itself": number("itself", "+.2f"),
        "cost": lambda row: "0" if np.isnan(row["cost"]) else f"{100 * row['cost']:.1f} %",
    }
    return as_table(table.rename_axis("detector").reset_index(), columns)


def figure(
    runs: Sequence[Record], reference: str = REFERENCE, change: Change = RELATIVE
) -> style.Drawing:
    """Which epochs each detector calls, and its kappa with the reference.

    Returns:
        The figure, and its numbers: per detector and epoch the share of seeds that call it, and
        per detector kappa with its interval.
    """
    tables = unforced.scored(runs, change)
    shares = pd.concat(map(unforced.calls, tables.values())).groupby(level="epoch").mean().T
    # The epochs of the warm-up are empty.
    all_epochs = shares.reindex(columns=range(int(shares.columns.max()) + 1))
    rows = unforced.over_seeds(unforced.pairs(tables))
    agreed = unforced.with_reference(rows, reference).set_index("detector")
    with style.theme():
        fig = style.figure(1.3 + 0.32 * len(shares))
        left, right = fig.subplots(1, 2, width_ratios=[3, 2])
        image = draw_bands(left, all_epochs)
        left.set_xlabel(unit_name(runs[0].config))
        style.mark_decays(left, runs[0])
        fig.colorbar(image, ax=left, aspect=12, pad=0.02).set_label("share of seeds")
        ends = agreed.reindex(shares.index)
        sure = [MeanInterval.at(row, "kappa").is_above(0) for _, row in ends.iterrows()]
        _draw_forest(right, ends, sure)
        right.set_xlabel(f"kappa with {reference}\nright: agrees more")
        left.set_title("which epochs each statistic marks", loc="left", pad=13)
        add_headline(fig, _title(ends, reference))
        right.set_yticks(range(len(ends)), [""] * len(ends))  # the lines are those of the bands
        style.add_caption(fig, _words(runs, len(shares.columns), reference, change))
    numbers = shares.rename_axis("detector").reset_index()
    numbers = numbers.melt("detector", var_name="epoch", value_name="called")
    kept = ["n", "kappa", "kappa_ci_low", "kappa_ci_high"]
    return style.Drawing(fig, pd.concat([numbers, agreed[kept].reset_index()], ignore_index=True))


def _draw_forest(ax: Axes, rows: pd.DataFrame, filled: Sequence[bool]) -> None:
    """One line per row, from the top: kappa and its interval, around a dotted line at 0; the marker
    is filled where ``filled`` says so."""
    ax.axvline(0, color="black", linewidth=0.8, linestyle=style.DOTTED)
    numbers = rows[["kappa", "kappa_ci_low", "kappa_ci_high"]].to_numpy()
    for place, ((value, low, high), full) in enumerate(zip(numbers, filled, strict=True)):
        ax.errorbar(
            value,
            place,
            xerr=np.nan_to_num([[value - low], [high - value]]),
            marker="o",
            color="black",
            markersize=4,
            markerfacecolor="black" if full else "white",
            capsize=2,
            elinewidth=0.9,
        )
    ax.set_ylim(len(rows) - 0.5, -0.5)


def _title(ends: pd.DataFrame, reference: str) -> str:
    """Which statistics are shown to agree with the reference beyond chance."""
    kappas = {name: MeanInterval.at(row, "kappa") for name, row in ends.iterrows()}
    said = [
        f"{name} (kappa {kappa.text('.2f')})" for name, kappa in kappas.items() if kappa.is_above(0)
    ]
    count = int(ends["kappa"].notna().sum())
    known = [kappa for kappa in kappas.values() if kappa.n]
    if known and all(kappa.verdict() == "open" for kappa in known):
        seeds = known[0].seeds
        return f"Open which of {count} detectors mark the same epochs as the {reference}{seeds}"
    of = (
        f"Of {count} detectors {' and '.join(said)} alone" if said else f"None of {count} detectors"
    )
    verb = "are" if len(said) > 1 else "is"
    return f"{of} {verb} shown to mark the same epochs as the {reference}"


def _words(runs: Sequence[Record], counted: int, reference: str, change: Change) -> str:
    ago = "the epoch before" if change.back == 1 else f"{change.back} epochs before"
    return (
        f"Left: the epochs that each detector marks, share of {style.seeds_in_words([len(runs)])}: "
        f"the {round(SHARE * counted)} of {counted} after the warm-up in which its statistic "
        f"changed most since {ago}{'' if change.absolute else ', relatively'}. Right: agreement "
        f"with {reference} beyond chance (Cohen's kappa, 0 by chance), mean; "
        f"{style.intervals_in_words([len(runs)], bands=False)}; filled: above 0. "
        f"{style.describe_setting(runs[0])}."
    )


def main(
    records: Records,
    schedule: str = "signals",
    reference: str = REFERENCE,
    back: int = 1,
    absolute: bool = False,
    out: Out = None,
) -> list[Path]:
    """Draw which epochs detectors call in runs with several instruments, and print their agreement.

    Args:
        schedule: whose runs.
        reference: the detector that the others are compared with.
        back: epochs that a score looks back.
        absolute: score the change itself, in place of its ratio to the older value.
    """
    files, runs = Files(records, out), group_runs(load_all(records), [schedule])[schedule]
    change = Change(back, absolute)
    tables, spent = unforced.scored(runs, change), unforced.costs(runs)
    rows = unforced.over_seeds(unforced.pairs(tables))
    in_other_runs = unforced.other_runs(tables, reference)
    stdout.make_console(highlight=False).print(
        as_text(rows, in_other_runs, spent, reference).drawn()
    )
    print(
        f"with {reference}; other runs are of other seeds; cost: of training time, its whole "
        "instrument"
    )
    columns = {"cost": spent, "threshold": unforced.thresholds(tables)}
    files.figure("agreement", figure(runs, reference, change))
    files.table("agreement-pairs", rows)
    files.table("agreement-detectors", in_other_runs.assign(**columns).reset_index())
    return files.print_paths()
