"""The clock of each method where it was measured, from ``clocks.toml``; no torch.

A method's clock is the number of dense's steps that one of its steps is worth, each at its own best
learning rate (docs/findings/clock.md). So a method comes to a loss so many times as fast as dense:
its clock * (dense's seconds of a step / its own).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from regimes.base.config import DENSE
from regimes.base.config.toml import read_tables

FILE = Path(__file__).with_name("clocks.toml")
USUAL = "adamw"


@dataclass(frozen=True)
class Setting:
    """Says where clocks were measured.

    Attributes:
        grid: whose schedules were trained; empty: ``records`` is a file of losses, without runs.
        name: of the data.
        parameters, optimizer, steps: of the training.
        n: seeds.
        records: from which they are computed.
    """

    grid: str
    name: str
    parameters: int
    optimizer: str
    steps: int
    n: int
    records: str


@dataclass(frozen=True)
class MeasuredClock:
    """Holds a method's clock in one setting: mean and 95 % interval over seeds."""

    setting: Setting
    mean: float
    low: float
    high: float

    @property
    def used(self) -> float:
        """Return what is reckoned with: a step that is worth more than dense's was not shown."""
        return min(self.mean, 1.0)

    def __str__(self) -> str:
        """ "0.75 [0.70, 0.80]"."""
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@functools.cache
def read_clocks() -> Mapping[str, tuple[MeasuredClock, ...]]:
    """Read the measurements of each method, as ``--methods`` spells it."""
    clocks: dict[str, list[MeasuredClock]] = {}
    for table in read_tables(FILE).values():
        values = table.pop("clock")
        setting = Setting(**table)
        for method, numbers in values.items():
            clocks.setdefault(method, []).append(MeasuredClock(setting, *map(float, numbers)))
    return {method: tuple(values) for method, values in clocks.items()}


def find_clock(method: str) -> MeasuredClock | None:
    """Find the measurement to reckon with: of the largest model, with AdamW; None if there is none.

    >>> str(find_clock("powersgd:4")), find_clock("powersgd:32")
    ('0.75 [0.70, 0.80]', None)
    """
    clocks = [x for x in read_clocks().get(method, ()) if x.setting.optimizer == USUAL]
    return max(clocks, key=lambda x: (x.setting.parameters, x.setting.steps), default=None)


def reckon_clock(method: str) -> float | None:
    """Return the clock that a speed is computed with; of dense 1; None if it was not measured."""
    if method == DENSE:
        return 1.0
    clock = find_clock(method)
    return None if clock is None else clock.used
