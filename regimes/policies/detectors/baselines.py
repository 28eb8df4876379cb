"""Baselines: rules of the epoch alone. A detector is useful only if it beats them at equal length
of its critical regimes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from regimes.base.config import Bounded, Bounds, check_windows, in_windows
from regimes.base.config.bounds import Count, Share
from regimes.policies.detectors.base import Values, Verdict

Length = Annotated[int, Bounds("the length of the run, at least 1", low=1)]


@dataclass(frozen=True)
class FixedWindows:
    """Marks the epochs of given windows as critical; a baseline that measures nothing.

    Attributes:
        windows: Pairs ``[first, stop)`` of epochs, such as ``[[0, 6], [12, 14]]``.
    """

    windows: tuple[tuple[int, int], ...] = ()
    statistic: None = field(default=None, init=False)
    per_layer: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_windows("fixed-windows", self.windows)

    def __call__(self, values: Values) -> Verdict:
        return Verdict(in_windows(self.windows, len(values)))


@dataclass(frozen=True)
class FirstShare(Bounded):
    """Marks the first epochs of a run as critical; a baseline that measures nothing.

    Attributes:
        share: The share of the run's epochs, rounded to whole epochs.
        epochs: The length of the run.
    """

    share: Share = 0.25
    epochs: Length = 0
    statistic: None = field(default=None, init=False)
    per_layer: bool = field(default=False, init=False)

    def __call__(self, values: Values) -> Verdict:
        return Verdict(len(values) < round(self.share * self.epochs))


@dataclass(frozen=True)
class RandomWindows(Bounded):
    """Marks the epochs of random windows as critical; a baseline that measures nothing. The windows
    are drawn once: all ways to place them without overlap are equally likely.

    Attributes:
        share: The share of the run's epochs in all windows together, rounded to whole epochs.
        epochs: The length of the run.
        count: The number of windows. They are as equal in length as whole epochs allow; there are
            fewer if there are fewer epochs.
        seed: The seed of the draw.
    """

    share: Share = 0.25
    epochs: Length = 0
    count: Count = 2
    seed: int = 0
    statistic: None = field(default=None, init=False)
    per_layer: bool = field(default=False, init=False)

    @cached_property
    def chosen(self) -> frozenset[int]:
        """Return the epochs inside the windows: ``round(share * epochs)`` of them."""
        total = round(self.share * self.epochs)
        count = min(self.count, total)
        lengths = [total // count + (i < total % count) for i in range(count)]
        pairs = place_windows(lengths, self.epochs, random.Random(self.seed))
        return frozenset(e for first, stop in pairs for e in range(first, stop))

    def __call__(self, values: Values) -> Verdict:
        return Verdict(len(values) in self.chosen)


def place_windows(
    lengths: Sequence[int], epochs: int, draw: random.Random
) -> list[tuple[int, int]]:
    """Draw windows ``[first, stop)`` of these lengths, in any order, evenly from all ways to place
    them without overlap."""
    lengths, count, free = list(lengths), len(lengths), epochs - sum(lengths)
    draw.shuffle(lengths)
    slots = sorted(draw.sample(range(free + count), count))  # windows among the free epochs
    starts = [slot - i + sum(lengths[:i]) for i, slot in enumerate(slots)]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
