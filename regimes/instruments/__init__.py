"""Instruments: what is measured during training, without a trace on the run.

``hessian`` has the Hessian of a probe loss. This room uses compression and policies; job and
training use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regimes.base.config import Registry
from regimes.instruments.base import Instrument

REGISTRY = Registry(
    "instrument",
    {
        "norms": "regimes.instruments.gradient_norm:Norms",
        "curvature": "regimes.instruments.curvature:Curvature",
        "fisher": "regimes.instruments.curvature:Fisher",
        "sharpness": "regimes.instruments.curvature:Sharpness",
        "noise": "regimes.instruments.noise:Noise",
        "msdr": "regimes.instruments.noise:Msdr",
        "error": "regimes.instruments.compression_loss:CompressionLoss",
        "residual": "regimes.instruments.residual:Residual",
        "cosine": "regimes.instruments.cosine:Cosine",
        "spread": "regimes.instruments.noise:Spread",
        "overlap": "regimes.instruments.support_overlap:Overlap",
    },
    has=("every", "start"),
)


def make_instruments(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Instrument]:
    """Make the instruments that a configuration's tables name; ConfigError if one is none."""
    return {
        name: REGISTRY.make({"name": name, **fields}, f"instruments.{name}")
        for name, fields in tables.items()
    }
