"""What was measured of each method's loss, from ``measured.toml``; no torch.

A method is harmless where each measurement leaves room for no harm (its interval reaches zero or
below) and excludes more than `MOST`; harmful where one shows harm; else open. Evidence of one kind
of data speaks against a method on any other, too, so that a mistake costs time and not accuracy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from regimes.config.toml import read_tables

FILE = Path(__file__).with_name("measured.toml")
MOST = {"points": 1.0, "bits": 0.1}  # harm that a harmless method's interval may reach
HARMLESS, HARMFUL, OPEN, UNKNOWN = "harmless", "harmful", "open", "not measured"


@dataclass(frozen=True)
class Setting:
    """One comparison with dense training, every method at the best learning rate of its own.

    Attributes:
        grid: whose schedules were trained.
        name: of the data.
        item: "token" or "sample", what the model reads.
        parameters, steps, workers: of the training.
        n: seeds.
        unit: of the harm, "points" of accuracy or "bits" per byte.
        page: prints the numbers.
        records: from which they are computed.
    """

    grid: str
    name: str
    item: str
    model: str
    parameters: int
    steps: int
    workers: int
    n: int
    unit: str
    page: str
    records: str


@dataclass(frozen=True)
class AddedLoss:
    """What a method added to the final loss in one setting: mean and 95 % interval over seeds;
    above 0 is worse."""

    setting: Setting
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return HARMFUL
        return HARMLESS if self.high <= MOST[self.setting.unit] else OPEN

    def __str__(self) -> str:
        """ "+0.80 [+0.46, +1.13] bits"."""
        form = "+.1f" if self.setting.unit == "points" else "+.2f"
        numbers = (f"{x + 0.0:{form}}" for x in (self.mean, self.low, self.high))
        return "{} [{}, {}] {}".format(*numbers, self.setting.unit)


@functools.cache
def read_harms() -> Mapping[str, tuple[AddedLoss, ...]]:
    """The measurements of each method, as ``--methods`` spells it."""
    harms: dict[str, list[AddedLoss]] = {}
    for table in read_tables(FILE).values():
        values = table.pop("harm")
        setting = Setting(**table)
        for method, numbers in values.items():
            harms.setdefault(method, []).append(AddedLoss(setting, *map(float, numbers)))
    return {method: tuple(values) for method, values in harms.items()}


def worst_verdict(method: str) -> str:
    """The worst of all measurements of a method: `HARMFUL`, `OPEN` or `HARMLESS`; or `UNKNOWN`.

    >>> worst_verdict("powersgd:1"), worst_verdict("powersgd:32")
    ('harmful', 'not measured')
    >>> worst_verdict("quantised-all-reduce:8")
    'harmless'
    """
    if method == "dense":
        return HARMLESS
    verdicts = {harm.verdict for harm in read_harms().get(method, ())}
    return next((x for x in (HARMFUL, OPEN, HARMLESS) if x in verdicts), UNKNOWN)


def deciding_harm(method: str, item: str) -> AddedLoss | None:
    """The measurement to show: of those with the method's verdict one on the same kind of data
    where there is one, of the largest model."""
    harms = [x for x in read_harms().get(method, ()) if x.verdict == worst_verdict(method)]

    def nearness(harm: AddedLoss) -> tuple[bool, int]:
        return harm.setting.item == item, harm.setting.parameters

    return max(harms, key=nearness, default=None)
