"""The parts of a record that the trainer and the DDP hook write alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regimes.collectives.requests import NO_LAYER, Layer
from regimes.collectives.world import Meter
from regimes.policies.controller import Levels


def sent(meter: Meter, levels: Levels) -> dict[str, Any]:
    """What a unit has sent, by its meter, and each layer's level with its reason."""
    counted = [meter.layers[i] for i in range(len(levels.names))]
    return {
        "floats": sum(t.floats for t in counted),
        "bytes": sum(t.bytes for t in counted) + meter.layers[NO_LAYER].bytes,
        "collectives": {"calls": meter.calls, "bytes": meter.sent},
        "layers": {
            "level": levels.names,
            "floats": [t.floats for t in counted],
            "bytes": [t.bytes for t in counted],
            "why": levels.why,
        },
    }


def layer_entries(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """The header's table of layers."""
    return [{"name": x.name, "shape": list(x.shape), "compressed": x.compressed} for x in layers]
