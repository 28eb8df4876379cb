"""Figure 3: the top Hessian eigenvalue beside the gradient norm, and the regimes that each flags.

Run, then draw (8 minutes and 10 seconds on one core)::

    regimes ablate smoke-signals --seeds 5
    regimes figure 3 runs/smoke-signals

The paper (section 4.1) says that both flag the same regimes, the norm being orders of magnitude
cheaper. The eigenvalue is measured twice: with BatchNorm's running statistics and with the batch's,
which can differ by an order of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from regimes.base.errors import LackingError
from regimes.base.statistics import LEAST
from regimes.plotting import style
from regimes.plotting.groups import in_roles
from regimes.plotting.said import MeanInterval
from regimes.plotting.words import add_headline
from regimes.policies.detectors import Detector, FixedWindows, NormChange, RelativeChange
from regimes.policies.detectors.statistics import measuring_options
from regimes.policies.replay.compare import compare_rules
from regimes.records import Record, load_all, unit_name
from regimes.records.selection import add_note

from ..common.command import Files, Out, Records
from ..common.compare import group_runs, schedules, whole_norm
from ..common.estimates import as_table, estimate, mean, over_seeds, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NORM, EVAL, BATCH = (
    "gradient norm",
    "eigenvalue, running statistics",
    "eigenvalue, batch statistics",
)
CONTROL = "the first epochs, as many as the norm flags"
STATISTICS = ("eigenvalue", "eigenvalue:batch")
ALONE = {  # the columns of the table of detectors, and of that of pairs
    "detector": word("detector"),
    "n": word("n"),
    "critical [95 %]": mean("critical", ".3f"),
    "of low": mean("of_low", ".3f"),
    "s / epoch": mean("seconds_per_epoch", ".3f"),
    "of training": mean("share_of_training", ".3f"),
}
PAIRS = {
    "detector": word("a"),
    "with": word("b"),
    "n": word("n"),
    "Jaccard [95 %]": mean("jaccard", ".3f"),
    "kappa": mean("kappa", ".3f"),
    "lag": mean("lag", ".2f"),
}
LINES = {  # what is drawn: (column, colour, dash)
    EVAL: ("eigenvalue", "#0173b2", "-"),
    BATCH: ("eigenvalue:batch", "#de8f05", (0, (4, 1.5))),
    NORM: ("norm", "#222222", "-"),
}


def rules(interval_: int, eta: float) -> dict[str, Detector]:
    """The paper's rule on the norm, and rapid decay of either eigenvalue at the same threshold."""
    per_model = {"per_layer": False, "direction": "decay", "eta": eta, "interval": interval_}
    return {
        NORM: NormChange(eta=eta, interval=interval_),
        EVAL: RelativeChange(statistic="eigenvalue", **per_model),  # type: ignore[arg-type]
        BATCH: RelativeChange(statistic="eigenvalue:batch", **per_model),  # type: ignore[arg-type]
    }


def signals(runs: list[Record]) -> pd.DataFrame:
    """Per seed and epoch: both eigenvalues, and the norm of the gradient of all compressed layers
    together.

    Raises:
        LackingError: a run without the eigenvalues.
    """
    parts = []
    for run in runs:
        check_measured(run)
        frame = run.epochs[["epoch", "eigenvalue", "eigenvalue:batch"]].assign(seed=run.seed)
        parts.append(frame.merge(whole_norm(run), on="epoch"))
    return pd.concat(parts, ignore_index=True)


def check_measured(run: Record) -> None:
    """Raise LackingError, with a setting that measures all of them, if a signal is missing."""
    missing = [name for name in STATISTICS if name not in run.epochs]
    if missing:
        quoted = ", ".join(f'"{name}"' for name in STATISTICS)
        raise LackingError(
            f"{run.folder} recorded no {' and no '.join(map(repr, missing))}: write statistics = "
            f"[{quoted}] into its grid, or train it with {measuring_options(*STATISTICS)}, or a "
            "grid that "
            "has it, e.g. regimes ablate smoke-signals"
        )


def only_measured(runs: list[Record], schedule: str) -> list[Record]:
    """The runs; where none is the schedule by its name or role, and those of one alone have the
    eigenvalues, these under its name."""
    measured = [run for run in runs if {*STATISTICS} <= {*run.epochs}]
    there = {run.name for run in in_roles(runs, [schedule])}
    if schedule in there or len({run.name for run in measured}) != 1:
        return runs
    add_note(f"the schedule {measured[0].name} is drawn as {schedule}: it alone has eigenvalues")
    return [run.called(schedule) for run in measured]


def with_control(run: Record, interval_: int, eta: float) -> dict[str, Detector]:
    """The rules, and one that reads nothing: the first epochs, as many as the norm's rule flags."""
    known = rules(interval_, eta)
    norm = compare_rules(run, {NORM: known[NORM]}).epochs
    flagged = int((norm["critical"] >= 0.5).sum())
    return known | {CONTROL: FixedWindows(((0, flagged),) if flagged else ())}


