"""Policies by name, and what they ask of the levels of a run."""

from __future__ import annotations

from typing import Any

from regimes.base.config import DENSE, Registry
from regimes.base.errors import ConfigError
from regimes.policies.base import Policy

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
