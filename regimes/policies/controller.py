"""Decides levels from the history of a run, for the trainer, the DDP hook and the replay. No torch.

A policy decides the compressed layers; all other layers have the level "dense".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from regimes.base.config import DENSE
from regimes.base.errors import ConfigError
from regimes.policies.base import Decision, Policy
from regimes.policies.history import Costs, PastEpoch, Reader, past_epoch, whole_epoch

LARGEST = 2**23  # bytes of all reasons of a unit as JSON; a line of a record holds twice as many

Row = Mapping[str, Any]
Reason = dict[str, Any] | None


@dataclass(frozen=True)
class Levels:
    """Holds what was decided for an epoch.

    Attributes:
        names: the level of every layer.
        why: the reason of each; None where the level stays or is always dense.
        decisions: of the compressed layers, by index.
    """

    names: list[str]
    why: list[Reason]
    decisions: dict[int, Decision]


@dataclass(frozen=True)
class Controller:
    """Applies a policy to the layers of one run.

    Attributes:
        layers: the names of all layers.
        compressed: the indices of those that the policy decides.
        signal: which norm the policy reads as "norm".
        costs: what a step sends at each level.
        reader: caches the past epochs from one decision to the next.
    """

    policy: Policy
    layers: Sequence[str]
    compressed: Sequence[int]
    signal: str
    costs: Costs = field(default_factory=dict)
    reader: Reader = field(default_factory=Reader, init=False, repr=False, compare=False)

    def decide(self, rows: Sequence[Row]) -> Levels:
        """Decide the levels of epoch ``len(rows)`` from the record's rows."""
        signal, costs = self.signal, self.costs
        read = partial(past_epoch, compressed=self.compressed, signal=signal, costs=costs)
        return self.decide_after(self.reader.history(rows, read))

    def decide_after(self, past: Sequence[PastEpoch]) -> Levels:
        """Decide the levels of the epoch after these."""
        names = [self.layers[i] for i in self.compressed]
        decided = check_decisions(self.policy, self.policy.decide(past, names), names)
        decisions = dict(zip(self.compressed, decided, strict=True))
        every = [decisions.get(i, Decision(DENSE)) for i in range(len(self.layers))]
        return Levels([d.level for d in every], [d.why for d in every], decisions)


@dataclass(frozen=True)
class ModelController:
    """Applies a policy to the whole model as its only layer.

    Attributes:
        signal: which norm it reads as "norm".
        table: what its levels are: sizes of the batch, or periods between synchronisations.
        reader: caches the past epochs from one decision to the next.
    """

    policy: Policy
    signal: str
    table: Literal["batch", "sync"]
    reader: Reader = field(default_factory=Reader, init=False, repr=False, compare=False)

    def decide(self, rows: Sequence[Row]) -> Decision:
        """Decide the level of epoch ``len(rows)`` from the record's rows."""
        read = partial(whole_epoch, signal=self.signal, table=self.table)
        decided = self.policy.decide(self.reader.history(rows, read), [self.table])
        return check_decisions(self.policy, decided, [self.table], periods=self.table == "sync")[0]


def check_decisions(
    policy: Policy, decided: Any, layers: Sequence[str], *, periods: bool = False
) -> Sequence[Decision]:
    """Return ``decided`` itself, if it is a decision for each layer. A replay calls this at every
    epoch.

    Args:
        periods: a level may also be a whole number, as in local steps.

    Raises:
        ConfigError: another type or length, a level outside ``policy.names``, a reason that is no
            table.
    """
    if not isinstance(decided, Sequence) or isinstance(decided, str):
        raise _wrong(policy, f"{decided!r:.60}", "a list of decisions")
    if len(decided) != len(layers):
        raise _wrong(policy, f"{len(decided)} decisions", f"one for each of {len(layers)} layers")
    names = {*policy.names}
    for layer, decision in zip(layers, decided, strict=True):
        if not isinstance(decision, Decision):
            raise _wrong(policy, f"{decision!r:.60} for {layer}", "a Decision")
        level, why = decision.level, decision.why
        known = isinstance(level, str) and (level in names or (periods and level.isdecimal()))
        if not known:
            levels = ", ".join(policy.names)
            raise _wrong(policy, f"the level {level!r:.60} for {layer}", f"one of {levels}")
        if why is not None and not isinstance(why, dict):
            raise _wrong(policy, f"the reason {why!r:.60} for {layer}", "a table or None")
    return decided


def check_reasons(policy: Policy, reasons: Sequence[Reason]) -> None:
    """Raise ConfigError unless a record can hold the reasons of a unit."""
    try:
        size = len(json.dumps(reasons))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(policy, f"a reason that is no JSON ({error})", "plain types") from None
    if size > LARGEST:
        raise _wrong(policy, f"reasons of {size} bytes", f"at most {LARGEST} for all layers")


def _wrong(policy: Policy, got: str, expected: str) -> ConfigError:
    return ConfigError(f"the policy {type(policy).__name__} returned {got}, expected {expected}")
