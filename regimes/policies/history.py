"""What a policy may know of a run: its past epochs, as the record has them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from regimes.policies.detectors.statistics import Statistic, norm_of

Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class LevelCost:
    """Holds what one step sends at a level.

    Attributes:
        floats: of each compressed layer, by the paper's count.
        bytes: of all layers together.
    """

    floats: list[float]
    bytes: float


Costs = Mapping[str, LevelCost]


@dataclass(frozen=True)
class PastEpoch:
    """Holds what a policy may know of one epoch.

    Attributes:
        lr: The learning rate in the first step of the epoch.
        next_lr: The learning rate in the first step of the next epoch, at the same batch size.
        statistics: One value per layer for each statistic. None is an undefined value; a statistic
            that was not measured in the epoch is absent. "norm" is the norm of the sum of the
            gradients of all steps; the run's ``signal`` says which gradients these are. If the
            batch is m times as large, the norm is multiplied by m, because there are m times fewer
            steps.
        levels: The name of each layer's level.
        model: One value for the whole model for each statistic.
        costs: What a step costs at each level of the run and at dense. Empty if the record has
            none.
    """

    lr: float
    next_lr: float
    statistics: dict[str, list[float | None]]
    levels: list[str]
    model: dict[str, float | None] = field(default_factory=dict)
    costs: Costs = field(default_factory=dict)

    def value(self, statistic: str, layer: int) -> float | None:
        """Return the value of a statistic for a layer; None if it is undefined or was not measured.

        Args:
            layer: the index of the layer among the compressed ones.
        """
        values = self.statistics.get(statistic, [])
        return values[layer] if layer < len(values) else None


def level_costs(per_step: Mapping[str, Mapping[str, Any]], compressed: Sequence[int]) -> Costs:
    """Read the costs in a record's header, of the compressed layers."""
    return {
        name: LevelCost([cost["layers"][i] for i in compressed], cost["bytes"])
        for name, cost in per_step.items()
        if "layers" in cost  # not in the oldest records
    }


class History(list[PastEpoch]):
    """Holds past epochs in order, append-only, with a cache of what policies compute from them: the
    cost of a decision does not grow with the run."""

    def __init__(self, epochs: Sequence[PastEpoch] = ()) -> None:
        super().__init__(epochs)
        self._cache: dict[Hashable, tuple[Any, int]] = {}  # (state, epochs in it) by key

    def accumulate(
        self, key: Hashable, start: Callable[[], T], extend: Callable[[T, Sequence[PastEpoch]], T]
    ) -> T:
        """Compute a state over all past epochs: ``extend(extend(start(), first epochs), next
        epochs)``. Each call with a key reads only the epochs added since the last.

        Args:
            key: of this computation; a bound method is that of its own object alone, which the
                cache keeps alive.
            extend: the state with further epochs; may change it in place.
        """
        # Popped, so that a state that ``extend`` left half changed by an exception is not reused.
        state, seen = self._cache.pop(key, None) or (start(), 0)
        if seen < len(self):
            state = extend(state, self[seen:])
        self._cache[key] = state, len(self)
        return state


def as_history(epochs: Sequence[PastEpoch]) -> History:
    """Return the epochs as a ``History``: themselves, or a copy of a list."""
    return epochs if isinstance(epochs, History) else History(epochs)


def highest_rate(epochs: Sequence[PastEpoch]) -> float:
    """Return the highest learning rate so far, including the rate of the next epoch. Without
    an epoch it is -inf."""
    return as_history(epochs).accumulate(
        highest_rate,
        lambda: -math.inf,
        lambda peak, more: max(peak, *(rate for x in more for rate in (x.lr, x.next_lr))),
    )


class Reader:
    """Reads each row of a growing record once.

    The losses of a unit may arrive after its end: the last row is therefore read again, and the
    cache is dropped if it has changed. Other rows begin a new history.
    """

    def __init__(self) -> None:
        self._past, self._count = History(), 0
        self._last: Row = {}

    def history(self, rows: Sequence[Row], read: Callable[[Row], PastEpoch]) -> History:
        """Return ``read`` of all rows; the function must be the same at each call."""
        past, count = self._past, self._count
        continues = len(past) == count <= len(rows)  # not if ``read`` raised within the last call
        if not continues or (count and rows[count - 1] is not self._last):
            past = History()
        elif count and read(self._last) != past[-1]:
            past = History(past[:-1])
        past.extend(map(read, rows[len(past) :]))
        self._past, self._last, self._count = past, rows[-1] if rows else {}, len(rows)
        return past


def read_history(
    rows: Sequence[Row], compressed: Sequence[int], signal: str, costs: Costs | None = None
) -> History:
    """Read a record's epoch rows as past epochs of the compressed layers."""
    return History([past_epoch(row, compressed, signal, costs or {}) for row in rows])


def past_epoch(row: Row, compressed: Sequence[int], signal: str, costs: Costs) -> PastEpoch:
    """Read a row as a past epoch of the compressed layers."""
    statistics = {
        name: [values[i] for i in compressed] for name, values in row["statistics"].items()
    }
    if (norms := statistics.get(norm_of(signal))) is not None:
        statistics["norm"] = _scale_norms(norms, row, signal)
    levels = [row["layers"]["level"][i] for i in compressed]
    model = row.get("model", {})
    return PastEpoch(row["lr"], row["next_lr"], statistics, levels, model, costs)


def whole_history(
    rows: Sequence[Row], signal: str, table: Literal["batch", "sync"] = "batch"
) -> History:
    """Read a record's epoch rows as past epochs with the whole model as the only layer."""
    return History([whole_epoch(row, signal, table) for row in rows])


def whole_epoch(row: Row, signal: str, table: Literal["batch", "sync"]) -> PastEpoch:
    """Read a row as a past epoch with the whole model as the only layer.

    Norms are of all parameters (paper, section 4.2: "looks at the gradient of whole model"); other
    statistics are the model's, "train_loss" included.

    Args:
        table: it decides the levels: sizes of the batch, or periods between synchronisations.
    """
    statistics = {name: [value] for name, value in row.get("model", {}).items()}
    for name, values in row["statistics"].items():
        if Statistic.parse(name).is_norm:
            statistics[name] = [root_of_squares(values)]
    statistics["norm"] = _scale_norms(statistics.get(norm_of(signal), [None]), row, signal)
    level = row.get(table, {}).get("level") or "low"  # of a run without a policy of this table
    model = {"train_loss": row.get("train_loss"), **row.get("model", {})}
    return PastEpoch(row["lr"], row["next_lr"], statistics, [level], model)


def root_of_squares(norms: Sequence[float | None]) -> float | None:
    """Compute the norm of the whole from the norms of its parts; None without parts, or if one is
    None."""
    known = [value for value in norms if value is not None]
    return math.hypot(*known) if norms and len(known) == len(norms) else None


def _scale_norms(values: list[float | None], row: Row, signal: str) -> list[float | None]:
    """Norms of a gradient times the row's batch size over the configuration's; norms of a movement
    unchanged, because they do not grow with the number of steps alone."""
    multiple = row.get("batch", {}).get("multiple", 1)
    if multiple == 1 or signal.startswith("movement"):
        return values
    return [value if value is None else value * multiple for value in values]
