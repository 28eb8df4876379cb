"""The values that a detector reads of past epochs, and its verdict after them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from regimes.detectors import Detector, Online, Verdict
from regimes.detectors.statistics import Statistic
from regimes.policies.history import PastEpoch, as_history, root_of_squares

Values = list[float | None]


def signal_values(history: Sequence[PastEpoch], rule: Detector, layer: int) -> Values:
    """A detector's statistic in all past epochs, of a layer or the whole model; read only.

    The whole model's norm is the root of the sum of squares over the compressed layers.
    """
    statistic = None if rule.statistic is None else Statistic.parse(rule.statistic)
    row = _of_layers if rule.per_layer and statistic is not None else _of_model

    def extend(columns: Columns, epochs: Sequence[PastEpoch]) -> Columns:
        return columns.extend([row(statistic, epoch) for epoch in epochs])

    # One table for all layers, so that the epochs are read once and not once per layer.
    columns = as_history(history).accumulate((row, statistic), Columns, extend)
    return columns.column(layer if row is _of_layers else 0)


class Columns:
    """A table by columns that grows by rows; None where a row is too short."""

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


def _of_layers(statistic: Statistic | None, past: PastEpoch) -> Sequence[float | None]:
    assert statistic is not None
    values = past.statistics.get(statistic.name, ())
    return [_scaled(value, statistic, past) for value in values] if statistic.times_lr else values


def _of_model(statistic: Statistic | None, past: PastEpoch) -> Sequence[float | None]:
    if statistic is None:
        return (None,)
    norms = past.statistics.get(statistic.name) if statistic.is_norm else None
    value = root_of_squares(norms) if norms else past.model.get(statistic.name)
    return (_scaled(value, statistic, past),)


def _scaled(value: float | None, statistic: Statistic, past: PastEpoch) -> float | None:
    return value * past.lr if statistic.times_lr and value is not None else value


class OnlineState(NamedTuple):
    """An online detector's own state, its last verdict, and how many verdicts were critical."""

    state: Any
    verdict: Verdict
    critical: int = 0


def online_state(history: Sequence[PastEpoch], rule: Online, layer: int) -> OnlineState:
    """An online detector after all past epochs, for a layer or the whole model."""
    values = signal_values(history := as_history(history), rule, layer)

    def extend(online: OnlineState, epochs: Sequence[PastEpoch]) -> OnlineState:
        for value in values[len(values) - len(epochs) :]:
            state, verdict = rule.update(online.state, value)
            online = OnlineState(state, verdict, online.critical + (verdict.critical is True))
        return online

    return history.accumulate((rule.update, layer), lambda: OnlineState(*rule.begin()), extend)


def current_verdict(history: Sequence[PastEpoch], rule: Detector, layer: int) -> Verdict:
    """A detector's verdict on the next epoch, for a layer or the whole model."""
    # A subclass with a ``__call__`` of its own may answer differently from its updates.
    if isinstance(rule, Online) and type(rule).__call__ is Online.__call__:
        return online_state(history, rule, layer).verdict
    return rule(signal_values(history, rule, layer))
