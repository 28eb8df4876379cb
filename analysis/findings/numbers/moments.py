"""Is the mean of a network's gradients sparse and their noise dense? Numbers for templates."""

from __future__ import annotations

from ...lasso.numbers import FAMILIES, SHAPES
from ..sources import number, records
from ..values import Interval, mean_of

SOURCE = "moments"


@number
def moments_share(series: str) -> Interval:
    """A statistic of `analysis.lasso.numbers.SHAPES` at the end of an epoch, of the whole model's
    vector: of each seed the mean over epochs."""
    assert series in SHAPES
    runs = records(SOURCE)
    return mean_of([float(run.epochs[f"{FAMILIES[0]}:{series}"].mean()) for run in runs])
