"""What a policy may know of a run: its past epochs, as the record has them. No torch.

The loop and the replay both make it from the record's rows, so that a policy cannot see during a
run what it would not see afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from regimes.detectors import Detector
from regimes.detectors.statistics import Statistic, norm_of
from regimes.errors import RecordError


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


def history(
    rows: Sequence[dict[str, Any]],
    compressed: Sequence[int],
    signal: str,
    costs: Costs | None = None,
) -> list[PastEpoch]:
    """What the record's epoch rows tell a policy about the compressed layers."""
    return [
        PastEpoch(
            lr=row["lr"],
            next_lr=row["next_lr"],
            statistics={
                name: [values[i] for i in compressed]
                if name != "norm"
                else _scaled([values[i] for i in compressed], row, signal)
                for key, values in row["statistics"].items()
                for name in ((key, "norm") if key == norm_of(signal) else (key,))
            },
            levels=[row["layers"]["level"][i] for i in compressed],
            model=row.get("model", {}),
            costs=costs or {},
        )
        for row in rows
    ]


def whole_history(
    rows: Sequence[dict[str, Any]], signal: str, table: Literal["batch", "sync"] = "batch"
) -> list[PastEpoch]:
    """What they tell a policy with the whole model as its only layer, whose levels are those of the
    batch or of the period between synchronisations.

    The norm is that of all parameters (paper, section 4.2: "looks at the gradient of whole
    model"); other statistics are the model's, and "train_loss" is among them.
    """
    past = []
    for row in rows:
        norms = row["statistics"].get(norm_of(signal), [])
        known = [value for value in norms if value is not None]
        whole = math.hypot(*known) if norms and len(known) == len(norms) else None
        statistics = {name: [value] for name, value in row.get("model", {}).items()}
        statistics["norm"] = _scaled([whole], row, signal)
        level = row.get(table, {}).get("level") or "low"
        model = {"train_loss": row.get("train_loss"), **row.get("model", {})}
        past.append(PastEpoch(row["lr"], row["next_lr"], statistics, [level], model))
    return past


def _scaled(values: list[float | None], row: dict[str, Any], signal: str) -> list[float | None]:
    """A gradient's norm times the row's batch size, in units of the configuration's; a movement's
    as it is, because it does not grow with the number of steps alone."""
    if signal.startswith("movement"):
        return values
    multiple = row.get("batch", {}).get("multiple", 1)
    return [value if value is None else value * multiple for value in values]


def signal_values(history: Sequence[PastEpoch], rule: Detector, layer: int) -> list[float | None]:
    """What a detector reads: its statistic in all past epochs, of a layer or the whole model.

    The whole model's norm is the root of the sum of squares over the compressed layers.
    """
    if rule.statistic is None:
        return [None] * len(history)
    read = Statistic.parse(rule.statistic)
    values: list[float | None] = []
    for past in history:
        layers = past.statistics.get(read.name, [])
        known = [value for value in layers if value is not None]
        if rule.per_layer:
            value = layers[layer] if layers else None
        elif layers and read.is_norm:
            value = math.hypot(*known) if len(known) == len(layers) else None
        else:
            value = past.model.get(read.name)
        values.append(value * past.lr if read.times_lr and value is not None else value)
    return values
