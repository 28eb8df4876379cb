"""``quirks = "authors"``: do what the published code does where it differs from the paper.

Every quirk is an ordinary field of the configuration; this module only sets them together:

- the detector reads worker 0's own accumulated gradient;
- TopK sums over workers and has no error feedback;
- PowerSGD forgets Q at a change of level, and its residual at a change to dense;
- the order of the training data is the same in all epochs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from regimes.config import RunConfig

COMPRESSOR: dict[str, dict[str, Any]] = {
    "powersgd": {"reset_on_change": True},
    "topk": {"reduction": "sum", "error_feedback": False},
}


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with its quirks spelt out as fields."""
    if config.quirks == "none":
        return config
    extra = COMPRESSOR.get(config.compressor.get("name", ""), {})
    return dataclasses.replace(
        config,
        signal="worker0",
        compressor={**config.compressor, **extra},
        data=dataclasses.replace(config.data, reshuffle=False),
    )
