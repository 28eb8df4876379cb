"""The contract of a detector, and what its rules share.

A detector is a frozen dataclass that is called with the values of all past epochs, ``values[e]``
measured in epoch e, and answers for the epoch to come, ``len(values)``. ``values[e]`` is None where
nothing was measured (an instrument with ``every`` > 1): rules compare measured values. Being pure,
a detector gives the same answer during a run and replayed over a record. One that goes through all
values takes them one by one (``Online``), so that an answer costs no more late in a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Values = Sequence[float | None]


@dataclass(frozen=True)
class Verdict:
    """An answer and the numbers behind it.

    Attributes:
        critical: is this a critical regime? None: no opinion, the last answer stands.
        old, new: the two values compared.
        score: what was held against ``threshold``.
    """

    critical: bool | None
    old: float | None = None
    new: float | None = None
    score: float | None = None
    threshold: float | None = None

    def why(self, rule: str) -> dict[str, Any]:
        """The reason that a record keeps of a decision."""
        return {
            "rule": rule,
            "old": self.old,
            "new": self.new,
            "ratio": self.score,
            "threshold": self.threshold,
        }


@runtime_checkable
class Detector(Protocol):
    """Values of epochs 0..e in, the verdict on epoch e + 1 out; without values, on epoch 0."""

    @property
    def statistic(self) -> str | None:
        """What it reads, e.g. "norm", "eigenvalue", or "norm*lr" for the norm times the epoch's
        learning rate. None: it reads nothing but the number of epochs."""
        ...

    @property
    def per_layer(self) -> bool:
        """One verdict per layer from the layer's values, or one from the whole model's?"""
        ...

    def __call__(self, values: Values) -> Verdict: ...


class Online(ABC):
    """Base of detectors that take values one by one: what they keep of those before is a state,
    which is never changed in place. A call is the same as all updates in turn."""

    statistic: str
    per_layer: bool

    @abstractmethod
    def begin(self) -> tuple[Any, Verdict]:
        """The state, and the verdict on epoch 0, before any value."""

    @abstractmethod
    def update(self, state: Any, value: float | None) -> tuple[Any, Verdict]:
        """The same after one more value."""

    def verdicts(self, values: Values) -> Iterator[Verdict]:
        """The verdict after each value."""
        state, _ = self.begin()
        for value in values:
            state, verdict = self.update(state, value)
            yield verdict

    def __call__(self, values: Values) -> Verdict:
        state, verdict = self.begin()
        for value in values:
            state, verdict = self.update(state, value)
        return verdict


def latest(values: Values, last: int) -> int | None:
    """The newest measured epoch that is not after ``last``; None if there is none."""
    return next(
        (e for e in range(min(last, len(values) - 1), -1, -1) if values[e] is not None), None
    )
