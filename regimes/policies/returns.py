"""What a policy returns, checked, so that a wrong return is one sentence that names the policy. No
torch.

``checked`` is cheap enough for every decision of a replay; ``check_reasons`` is for a run, which
writes the reasons down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from regimes.errors import ConfigError
from regimes.policies.base import Decision, Policy

LARGEST = 2**23  # bytes of all reasons of a unit as JSON; a line of a record holds twice as many


def checked(
    policy: Policy, found: Any, layers: Sequence[str], *, periods: bool = False
) -> Sequence[Decision]:
    """``found`` itself, if it is a decision for each of the layers.

    Args:
        periods: a level may also be a whole number, as those of local steps are.

    Raises:
        ConfigError: it is something else, has another length, or asks for a level that is none of
            ``policy.names``; a reason is no table.
    """
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise _wrong(policy, f"{found!r:.60}", "a list of decisions")
    if len(found) != len(layers):
        raise _wrong(policy, f"{len(found)} decisions", f"one for each of {len(layers)} layers")
    names = {*policy.names}
    for layer, decision in zip(layers, found, strict=True):
        if not isinstance(decision, Decision):
            raise _wrong(policy, f"{decision!r:.60} for {layer}", "a Decision")
        level, why = decision.level, decision.why
        known = isinstance(level, str) and (level in names or (periods and level.isdecimal()))
        if not known:
            levels = ", ".join(policy.names)
            raise _wrong(policy, f"the level {level!r:.60} for {layer}", f"one of {levels}")
        if why is not None and not isinstance(why, dict):
            raise _wrong(policy, f"the reason {why!r:.60} for {layer}", "a table or None")
    return found


def check_reasons(policy: Policy, reasons: Sequence[dict[str, Any] | None]) -> None:
    """Raise ConfigError unless a record can hold the reasons of a unit."""
    try:
        size = len(json.dumps(reasons))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(policy, f"a reason that is no JSON ({error})", "plain types") from None
    if size > LARGEST:
        raise _wrong(policy, f"reasons of {size} bytes", f"at most {LARGEST} for all layers")


def _wrong(policy: Policy, got: str, expected: str) -> ConfigError:
    return ConfigError(f"the policy {type(policy).__name__} returned {got}, expected {expected}")
