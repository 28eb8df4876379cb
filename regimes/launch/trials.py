"""The trials of ``tune``: scores, ranks, the table, the files. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from regimes.config import RunConfig, to_toml
from regimes.console.tables import Table
from regimes.errors import RecordError
from regimes.plotting.looks import named
from regimes.records import load, write_output

LAST = 3  # units whose mean counts


@dataclass(frozen=True)
class Trial:
    """One combination of values.

    Attributes:
        label: its settings, "optimizer.lr=0.1 levels.high=2"; "as it is" without any.
        config: the cell with them, for the whole run.
        scores: the validation metric by seed, of its last round; empty if it was not trained or
            a run failed.
        share: of the epochs it was trained for.
        failed: the error of a failed run.
    """

    label: str
    config: RunConfig
    scores: tuple[float, ...] = ()
    share: float = 0.0
    failed: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.scores) if self.scores else math.nan


@dataclass(frozen=True)
class Tuned:
    """All trials, by cell in the order of the values; the metric and seeds that chose."""

    metric: str
    trials: dict[str, list[Trial]]
    seeds: tuple[int, ...]

    @property
    def chosen(self) -> dict[str, Trial]:
        """The best trial of each cell."""
        return {cell: ranked(trials, self.metric)[0] for cell, trials in self.trials.items()}

    def table(self) -> Table:
        """One row per trial, with the chosen ones marked."""
        best = {id(trial) for trial in self.chosen.values()}
        factor = 100 if self.metric == "accuracy" else 1
        rows = [
            (
                cell,
                trial.label,
                f"{trial.share:.2g}",
                str(len(trial.scores)),
                _spell([factor * s for s in trial.scores]) or trial.failed,
                "chosen" if id(trial) in best else "",
            )
            for cell, trials in self.trials.items()
            for trial in trials
        ]
        unit = " %" if self.metric == "accuracy" else ""
        heads = ("schedule", "values", "of the run", "n", f"validation {self.metric}{unit}", "")
        note = (
            f"mean ± sd over seeds {', '.join(map(str, self.seeds))} of the last {LAST} units; the "
            "result needs other seeds"
        )
        return Table(heads, rows, note, texts=2)


def ranked(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """The longest trained first, then the best; failed ones last."""
    sign = 1 if named(metric).lower else -1

    def key(trial: Trial) -> tuple[bool, float, float]:
        return not trial.scores, -trial.share, sign * trial.mean if trial.scores else 0.0

    return sorted(trials, key=key)


def read_scores(folders: Sequence[Path]) -> tuple[str, tuple[float, ...]]:
    """(the metric, each run's mean over its last units on validation data)."""
    records = [load(folder) for folder in folders]
    means = (record.epochs["validation_metric"].tail(LAST).mean() for record in records)
    return records[0].header["metric"], tuple(map(float, means))


def write(tuned: Tuned, out: Path) -> None:
    """``tune.json`` with every trial, and ``chosen/<cell>.toml``."""
    rows = [
        {"schedule": cell, "values": t.label}
        | {"share": t.share, "scores": t.scores, "failed": t.failed}
        for cell, trials in tuned.trials.items()
        for t in trials
    ]
    labels = {cell: trial.label for cell, trial in tuned.chosen.items()}
    summary = {"metric": tuned.metric, "seeds": tuned.seeds, "trials": rows, "chosen": labels}
    write_output(out / "tune.json", json.dumps(summary, indent=1) + "\n")
    for cell, trial in tuned.chosen.items():
        if not trial.scores:
            raise RecordError(f"every trial of {cell} failed: {trial.failed}")
        config = replace(trial.config, seed=max(tuned.seeds) + 1, tuned_on=tuned.seeds)
        write_output(chosen_file(out, cell), to_toml(config))


def chosen_file(out: Path, cell: str) -> Path:
    """The file of a cell's chosen configuration."""
    return out / "chosen" / f"{cell}.toml"


def _spell(scores: Sequence[float]) -> str:
    if not scores:
        return ""
    spread = f" ± {stdev(scores):.3g}" if len(scores) > 1 else ""
    return f"{fmean(scores):.4g}{spread}"
