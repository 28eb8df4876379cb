"""The parts of a record that all jobs write alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regimes.collectives.layers import NO_LAYER, Layer
from regimes.collectives.meter import Meter
from regimes.instruments.panel import Readings
from regimes.policies.controller import Levels

# The columns "batch" of a unit without a batch policy, "sync" of one without local steps
NO_BATCH = {"level": None, "why": None, "multiple": 1}
NO_SYNC = {"level": None, "why": None, "period": 1}


def traffic_columns(meter: Meter, levels: Levels) -> dict[str, Any]:
    """Return what a unit has sent, by its meter, and each layer's level with its reason."""
    counted = [meter.layers[i] for i in range(len(levels.names))]
    collectives = {"calls": meter.calls, "bytes": meter.sent}
    return {
        "floats": sum(t.floats for t in counted),
        "bytes": sum(t.bytes for t in counted) + meter.layers[NO_LAYER].bytes,
        "collectives": collectives | ({"dense": meter.dense} if meter.dense else {}),
        "layers": {
            "level": levels.names,
            "floats": [t.floats for t in counted],
            "bytes": [t.bytes for t in counted],
            "why": levels.why,
        },
    }


def unit_columns(
    unit: int,
    span: tuple[int, int],
    steps: int,
    rates: tuple[float, float],
    batch_size: int | None,
    readings: Readings,
    groups: Sequence[float | None] | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Make the row of a record for a unit; what is unknown is None.

    Args:
        unit: its number, from 0.
        span: its steps ``[first, stop)`` among those of the job, at the usual batch size.
        steps: how many steps the optimiser made in it.
        rates: the learning rates at its first step, and at the first step of the next unit.
        batch_size: the batch size in this unit, if it is known.
        readings: what was measured of each layer and of the model.
        groups: the rates of all parameter groups at the first step, where there are several.
        columns: further columns, or values for those that are None otherwise, like the metric.
    """
    return {
        "epoch": unit,
        "unit": {"first": span[0], "stop": span[1]},
        "lr": rates[0],
        "next_lr": rates[1],
        **({} if groups is None else {"group_lr": list(groups)}),
        "batch_size": batch_size,
        "batch": dict(NO_BATCH),
        "sync": dict(NO_SYNC),
        "steps": steps,
        **dict.fromkeys(("train_loss", "test_loss", "metric")),
        **columns,
        "statistics": readings.layers,
        "model": readings.model,
        "weights": None,  # a column of the first records; nothing fills it
    }


def layer_entries(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return the header's table of layers."""
    return [{"name": x.name, "shape": list(x.shape), "compressed": x.compressed} for x in layers]
