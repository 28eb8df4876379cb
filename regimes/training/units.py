"""The unit at which a run measures, decides and records: an epoch, or a number of steps.

Steps count at the configuration's ``batch_size``; a batch m times larger takes m steps at once.
A unit of steps may begin and end anywhere in an epoch; the last one of a run may be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from regimes.base.config import RunConfig
from regimes.base.errors import require


@dataclass(frozen=True)
class Units:
    """Divides a run into units, in order.

    Attributes:
        per_epoch: steps per epoch.
        size: steps per unit, None for an epoch.
        total: steps of the run.

    >>> units = Units(per_epoch=12, size=5, total=14)
    >>> len(units), units.step_span(2), list(units.epoch_spans(2))
    (3, (10, 14), [(0, 10, 12), (1, 0, 2)])
    """

    per_epoch: int
    size: int | None
    total: int

    @classmethod
    def from_config(cls, config: RunConfig, per_epoch: int) -> Units:
        """Make the units of a configuration; ConfigError if a unit is no multiple of a batch
        size."""
        total = config.epochs * per_epoch if config.steps is None else config.steps
        size = config.unit_steps
        if size is not None and config.batch_policy:
            for name, batch in config.batch_levels.items():
                multiple = batch // config.batch_size
                good = size % multiple == 0 and per_epoch % size == 0
                words = f"a multiple of {multiple} (batch_levels.{name})"
                expected = f"{words} that divides an epoch's {per_epoch} steps"
                require(good, "unit_steps", size, expected)
        return cls(per_epoch, size, total)

    def __len__(self) -> int:
        return math.ceil(self.total / (self.size or self.per_epoch))

    def step_span(self, unit: int) -> tuple[int, int]:
        """Return the steps ``[first, stop)`` of a unit."""
        size = self.size or self.per_epoch
        return unit * size, min((unit + 1) * size, self.total)

    def epoch_spans(self, unit: int) -> Iterator[tuple[int, int, int]]:
        """Yield (epoch, first, stop) of each epoch in the unit: its steps ``[first, stop)``
        there."""
        first, stop = self.step_span(unit)
        while first < stop:
            epoch, begin = divmod(first, self.per_epoch)
            end = min(self.per_epoch, begin + stop - first)
            yield epoch, begin, end
            first += end - begin
