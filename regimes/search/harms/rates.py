"""The mean learning rate of each unit, from a record.

A row's ``lr`` is the rate of the unit's first step. Where the rate changes per step it is not that
of the unit: a warm-up from 0 begins with 0, and a fall inside a unit is not seen before the next.
"""

from __future__ import annotations

from statistics import fmean

import pandas as pd

from regimes.base.config import OptimizerConfig, from_dict
from regimes.records import Record
from regimes.records.earlier import as_present
from regimes.training.learning_rate import LearningRate
from regimes.training.units import Units


def mean_rates(run: Record) -> pd.Series:
    """Return the mean learning rate over the steps of each unit, in the order of the units.

    A row's ``lr`` also has the factor of a larger batch. A record of the hook has no schedule: the
    rate of its first step then stands for the unit's.
    """
    firsts = run.epochs["lr"].astype(float).reset_index(drop=True)
    if (schedule := _schedule_of(run)) is None:
        return firsts
    rate, units = schedule
    means = []
    for unit, recorded in enumerate(firsts):
        each = [rate(step) for step in range(*units.step_span(unit))]
        means.append(fmean(each) * (recorded / each[0] if each[0] else 1.0))
    return pd.Series(means, index=firsts.index)


def _schedule_of(run: Record) -> tuple[LearningRate, Units] | None:
    """The learning rates and the units of a run; None of a hook's record, which has no schedule."""
    config = run.config
    if config["optimizer"].get("schedule", "step") is None:
        return None
    per_epoch = int(run.header["steps_per_epoch"] or 1)
    total = config.get("steps") or config["epochs"] * per_epoch
    units = Units(per_epoch, config.get("unit_steps"), total)
    optimizer = from_dict(OptimizerConfig, as_present(config)["optimizer"], "optimizer.")
    return LearningRate(optimizer, per_epoch, total), units
