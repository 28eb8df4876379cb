"""Baselines: rules that look at nothing but the epoch. A detector that does not beat them at equal
length has detected nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regimes.config import check_windows, in_windows
from regimes.detectors.base import Values, Verdict
from regimes.errors import require


@dataclass(frozen=True)
class FixedWindows:
    """Critical in given epochs.

    Attributes:
        windows: pairs ``[first, stop)``, e.g. ``[[0, 6], [12, 14]]``.
    """

    windows: tuple[tuple[int, int], ...] = ()
    statistic: None = field(default=None, init=False)
    per_layer: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_windows("fixed-windows", self.windows)

    def __call__(self, values: Values) -> Verdict:
        return Verdict(in_windows(self.windows, len(values)))


@dataclass(frozen=True)
class FirstShare:
    """Critical in the first epochs of a run.

    Attributes:
        share: of the run's epochs, rounded to whole epochs.
        epochs: length of the run.
    """

    share: float = 0.25
    epochs: int = 0
    statistic: None = field(default=None, init=False)
    per_layer: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _check(self.share, self.epochs)

    def __call__(self, values: Values) -> Verdict:
        return Verdict(len(values) < round(self.share * self.epochs))


@dataclass(frozen=True)
class RandomWindows:
    """Critical in windows drawn once, evenly over all ways to place them without overlap.

    Attributes:
        share: of the run's epochs, in all windows together, rounded to whole epochs.
        epochs: length of the run.
        count: windows, as equal in length as whole epochs allow; fewer if there are fewer epochs.
        seed: other seeds, other windows.
    """

    share: float = 0.25
    epochs: int = 0
    count: int = 2
    seed: int = 0
    statistic: None = field(default=None, init=False)
    per_layer: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _check(self.share, self.epochs)
        require(self.count >= 1, "count", self.count, "at least 1")

    @cached_property
    def chosen(self) -> frozenset[int]:
        """The epochs inside the windows: ``round(share * epochs)`` of them."""
        total = round(self.share * self.epochs)
        count = min(self.count, total)
        lengths = [total // count + (i < total % count) for i in range(count)]
        pairs = place(lengths, self.epochs, random.Random(self.seed))
        return frozenset(e for first, stop in pairs for e in range(first, stop))

    def __call__(self, values: Values) -> Verdict:
        return Verdict(len(values) in self.chosen)


def place(lengths: Sequence[int], epochs: int, draw: random.Random) -> list[tuple[int, int]]:
    """Windows ``[first, stop)`` of these lengths, in any order, evenly over all ways to place them
    among the epochs without overlap."""
    lengths, count, free = list(lengths), len(lengths), epochs - sum(lengths)
    draw.shuffle(lengths)
    slots = sorted(draw.sample(range(free + count), count))  # windows among the free epochs
    starts = [slot - i + sum(lengths[:i]) for i, slot in enumerate(slots)]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _check(share: float, epochs: int) -> None:
    require(0 <= share <= 1, "share", share, "a share between 0 and 1")
    require(epochs >= 1, "epochs", epochs, "the length of the run, at least 1")
