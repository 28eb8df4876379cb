"""Do the norm, the eigenvalue and the rest mark the same epochs? Agreement that no rule forces.

Train once with every statistic, then draw (`regimes.presets.detection` has the grids)::

    regimes ablate detection-smoke --schedules signals --seeds 8 --out runs/signals
    regimes figure agreement runs/signals

After each epoch a statistic of the whole model is scored by its relative change since some epochs
ago, one unless said otherwise, which is what ACCORDION's rule holds against a threshold
(`RelativeChange`). A score counts if both epochs lie behind the warm-up, in which everything
changes. Each detector calls the epochs with its largest scores, a quarter of those that count, so
that none agrees with another because both are eager, or late. Beside them is `FIRST`, which reads
nothing.

Agreement of two detectors in a run is Cohen's kappa of their calls, and Spearman's correlation of
their scores; both are 0 by chance. Intervals are 95 % t intervals over seeds. How far its calls
agree with those of the other detector in runs of *other* seeds is the calendar's part: two that
follow the schedule of the rate alone agree there as well. How far it agrees with itself in them
says how much of what it calls belongs to the training and not to the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from regimes.console import stdout
from regimes.console.tables import Table
from regimes.detectors import RelativeChange
from regimes.errors import RecordError
from regimes.plotting import style
from regimes.plotting.bands import draw_bands
from regimes.policies.history import signal_values
from regimes.presets.detection import STATISTICS
from regimes.records import Record, load_all
from regimes.replay.agreement import interval, kappa
from regimes.replay.replay import measured, past_epochs, signal_cost

from .command import Files
from .compare import groups
from .verdicts import ends_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST = "first epochs"
REFERENCE = "eigenvalue"
SHARE = 0.25  # of the evaluations that count, called by each detector

# -- records to numbers ----------------------------------------------------------------------


def rule(statistic: str) -> RelativeChange:
    """The rule that scores a statistic of the whole model; its threshold plays no part."""
    return RelativeChange(statistic=statistic, interval=1, per_layer=False)


def scores(run: Record, back: int = 1, absolute: bool = False) -> pd.DataFrame:
    """A column of scores per detector whose statistic was recorded, a row per epoch that counts.
    nan: the statistic was undefined.

    Args:
        back: epochs that a score looks back.
        absolute: the change itself, in place of its ratio to the older value.

    Raises:
        RecordError: a run without any of the statistics, or with fewer than four scores.
    """
    known = {name: rule(text) for name, text in STATISTICS.items() if measured(run, rule(text))}
    if not known:
        raise RecordError(f"{run.folder} recorded none of the statistics: see `regimes presets "
                          "detection` for grids that do")  # fmt: skip
    warm = int(run.epochs["lr"].to_numpy().argmax())  # the first epoch at the full rate
    past, epochs = past_epochs(run), range(warm + back, len(run.rows))
    if len(epochs) < 1 / SHARE:
        raise RecordError(f"{run.folder} has {len(epochs)} epochs behind its warm-up that can be "
                          "scored, too few to call a quarter of them")  # fmt: skip
    found = {}
    for name, made in known.items():
        values = signal_values(past, made, 0)
        both = [made((values[epoch - back], values[epoch])) for epoch in epochs]
        found[name] = [v.score if v.score is None or not absolute else v.score * abs(v.old or 0.0)
                       for v in both]  # fmt: skip
    return pd.DataFrame(found, index=pd.Index(epochs, name="epoch"), dtype=float)


def calls(table: pd.DataFrame) -> pd.DataFrame:
    """What each detector calls: its largest scores, of equal ones the first, an undefined one last;
    and the first epochs, as many.

    >>> calls(pd.DataFrame({"a": [0.1, 0.9, 0.2, 0.3], "b": [np.nan, 0.0, 0.0, 0.0]})).to_numpy()
    array([[False, False,  True],
           [ True,  True, False],
           [False, False, False],
           [False, False, False]])
    """
    count = round(SHARE * len(table))
    ranks = table.rank(ascending=False, method="first", na_option="bottom")
    return (ranks <= count).assign(**{FIRST: np.arange(len(table)) < count})


def pairs(runs: Iterable[Record], back: int = 1, absolute: bool = False) -> pd.DataFrame:
    """One row per pair of detectors and seed: kappa of their calls, Spearman's correlation of their
    scores (nan beside `FIRST`, and for scores that are all alike)."""
    rows = []
    for run in runs:
        table = scores(run, back, absolute)
        called, ranks = calls(table), table.corr("spearman", min_periods=3)
        for a, b in combinations(map(str, called), 2):
            same = kappa(called[a].to_numpy(), called[b].to_numpy())
            both = np.nan if b == FIRST else ranks.loc[a, b]
            rows.append({"a": a, "b": b, "seed": run.seed, "kappa": same, "spearman": both})
    return pd.DataFrame(rows)


def other_runs(
    runs: Sequence[Record], reference: str, back: int = 1, absolute: bool = False
) -> pd.DataFrame:
    """Per detector, kappa of its calls in one run with those of the reference (column ``with``) and
    with its own (``itself``) in a run of another seed, means over all pairs of runs."""
    called = [calls(scores(run, back, absolute)) for run in runs]
    rows = [
        {"detector": name, "with": kappa(a[name].to_numpy(), b[reference].to_numpy()),
         "itself": kappa(a[name].to_numpy(), b[name].to_numpy())}
        for a, b in permutations(called, 2) for name in a
    ]  # fmt: skip
    columns = ["detector", "with", "itself"]
    means = pd.DataFrame(rows, columns=columns).groupby("detector", sort=False).mean()
    return means.reindex(called[0].columns)


def over_seeds(each: pd.DataFrame) -> pd.DataFrame:
    """One row per pair: n, mean and 95 % t interval of kappa and of the correlation."""
    rows = []
    for (a, b), seeds in each.groupby(["a", "b"], sort=False):
        row: dict[str, Any] = {"a": a, "b": b, "n": len(seeds)}
        for column in ("kappa", "spearman"):
            known = seeds[column].dropna().to_list()
            ends = interval(known) if known else (np.nan,) * 3
            row |= dict(zip((column, f"{column}_low", f"{column}_high"), ends, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def with_reference(rows: pd.DataFrame, reference: str = REFERENCE) -> pd.DataFrame:
    """The pairs of which one detector is the reference, by the other's name.

    Raises:
        RecordError: it is in none.
    """
    found = rows[(rows["a"] == reference) | (rows["b"] == reference)]
    if found.empty:
        raise RecordError(f"the runs recorded no {reference!r} to hold the others against")
    return found.assign(detector=found["a"].where(found["b"] == reference, found["b"]))


def thresholds(runs: Sequence[Record], back: int = 1, absolute: bool = False) -> pd.Series:
    """The change that a quarter of all scores exceed, by detector: what makes it as eager live."""
    return pd.concat([scores(run, back, absolute) for run in runs]).quantile(1 - SHARE)


def costs(runs: Sequence[Record]) -> pd.Series:
    """Share of the training time that each detector's instrument takes, mean over runs; what the
    instrument measures beside it counts."""
    names = map(str, scores(runs[0]))
    found = {name: [signal_cost(run, rule(STATISTICS[name]))[1] for run in runs] for name in names}
    return pd.DataFrame(found).mean()


# -- numbers to text and figure --------------------------------------------------------------


def as_text(rows: pd.DataFrame, others: pd.DataFrame, spent: pd.Series, reference: str) -> Table:
    """Agreement with the reference, `other_runs` and `costs`, rounded."""
    agreed = with_reference(rows, reference).set_index("detector")
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
    ends = ends_text(row["kappa_low"], row["kappa_high"], "+.2f")
    return str(row["n"]), f"{row['kappa']:+.2f} {ends}".strip()


def figure(
    runs: Sequence[Record], reference: str = REFERENCE, back: int = 1, absolute: bool = False
) -> tuple[Figure, pd.DataFrame]:
    """Which epochs each detector calls, and its kappa with the reference.

    Returns:
        The figure, and its numbers: per detector and epoch the share of seeds that call it, and
        per detector kappa with its interval.
    """
    called = pd.concat([calls(scores(run, back, absolute)) for run in runs])
    shares = called.groupby(level="epoch").mean().T
    whole = shares.reindex(columns=range(int(shares.columns.max()) + 1))  # the warm-up is empty
    agreed = with_reference(over_seeds(pairs(runs, back, absolute)), reference).set_index(
        "detector"
    )
    with style.theme():
        fig = style.figure(1.3 + 0.32 * len(shares))
        left, right = fig.subplots(1, 2, width_ratios=[3, 2])
        image = draw_bands(left, whole)
        left.set_xlabel(style.unit_of(runs[0].config))
        style.mark_decays(left, runs[0])
        fig.colorbar(image, ax=left, aspect=12, pad=0.02).set_label("share of seeds")
        _forest(right, agreed.reindex(shares.index), reference)
        style.caption(fig, _words(runs, len(shares.columns), reference, back, absolute))
    numbers = shares.rename_axis("detector").reset_index()
    numbers = numbers.melt("detector", var_name="epoch", value_name="called")
    kept = ["n", "kappa", "kappa_low", "kappa_high"]
    return fig, pd.concat([numbers, agreed[kept].reset_index()], ignore_index=True)


def _forest(ax: Axes, rows: pd.DataFrame, reference: str) -> None:
    """Kappa per detector, on the same lines as the bands."""
    places = np.arange(len(rows))
    bars = [rows["kappa"] - rows["kappa_low"], rows["kappa_high"] - rows["kappa"]]
    ax.axvline(0, color="black", linewidth=0.8, linestyle=(0, (1, 1.6)))
    ax.errorbar(rows["kappa"], places, xerr=np.nan_to_num(bars), color="black", marker="o",
                markersize=4, linestyle="", capsize=2.5, elinewidth=1)  # fmt: skip
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel=f"kappa with {reference}")
    ax.set_yticks(places, [""] * len(rows))


def _words(runs: Sequence[Record], counted: int, reference: str, back: int, absolute: bool) -> str:
    ago = "the epoch before" if back == 1 else f"{back} epochs before"
    return (
        f"Left: the epochs that each detector calls, share of {style.seeds_in_words([len(runs)])}: "
        f"the {round(SHARE * counted)} of {counted} behind the warm-up in which its statistic "
        f"changed most since {ago}{'' if absolute else ', relatively'}. Right: agreement with "
        f"{reference} beyond chance (Cohen's kappa, 0 by chance), mean and 95 % t interval. "
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
    rows, spent = over_seeds(pairs(runs, back, absolute)), costs(runs)
    others = other_runs(runs, reference, back, absolute)
    stdout.console(highlight=False).print(as_text(rows, others, spent, reference).drawn())
    print(f"with {reference}; other runs are of other seeds; cost: of training time, its whole "
          "instrument")  # fmt: skip
    each = {"cost": spent, "threshold": thresholds(runs, back, absolute)}
    files.figure("agreement", figure(runs, reference, back, absolute))
    files.table("agreement-pairs", rows)
    files.table("agreement-detectors", others.assign(**each).reset_index())
    return files.said()


if __name__ == "__main__":
    from .command import start

    start(main)
