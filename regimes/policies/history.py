"""What a policy may know of a run: its past epochs, as the record has them. No torch.

The loop and the replay both make it from the record's rows, so that a policy cannot see during a
run what it would not see afterwards. What is computed from past epochs is kept with them
(``History``), so that a decision costs the same after each unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from regimes.detectors.statistics import norm_of
from regimes.errors import RecordError

Row = Mapping[str, Any]
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class LevelCost:
    """What one step sends at a level.

    Attributes:
        floats: of each compressed layer, by the paper's count.
        bytes: of all layers together.
    """

    floats: list[float]
    bytes: float


Costs = Mapping[str, LevelCost]


@dataclass(frozen=True)
class PastEpoch:
    """What a policy may know of one epoch.

    Attributes:
        lr, next_lr: the rate it trained at and that of the epoch after, at the same batch size.
        statistics: per statistic, one value per layer. What was not measured in the epoch is
            absent; None is what came out undefined. "norm" is the run's ``signal``, summed over an
            epoch's steps: at m times the batch size there are m times fewer, so it counts m times.
        levels: the level's name that each layer had.
        model: per statistic, one value for the whole model.
        costs: of a step at each level of the run and dense; empty where a record does not have it.
    """

    lr: float
    next_lr: float
    statistics: dict[str, list[float | None]]
    levels: list[str]
    model: dict[str, float | None] = field(default_factory=dict)
    costs: Costs = field(default_factory=dict)


def cost(past: PastEpoch, level: str) -> LevelCost:
    """RecordError where the record does not have it."""
    if level not in past.costs:
        raise RecordError(f"the record does not say what a step sends at level {level!r}")
    return past.costs[level]


def level_costs(per_step: Mapping[str, dict[str, Any]], compressed: Sequence[int]) -> Costs:
    """The costs in a record's header, of the compressed layers."""
    return {
        name: LevelCost([cost["layers"][i] for i in compressed], cost["bytes"])
        for name, cost in per_step.items()
        if "layers" in cost  # not in the oldest records
    }


class History(list[PastEpoch]):
    """Past epochs in order, and what policies have computed from them; only ever appended to."""

    def __init__(self, epochs: Sequence[PastEpoch] = ()) -> None:
        super().__init__(epochs)
        self._kept: dict[Hashable, tuple[Any, int]] = {}

    def accumulate(
        self,
        key: Hashable,
        start: Callable[[], Kept],
        extend: Callable[[Kept, Sequence[PastEpoch]], Kept],
    ) -> Kept:
        """``extend(extend(start(), first epochs), next epochs)``, and so on for all past epochs;
        those that were there at the last call with this key are not read again.

        Args:
            key: of this computation; a bound method is good for one object alone.
            extend: what is accumulated over these further epochs as well; may change it in place.
        """
        found, seen = self._kept.pop(key, None) or (start(), 0)
        if seen < len(self):
            found = extend(found, self[seen:])
        self._kept[key] = found, len(self)
        return found


def as_history(epochs: Sequence[PastEpoch]) -> History:
    """The same epochs as a ``History``; a list is copied."""
    return epochs if isinstance(epochs, History) else History(epochs)


class Reader:
    """Reads rows that grow, each once.

    The losses of a unit may become known after its end: the last row that was read is read again,
    and if it has changed, what was computed from it is forgotten. Other rows begin a new history.
    """

    def __init__(self) -> None:
        self._past, self._count = History(), 0
        self._last: Row = {}

    def history(self, rows: Sequence[Row], read: Callable[[Row], PastEpoch]) -> History:
        """All rows as ``read`` gives them, which is the same function at each call."""
        past, count = self._past, self._count
        known = len(past) == count <= len(rows)
        if not known or (count and rows[count - 1] is not self._last):
            past = History()
        elif count and read(self._last) != past[-1]:
            past = History(past[:-1])
        past.extend(map(read, rows[len(past) :]))
        self._past, self._last, self._count = past, rows[-1] if rows else {}, len(rows)
        return past


def history(
    rows: Sequence[Row],
    compressed: Sequence[int],
    signal: str,
    costs: Costs | None = None,
) -> History:
    """What the record's epoch rows tell a policy about the compressed layers."""
    return History([past_epoch(row, compressed, signal, costs or {}) for row in rows])


def past_epoch(row: Row, compressed: Sequence[int], signal: str, costs: Costs) -> PastEpoch:
    """What one row tells a policy about the compressed layers."""
    statistics = {
        name: [values[i] for i in compressed] for name, values in row["statistics"].items()
    }
    if (norms := statistics.get(norm_of(signal))) is not None:
        statistics["norm"] = _scaled(norms, row, signal)
    levels = [row["layers"]["level"][i] for i in compressed]
    return PastEpoch(row["lr"], row["next_lr"], statistics, levels, row.get("model", {}), costs)


def whole_history(
    rows: Sequence[Row], signal: str, table: Literal["batch", "sync"] = "batch"
) -> History:
    """What they tell a policy with the whole model as its only layer."""
    return History([whole_epoch(row, signal, table) for row in rows])


def whole_epoch(row: Row, signal: str, table: Literal["batch", "sync"]) -> PastEpoch:
    """What a row tells a policy with the whole model as its only layer, whose levels are those of
    the batch or of the period between synchronisations.

    The norm is that of all parameters (paper, section 4.2: "looks at the gradient of whole
    model"); other statistics are the model's, and "train_loss" is among them.
    """
    norms = row["statistics"].get(norm_of(signal), [])
    statistics = {name: [value] for name, value in row.get("model", {}).items()}
    statistics["norm"] = _scaled([root_of_squares(norms)], row, signal)
    level = row.get(table, {}).get("level") or "low"
    model = {"train_loss": row.get("train_loss"), **row.get("model", {})}
    return PastEpoch(row["lr"], row["next_lr"], statistics, [level], model)


def root_of_squares(norms: Sequence[float | None]) -> float | None:
    """The norm of the whole from those of its parts; None if one is undefined, or none there."""
    known = [value for value in norms if value is not None]
    return math.hypot(*known) if norms and len(known) == len(norms) else None


def _scaled(values: list[float | None], row: Row, signal: str) -> list[float | None]:
    """A gradient's norm times the row's batch size, in units of the configuration's; a movement's
    as it is, because it does not grow with the number of steps alone."""
    multiple = row.get("batch", {}).get("multiple", 1)
    if multiple == 1 or signal.startswith("movement"):
        return values
    return [value if value is None else value * multiple for value in values]
