"""What a detector reads of past epochs, and what it says after them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from regimes.detectors import Detector, Online, Verdict
from regimes.detectors.statistics import Statistic
from regimes.policies.history import PastEpoch, as_history, root_of_squares

Values = list[float | None]


def signal_values(history: Sequence[PastEpoch], rule: Detector, layer: int) -> Values:
    """What a detector reads: its statistic in all past epochs, of a layer or the whole model; not
    to be changed.

    The whole model's norm is the root of the sum of squares over the compressed layers.
    """
    read = None if rule.statistic is None else Statistic.parse(rule.statistic)
    row = _of_layers if rule.per_layer and read is not None else _of_model
    table = as_history(history).accumulate(
        (row, read), Columns, lambda columns, epochs: columns.extend([row(read, e) for e in epochs])
    )
    return table.column(layer if row is _of_layers else 0)


class Columns:
    """A table that grows by rows, by column; None where a row has no value, or is too short."""

    def __init__(self) -> None:
        self.columns: list[Values] = []
        self.length = 0

    def extend(self, rows: Sequence[Sequence[float | None]]) -> Columns:
        """Append rows; returns itself."""
        missing = max(map(len, rows), default=0) - len(self.columns)
        self.columns += [[None] * self.length for _ in range(missing)]
        nothing: Values = [None] * len(rows)
        for column, more in zip_longest(self.columns, zip_longest(*rows), fillvalue=nothing):
            column.extend(more)
        self.length += len(rows)
        return self

    def column(self, index: int) -> Values:
        """All values of one column."""
        return self.columns[index] if index < len(self.columns) else [None] * self.length


def _of_layers(read: Statistic | None, past: PastEpoch) -> Sequence[float | None]:
    assert read is not None
    values = past.statistics.get(read.name, ())
    return [_times(value, read, past) for value in values] if read.times_lr else values


def _of_model(read: Statistic | None, past: PastEpoch) -> Sequence[float | None]:
    if read is None:
        return (None,)
    layers = past.statistics.get(read.name)
    value = root_of_squares(layers) if layers and read.is_norm else past.model.get(read.name)
    return (_times(value, read, past),)


def _times(value: float | None, read: Statistic, past: PastEpoch) -> float | None:
    return value * past.lr if read.times_lr and value is not None else value


class Said(NamedTuple):
    """What a detector has said so far.

    Attributes:
        state: of an online detector, its own.
        verdict: the last.
        critical: how many verdicts after an epoch were critical.
    """

    state: Any
    verdict: Verdict
    critical: int = 0


def said(history: Sequence[PastEpoch], rule: Online, layer: int) -> Said:
    """What an online detector says, one epoch after another, of a layer or the whole model."""
    values = signal_values(history := as_history(history), rule, layer)

    def extend(found: Said, epochs: Sequence[PastEpoch]) -> Said:
        for value in values[len(values) - len(epochs) :]:
            state, verdict = rule.update(found.state, value)
            found = Said(state, verdict, found.critical + (verdict.critical is True))
        return found

    return history.accumulate((rule.update, layer), lambda: Said(*rule.begin()), extend)


def verdict(history: Sequence[PastEpoch], rule: Detector, layer: int) -> Verdict:
    """What a detector says of the epoch to come, of a layer or the whole model."""
    if isinstance(rule, Online) and type(rule).__call__ is Online.__call__:
        return said(history, rule, layer).verdict
    return rule(signal_values(history, rule, layer))
