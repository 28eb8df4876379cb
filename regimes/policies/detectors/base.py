"""The contract of a detector, a frozen dataclass that is called with the values of all past epochs
and returns a verdict on the next one, ``len(values)``.

``values[e]`` is of epoch e, None where nothing was measured (an instrument with ``every`` > 1). A
detector is pure, so a run and its replay get the same verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Values = Sequence[float | None]


@dataclass(frozen=True)
class Verdict:
    """Says whether the next epoch is critical, and by which numbers.

    Attributes:
        critical: Whether the next epoch is critical. None: there is no verdict, and the previous
            one remains in force.
        old: The earlier value.
        new: The later value.
        score: What is compared with ``threshold``.
        threshold: The score from which on the epoch is critical.
    """

    critical: bool | None
    old: float | None = None
    new: float | None = None
    score: float | None = None
    threshold: float | None = None

    def why(self, rule: str) -> dict[str, Any]:
        """Return the reason of a decision, for the record. There the score is called "ratio", as in
        records of all earlier versions."""
        numbers = {"old": self.old, "new": self.new, "ratio": self.score}
        return {"rule": rule, **numbers, "threshold": self.threshold}


@runtime_checkable
class Detector(Protocol):
    """Reads the values of epochs 0 to e and gives the verdict on epoch e + 1; without values, on
    epoch 0."""

    @property
    def statistic(self) -> str | None:
        """Return what the detector reads, such as "norm", "eigenvalue", or "norm*lr", which is the
        norm times the epoch's learning rate; None if it reads the number of epochs alone."""
        ...

    @property
    def per_layer(self) -> bool:
        """Return whether there is one verdict per layer, from the layer's values, or one from the
        whole model's."""
        ...

    def __call__(self, values: Values) -> Verdict: ...


class Online(ABC):
    """Is the base of detectors that read each value once, so that a verdict costs the same at every
    epoch. The state is never changed in place; ``__call__`` applies `update` to every value in
    turn."""

    statistic: str
    per_layer: bool

    @abstractmethod
    def begin(self) -> tuple[Any, Verdict]:
        """Return the state and the verdict on epoch 0, before any value."""

    @abstractmethod
    def update(self, state: Any, value: float | None) -> tuple[Any, Verdict]:
        """Return the state and the verdict after one more value."""

    def __call__(self, values: Values) -> Verdict:
        state, verdict = self.begin()
        for value in values:
            state, verdict = self.update(state, value)
        return verdict


def latest_measured(values: Values, last: int) -> int | None:
    """Return the newest measured epoch that is not after ``last``; None if there is none."""
    epochs = range(min(last, len(values) - 1), -1, -1)
    return next((epoch for epoch in epochs if values[epoch] is not None), None)
