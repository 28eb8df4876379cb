"""Policies: the history of a run in, the next unit's levels out. No torch.

``detectors`` say whether a history is critical, ``replay`` asks policies and detectors of recorded
runs. This room uses records and base; job, instruments, presets and plotting use it.
"""

from __future__ import annotations

from typing import Any

from regimes.base.config import DENSE, Registry
from regimes.base.errors import ConfigError
from regimes.policies.base import Decision, Policy
from regimes.policies.by_layer import ByLayer
from regimes.policies.detected import Accordion, BatchAccordion, Detected
from regimes.policies.history import LevelCost, PastEpoch, read_history, whole_history
from regimes.policies.ladders import AdaQS, RateLadder
from regimes.policies.schedules import (
    QSR,
    PostLocal,
    Smith,
    Static,
    Windows,
)

__all__ = [
    "QSR",
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

REGISTRY = Registry(
    "policy",
    {
        "static": "regimes.policies:Static",
        "windows": "regimes.policies:Windows",
        "accordion": "regimes.policies:Accordion",
        "detected": "regimes.policies:Detected",
        "accordion-batch": "regimes.policies:BatchAccordion",
        "by-layer": "regimes.policies:ByLayer",
        "smith": "regimes.policies:Smith",
        "adaqs": "regimes.policies:AdaQS",
        "rate-ladder": "regimes.policies:RateLadder",
        "post-local": "regimes.policies:PostLocal",
        "qsr": "regimes.policies:QSR",
    },
    has=("needs", "names", "decide"),
)


def make_policy(table: dict[str, Any], where: str = "policy") -> Policy:
    """Make the policy that a configuration table names; raise ConfigError if the table names
    none."""
    return REGISTRY.make(table, where)


def check_levels(chosen: Policy, levels: dict[str, Any], where: str = "policy") -> None:
    """Raise ConfigError if a policy asks for a level that the run does not define."""
    prefix = where.removesuffix("policy")
    known = [*levels, *([] if prefix else [DENSE])]  # batches and periods have no dense level
    for name in chosen.names:
        if name not in known and not (prefix == "sync_" and name.isdecimal()):
            raise ConfigError(
                f"the {where} asks for level {name!r}, but [{prefix}levels] defines only "
                f"{', '.join(known) or 'none'}: add {prefix}levels.{name}"
            )
