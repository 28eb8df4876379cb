"""Detectors of critical regimes: pure rules over the history of one statistic. No torch."""

# ruff: noqa: F401 -- the names of the room

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regimes.base.config import Registry
from regimes.policies.detectors.base import Detector, Online, Verdict
from regimes.policies.detectors.baselines import FirstShare, FixedWindows, RandomWindows
from regimes.policies.detectors.change import (
    EigenvalueChange,
    NormChange,
    RelativeChange,
    SharpnessChange,
)
from regimes.policies.detectors.fall import RelativeFall

REGISTRY = Registry(
    "detector",
    {
        "norm-change": "regimes.policies.detectors.change:NormChange",
        "eigenvalue-change": "regimes.policies.detectors.change:EigenvalueChange",
        "sharpness-change": "regimes.policies.detectors.change:SharpnessChange",
        "change": "regimes.policies.detectors.change:RelativeChange",
        "first-share": "regimes.policies.detectors.baselines:FirstShare",
        "random-windows": "regimes.policies.detectors.baselines:RandomWindows",
        "fixed-windows": "regimes.policies.detectors.baselines:FixedWindows",
    },
    has=("statistic", "per_layer", "__call__"),
)


def make_detector(table: Mapping[str, Any], where: str | None = None) -> Detector:
    """Make the detector that a configuration table names; raise ConfigError at ``where`` if it
    names none."""
    return REGISTRY.make(table, where)
