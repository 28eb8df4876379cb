"""Policies: the history of a run in, the next unit's levels out. No torch.

``detectors`` say whether a history is critical, ``replay`` asks policies and detectors of recorded
runs. This room uses records and base; job, instruments, presets and plotting use it.
"""

from __future__ import annotations

from regimes.policies.base import Decision, Policy
from regimes.policies.by_layer import ByLayer
from regimes.policies.detected import Accordion, BatchAccordion, Detected
from regimes.policies.history import LevelCost, PastEpoch, read_history, whole_history
from regimes.policies.ladders import AdaQS, RateLadder
from regimes.policies.registry import REGISTRY, check_levels, make_policy
from regimes.policies.schedules import (
    QSR,
    PostLocal,
    Smith,
    Static,
    Windows,
)

__all__ = [
    "QSR",
    "REGISTRY",
    "Accordion",
    "AdaQS",
    "BatchAccordion",
    "ByLayer",
    "Decision",
    "Detected",
    "LevelCost",
    "PastEpoch",
    "Policy",
    "PostLocal",
    "RateLadder",
    "Smith",
    "Static",
    "Windows",
    "check_levels",
    "make_policy",
    "read_history",
    "whole_history",
]
