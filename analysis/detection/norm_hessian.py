"""Do gradient norm and Hessian mark the same epochs? Kappa by how epochs are marked, per setting.

The answer of Figure 3 depends on the rule, so that all of them stand in one table (20 seconds)::

    regimes figure norm-hessian data/reference/small-signals.tar.xz \\
        data/reference/detection-signals-lm.tar.xz

*The paper's rule* marks an epoch where the norm of at least half of the layers, or the eigenvalue,
has changed by half or more over an eighth of the run. *Equal counts* marks the quarter of the
epochs with the largest changes, relative to the older value or absolute (`unforced`). The control
of each reads nothing: the first epochs, as many as are marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from regimes.base.errors import LackingError, RecordError
from regimes.plotting.groups import in_roles, separate_experiments
from regimes.plotting.said import MeanInterval
from regimes.policies.detectors import Detector, FixedWindows, NormChange, RelativeChange
from regimes.policies.replay.compare import compare_rules
from regimes.records import Record, load_all

from ..common.command import Files, Out, Several, by_name
from ..common.estimates import as_table, estimate, mean, word
from . import unforced
from .unforced import FIRST, Change

ETA = 0.5  # the paper's: a change of half marks an epoch
OF_RUN = 8  # the paper's rule compares over an eighth of a run
NORM, TOP = "norm", "eigenvalue"
SCHEDULES = ("signals", "low", "rank 4", "dense")  # the first with an eigenvalue
RULES = ("the paper's rule", "equal counts, relative", "equal counts, absolute")
COUNTED = ("kappa", "gain")
CELLS = {"kappa": mean("kappa", ".2f"), "control": lambda row: f"{row['control']:.2f}"}
COLUMNS = {
    "records": word("records"),
    "schedule": word("schedule"),
    "rate": word("rate"),
    "epochs are marked by": word("rule"),
    "n": word("n"),
    "kappa [95 %]": mean("kappa", ".2f"),
    "of the control": mean("control", ".2f"),
    "difference": mean("gain", ".2f"),
}


def find_measured(runs: Iterable[Record]) -> list[Record]:
    """The runs of the first schedule of `SCHEDULES` that recorded the eigenvalue.

    Raises:
        LackingError: none has.
    """
    known = [run for run in separate_experiments(runs) if TOP in run.epochs]
    for name in SCHEDULES:
        if found := [run for run in in_roles(known, [name]) if run.name == name]:
            return sorted(found, key=lambda run: run.seed)
    raise LackingError(f"no run of {', '.join(SCHEDULES)} recorded the eigenvalue")


def kappas(runs: Sequence[Record]) -> pd.DataFrame:
    """One row per rule and seed: kappa of norm and eigenvalue, and of the control and the
    eigenvalue; nan where one of them marks no epoch, or all."""
    rows = []
    for run in runs:
        for rule in RULES:
            both, control = _by_paper(run) if rule == RULES[0] else _by_counts(run, rule)
            rows.append({"rule": rule, "seed": run.seed, "kappa": both, "control": control})
    return pd.DataFrame(rows)


def _by_paper(run: Record) -> tuple[float, float]:
    interval = max(1, len(run.rows) // OF_RUN)
    norm = NormChange(eta=ETA, interval=interval)
    flagged = int((compare_rules(run, {NORM: norm}).epochs["critical"] >= 0.5).sum())
    rules: dict[str, Detector] = {
        NORM: norm,
        TOP: RelativeChange(
            statistic=TOP, per_layer=False, direction="decay", eta=ETA, interval=interval
        ),
        FIRST: FixedWindows(((0, flagged),) if flagged else ()),
    }
    pairs = compare_rules(run, rules).pairs.set_index(["a", "b"])["kappa"]
    return float(pairs[NORM, TOP]), float(pairs[TOP, FIRST])


def _by_counts(run: Record, rule: str) -> tuple[float, float]:
    """Over as many epochs as lie between two readings of the eigenvalue."""
    read = run.epochs.index[run.epochs[TOP].notna()]
    back = int(read.to_series().diff().median()) if len(read) > 1 else 1
    try:
        scores = unforced.scores(run, Change(back, rule == RULES[2]))
    except RecordError:  # too few epochs have a score
        return math.nan, math.nan
    rows = unforced.pairs({run.seed: scores})
    by = {frozenset((row.a, row.b)): float(row.kappa) for row in rows.itertuples()}  # type: ignore[arg-type]
    return by[frozenset((NORM, TOP))], by[frozenset((TOP, FIRST))]


def table(named: dict[str, Iterable[Record]]) -> pd.DataFrame:
    """One row per records and rule: means over seeds of both kappas with 95 % t intervals.

    Raises:
        LackingError: records without the eigenvalue.
    """
    rows = []
    for name, given in named.items():
        runs = find_measured(given)
        about = {"records": name, "schedule": runs[0].name, "rate": f"{runs[0].rate:g}"}
        for rule, group in kappas(runs).groupby("rule", sort=False):
            group = group.assign(gain=group["kappa"] - group["control"])
            row = {**about, "rule": rule, "n": int(group["gain"].count())}
            for column in ("kappa", "control", "gain"):
                row |= estimate(group[column].dropna().to_list(), column)
            rows.append(row)
    return pd.DataFrame(rows)


def count_above(rows: pd.DataFrame) -> list[int]:
    """In how many rows the norm is shown to agree with the eigenvalue better than by chance, and
    better than the control."""
    found = rows.to_dict("records")
    return [sum(MeanInterval.at(row, name).is_above(0) for row in found) for name in COUNTED]


def answer(rows: pd.DataFrame) -> str:
    """`count_above`, in a sentence."""
    chance, control = count_above(rows)
    return (
        f"Of {len(rows)} pairs of a setting and a rule the norm is shown to agree with the "
        f"eigenvalue better than by chance in {chance}, and better than a control that reads "
        f"nothing in {control}."
    )


def main(records: Several, out: Out = None) -> list[Path]:
    """Print how far gradient norm and Hessian eigenvalue mark the same epochs, by rule.

    Args:
        records: of grids with an eigenvalue; each is a setting.
    """
    files = Files("norm-hessian", out)
    rows = table({name: load_all(path) for name, path in by_name(records).items()})
    files.table("norm-hessian", rows)
    files.page("norm-hessian", answer(rows), as_table(rows, COLUMNS, texts=4))
    return files.print_paths()
