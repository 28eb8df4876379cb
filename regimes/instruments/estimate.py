"""A number from random samples, with its standard error."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Estimate:
    """A mean over samples."""

    value: float
    error: float  # standard error of the mean
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Estimate:
        """The mean of two or more samples (of one, with an error of zero)."""
        spread = stdev(samples) if len(samples) > 1 else 0.0
        return cls(fmean(samples), spread / len(samples) ** 0.5, len(samples))
