"""Detectors of critical regimes: pure rules over the history of one statistic. No torch."""

# ruff: noqa: F401 -- the names of the room

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regimes.config import Registry
from regimes.detectors.base import Detector, Online, Verdict
from regimes.detectors.baselines import FirstShare, FixedWindows, RandomWindows
from regimes.detectors.change import (
    EigenvalueChange,
    NormChange,
    RelativeChange,
    SharpnessChange,
)
from regimes.detectors.fall import RelativeFall

REGISTRY = Registry(
    "detector",
    {
        "norm-change": "regimes.detectors.change:NormChange",
        "eigenvalue-change": "regimes.detectors.change:EigenvalueChange",
        "sharpness-change": "regimes.detectors.change:SharpnessChange",
        "change": "regimes.detectors.change:RelativeChange",
        "first-share": "regimes.detectors.baselines:FirstShare",
        "random-windows": "regimes.detectors.baselines:RandomWindows",
        "fixed-windows": "regimes.detectors.baselines:FixedWindows",
    },
    has=("statistic", "per_layer", "__call__"),
)


def make_detector(table: Mapping[str, Any], where: str | None = None) -> Detector:
    """The detector that a configuration table names, or ConfigError at ``where``."""
    return REGISTRY.make(table, where)
