"""Effects: the quantity that a claim is about, as one number per seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from regimes.base.errors import RecordError
from regimes.base.statistics import paired_differences
from regimes.plotting.groups import decay_epochs
from regimes.records import Record, summary

from ..common import compare
from ..common.compare import LAST
from ..detection.unforced import Change, pairs, scored

Effect = Callable[[Sequence[Record]], list[float]]


def minus(a: str, b: str) -> Effect:
    """The metric of schedule ``a`` minus the metric of ``b``, paired over seeds, in the unit of
    figures."""

    def values(runs: Sequence[Record]) -> list[float]:
        by_run = summary([run for run in runs if run.name in (a, b)], LAST)
        factor = compare.tested_by(runs[0]).factor
        return [factor * x for x in paired_differences(by_run, a, b, "metric")]

    return values


def fall_at_decay(schedule: str) -> Effect:
    """log2(mean norm of the three epochs before the first decay / mean norm of the first
    three epochs at the lower rate), mean over layers; negative where the norm rises."""
    return _fall(schedule, (-3, -1), (0, 2))


def fall_after_decay(schedule: str) -> Effect:
    """log2(norm in the first epoch at the lower rate / norm two epochs later), mean over layers."""
    return _fall(schedule, (0, 0), (2, 2))


def _fall(schedule: str, before: tuple[int, int], after: tuple[int, int]) -> Effect:
    """log2 of the mean norm in some epochs over that in others, mean over layers; first and last
    epoch of each, counted from the first decay."""

    def values(runs: Sequence[Record]) -> list[float]:
        falls = []
        for run in (run for run in runs if run.name == schedule):
            decay, *_ = decay_epochs(run) or (None,)
            if decay is None:
                raise RecordError(f"{run.folder} does not say when its learning rate decays")
            names = [layer["name"] for layer in compare.compressed_layers(run)]
            rows = run.layers[run.layers["layer"].isin(names)]
            norms = [
                rows[rows["epoch"].between(decay + first, decay + last)]
                .groupby("layer")[run.statistic]
                .mean()
                for first, last in (before, after)
            ]
            falls.append(float(np.log2(norms[0] / norms[1]).mean()))
        return falls

    return values


def kappa_at_equal_counts(a: str, b: str, schedule: str, back: int = 1) -> Effect:
    """Cohen's kappa of two detectors that each mark a quarter of the epochs after the warm-up,
    those in which its statistic changes most; 0 by chance (`analysis.detection.unforced`).

    Args:
        back: epochs over which a change is taken.
    """

    def values(runs: Sequence[Record]) -> list[float]:
        rows = pairs(scored((run for run in runs if run.name == schedule), Change(back)))
        kept = rows[(rows["a"] == a) & (rows["b"] == b)]
        return kept.sort_values("seed")["kappa"].to_list()

    return values


def overlap(batch: int, schedule: str = "dense") -> Effect:
    """After the first epoch: the share of their top 10 % coordinates that two stochastic gradients
    have in common, mean over pairs, in %."""

    def values(runs: Sequence[Record]) -> list[float]:
        shares = []
        for run in (run for run in runs if run.name == schedule):
            lines = [line for line in run.details if line["instrument"] == "overlap"]
            if not lines:
                raise RecordError(f"{run.folder} recorded no support overlap")
            shares.append(100 * float(lines[0]["sizes"][str(batch)]["mean"]))
        return shares

    return values
