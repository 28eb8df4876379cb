"""The decays of a run's learning rate: from its configuration, or from its rates. No torch."""

from __future__ import annotations

import math
from collections import Counter

from regimes.policies import history
from regimes.policies.base import FollowsDecays
from regimes.records import Record, length


def decays(run: Record) -> list[tuple[int, float]]:
    """The units of a run that are the first at a lower learning rate, and the factor by which it
    falls (infinity: to zero). A trainer's step schedule gives the configured ones; a user's own
    training, whose schedule is not known, those that the policies see in its rates."""
    if run.hooked:
        seen = FollowsDecays().decays(history(run.rows, [], run.config["signal"]))
        known = [(first, old, new) for first, old, new in seen if first < len(run.rows)]
        return [(first, old / new if new else math.inf) for first, old, new in known]
    factor = run.config["optimizer"].get("decay_factor")
    factor = 1.0 if factor is None else float(factor)
    return [(first, _power(factor, times)) for first, times in Counter(_configured(run)).items()]


def decay_epochs(run: Record) -> tuple[int, ...]:
    """The units that are the first at a lower learning rate."""
    return tuple(first for first, _ in decays(run))


def _power(factor: float, times: int) -> float:
    try:
        return factor**times
    except OverflowError:
        return math.inf


def _configured(run: Record) -> list[int]:
    """Of a step schedule, the first unit that begins at or behind each decay: a unit within which
    the rate falls began at the old rate."""
    optimizer, per_epoch = run.config["optimizer"], run.header.get("steps_per_epoch") or 1
    if optimizer.get("schedule", "step") != "step":
        return []
    steps = [*(optimizer.get("decay_steps") or ())]
    steps += [first * per_epoch for first in optimizer.get("decay_epochs") or ()]
    size = run.config.get("unit_steps") or per_epoch
    units = [-(-step // size) for step in sorted(steps)]
    return [first for first in units if first < length(run.header, run.rows)]
