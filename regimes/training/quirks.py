"""``quirks = "authors"``: train as the published code does where it differs from the paper. Every
quirk is an ordinary field of the configuration:

- the detector reads worker 0's own accumulated gradient;
- TopK sums over workers, has no error feedback, and rounds K n down;
- PowerSGD drops Q at a change of level, and its residual at a change to dense;
- the order of the training data is the same in all epochs;
- SGD has plain momentum and a weight decay of 1e-4. For the LSTM it has no weight decay, and a step
  is g + m with m = 0.9 m + g. The nearest that torch has is Nesterov's g + 0.9 m with the same m:
  the steps along one gradient add up to 10 g in place of 11 g.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from regimes.base.config import RunConfig

_COMPRESSOR: dict[str, dict[str, Any]] = {
    "powersgd": {"reset_on_change": True},
    "topk": {"reduction": "sum", "error_feedback": False, "count": "truncate"},
}
_IMAGES: dict[str, Any] = {"nesterov": False, "weight_decay": 1e-4}
_LSTM: dict[str, Any] = {"nesterov": True, "weight_decay": 0.0}


def resolve_quirks(config: RunConfig) -> RunConfig:
    """Return the configuration with the fields that its ``quirks`` stand for."""
    if config.quirks == "none":
        return config
    extra = _COMPRESSOR.get(config.compressor.get("name", ""), {})
    sgd = _LSTM if config.model.name == "lstm" else _IMAGES
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, **sgd),
        signal="worker0",
        compressor={**config.compressor, **extra},
        data=dataclasses.replace(config.data, reshuffle=False),
    )