def agreement(runs: list[Record], interval_: int, eta: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per detector and the control, one per pair): means over seeds with 95 % t intervals.

    The share of training time of both eigenvalues is the whole curvature instrument's.

    Raises:
        LackingError: a run without the eigenvalues.
    """
    for run in runs:  # before a rule asks for its own statistic alone
        check_measured(run)
    comparisons = [compare_rules(run, with_control(run, interval_, eta)) for run in runs]
    alone = pd.concat([f.detectors for f in comparisons], ignore_index=True)
    pairs = pd.concat([f.pairs for f in comparisons], ignore_index=True)
    one = ["critical", "of_low", "seconds_per_epoch", "share_of_training"]
    return over_seeds(alone, ["detector"], one), over_seeds(
        pairs, ["a", "b"], ["jaccard", "kappa", "lag"]
    )


def usual_interval(runs: Sequence[Record]) -> int:
    """An eighth of a run, as `regimes detect` has it."""
    return max(1, len(runs[0].rows) // 8)


def figure3(
    runs: Iterable[Record], schedule: str = "low", interval_: int | None = None, eta: float = 0.5
) -> style.Drawing:
    """Eigenvalues, norm, and a band per detector, over training.

    Returns:
        The figure, and its numbers: per signal and epoch n, mean, 95 % t interval, and the share
        of layers and seeds that its rule calls critical.

    Raises:
        LackingError: no run of the schedule, or runs without eigenvalues.
    """
    chosen = group_runs(runs, [schedule])[schedule]
    interval_ = interval_ or usual_interval(chosen)
    values, alone, pairs = signals(chosen), *agreement(chosen, interval_, eta)
    calls = [compare_rules(run, rules(interval_, eta)).epochs for run in chosen]
    shares = pd.concat(calls).groupby(["detector", "epoch"])["critical"].mean()
    numbers = pd.concat([_curve(values, name, shares) for name in LINES], ignore_index=True)
    with style.theme():
        fig = style.figure(4.6)
        top, middle, bottom = fig.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1.1])
        for ax, names in ((top, (EVAL, BATCH)), (middle, (NORM,))):
            for name in names:
                _draw(ax, numbers[numbers["signal"] == name], name)
            style.log_axis(ax)
            ax.margins(x=0.01)
            style.mark_decays(ax, chosen[0], labelled=ax is top)
        top.set_ylabel("top eigenvalue\nof the Hessian")
        middle.set_ylabel("gradient\nnorm")
        fig.legend(
            *top.get_legend_handles_labels(), loc="outside upper left", ncols=2, handlelength=4
        )
        _bands(bottom, numbers)
        style.mark_decays(bottom, chosen[0], labelled=False, behind="white")
        bottom.set_xlabel(unit_name(chosen[0].config))
        add_headline(fig, _title(pairs, _gain(chosen, interval_, eta)))
        style.add_caption(fig, _words(chosen, alone, pairs, interval_, eta))
    return style.Drawing(fig, numbers)


def _curve(values: pd.DataFrame, name: str, shares: pd.Series) -> pd.DataFrame:
    column = LINES[name][0]
    rows = []
    for epoch, group in values.groupby("epoch"):
        seen = group[column].dropna().to_list()
        row = {"signal": name, "epoch": epoch, "n": len(seen), **estimate(seen, "mean", alone=True)}
        rows.append({**row, "critical": shares.get((name, epoch), np.nan)})
    return pd.DataFrame(rows)


def _draw(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    _, colour, dash = LINES[name]
    rows = rows.dropna(subset="mean")  # epochs without a reading would break the line
    ax.plot(rows["epoch"], rows["mean"], color=colour, linestyle=dash, linewidth=1.5, label=name)
    floor = rows["ci_low"].clip(lower=rows["mean"].min() / 10)  # a log axis has no room below zero
    ax.fill_between(rows["epoch"], floor, rows["ci_high"], color=colour, alpha=0.18, linewidth=0)


def _bands(ax: Axes, numbers: pd.DataFrame) -> None:
    """One row per detector; the darker, the more layers and seeds it calls critical."""
    table = numbers.pivot(index="signal", columns="epoch", values="critical").loc[list(LINES)]
    ax.imshow(
        table.to_numpy(), cmap="Greys", vmin=0, vmax=1.2, aspect="auto", interpolation="nearest"
    )
    ax.set_yticks(range(len(table)), [name.removesuffix(" statistics") for name in table.index])
    ax.tick_params(axis="y", length=0, labelsize=7)
    ax.grid(False)
    for edge in range(1, len(table)):
        ax.axhline(edge - 0.5, color="white", linewidth=2)


def _gain(runs: list[Record], interval_: int, eta: float) -> MeanInterval:
    """Kappa of norm and eigenvalue minus that of the control and the eigenvalue, over seeds."""
    gains = []
    for run in runs:
        pairs = compare_rules(run, with_control(run, interval_, eta)).pairs
        by = pairs.set_index(["a", "b"])["kappa"]
        gains.append(float(by[NORM, EVAL] - by[EVAL, CONTROL]))
    return MeanInterval.of(gains)


def _title(pairs: pd.DataFrame, gain: MeanInterval) -> str:
    """How far the norm's rule and the eigenvalue's mark the same epochs, and whether more than a
    control that reads nothing.

    Args:
        gain: the norm's agreement minus the control's.
    """
    by = {(row["a"], row["b"]): row for row in pairs.to_dict("records")}
    both = MeanInterval.at(by[NORM, EVAL], "kappa")
    control = MeanInterval.at(by[EVAL, CONTROL], "kappa")
    if math.isnan(both.value):  # one of them marks no epoch, or all
        return "Do gradient norm and Hessian eigenvalue mark the same epochs?"
    size, nothing = f"kappa {both.text('.2f')}", "the first epochs do, which read nothing"
    if math.isnan(control.value) or not gain.n:
        return f"Do gradient norm and Hessian eigenvalue mark the same epochs? {size}"
    beside = f"{size} and {control.numbers('.2f')}; 1: always"
    theirs, verdict = "the eigenvalue's epochs", gain.verdict()
    if verdict == "open" and gain.n >= LEAST and abs(gain.value) < 1e-9:
        return f"The norm marks {theirs} as well as {nothing} ({size})"
    if verdict == "open":
        return f"Open whether the norm marks {theirs} better than {nothing} ({beside})"
    if verdict == "not shown":
        return f"The norm is not shown to mark {theirs} better than {nothing} ({beside})"
    than = "better" if verdict == "above" else "worse"
    return f"The norm marks {theirs} {than} than {nothing} ({beside})"


def _words(
    runs: list[Record], alone: pd.DataFrame, pairs: pd.DataFrame, interval_: int, eta: float
) -> str:
    cost, spent = alone.set_index("detector")["share_of_training"], ""
    if math.isfinite(cost[NORM]) and math.isfinite(cost[EVAL]):
        spent = (
            f"Cost: norm {cost[NORM]:.1%} of training time, the curvature instrument "
            f"{cost[EVAL]:.0%}. "
        )

    def of(a: str, b: str, column: str) -> str:
        return _spread(pairs[(pairs["a"] == a) & (pairs["b"] == b)].iloc[0], column)

    agree = "; ".join(
        f"{name}: Jaccard {of(NORM, name, 'jaccard')}, kappa {of(NORM, name, 'kappa')}, with "
        f"{CONTROL}, which read nothing, kappa {of(name, CONTROL, 'kappa')}"
        for name in (EVAL, BATCH)
    )
    return (
        f"Mean over {style.seeds_in_words([len(runs)])}; "
        f"{style.intervals_in_words([len(runs)], bars=False)}. Norm: of all compressed layers "
        f"together. Below: what each rule calls critical (relative change of {eta:g} or more over "
        f"{interval_} epochs; of eigenvalues, falls only), dark where more layers and seeds are. "
        f"Agreement with the norm per epoch: {agree}. {spent}{style.describe_setting(runs[0])}."
    )


def _spread(row: pd.Series, column: str) -> str:
    """The mean with its interval; "none" where no seed has a value."""
    found = MeanInterval.at(row, column)
    return "none" if math.isnan(found.value) else found.text(".2f")


def main(
    records: Records,
    out: Out = None,
    schedule: str = "low",
    interval: int | None = None,
    eta: float = 0.5,
) -> list[Path]:
    """Draw Figure 3 from runs with the curvature instrument, and print the agreement.

    Args:
        schedule: whose runs; one of the paper's also by what a tournament calls it.
        interval: epochs between evaluations of both rules; default an eighth of a run.
        eta: relative change that counts as critical.
    """
    files, runs = Files(records, out), load_all(records)
    if schedule not in {run.name for run in runs}:
        runs = only_measured(schedules(runs), schedule)
    chosen = group_runs(runs, [schedule])[schedule]
    interval = interval or usual_interval(chosen)
    alone, pairs = agreement(chosen, interval, eta)
    files.show(as_table(alone, ALONE).filled(), as_table(pairs, PAIRS, texts=2).filled())
    files.figure(f"figure3-{schedule}", figure3(runs, schedule, interval, eta))
    files.table(f"figure3-{schedule}-detectors", alone)
    files.table(f"figure3-{schedule}-pairs", pairs)
    return files.print_paths()
