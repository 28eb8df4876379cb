"""Decides levels from the history of a run: the one that trainer, DDP hook and replay share.

A policy sees the compressed layers only; the controller knows all layers, gives the others the
level "dense", and keeps the reason of each decision. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from regimes.config import DENSE
from regimes.policies.base import Decision, Policy
from regimes.policies.history import Costs, PastEpoch, Reader, past_epoch, whole_epoch
from regimes.policies.returns import checked

Row = Mapping[str, Any]
Rows = Sequence[Row]


@dataclass(frozen=True)
class Levels:
    """What was decided for an epoch.

    Attributes:
        names: the level of every layer.
        why: the reason of each, None where a level was kept or is always dense.
        decisions: of the compressed layers, by index.
    """

    names: list[str]
    why: list[dict[str, Any] | None]
    decisions: dict[int, Decision]


@dataclass(frozen=True)
class Controller:
    """A policy over the layers of one run.

    Attributes:
        layers: the names of all layers.
        compressed: the indices of those that the policy decides.
        signal: which norm the policy reads as "norm".
        costs: what a step sends at each level.
        reader: of the rows, which grow from decision to decision.
    """

    policy: Policy
    layers: Sequence[str]
    compressed: Sequence[int]
    signal: str
    costs: Costs = field(default_factory=dict)
    reader: Reader = field(default_factory=Reader, init=False, repr=False, compare=False)

    def decide(self, rows: Rows) -> Levels:
        """The levels of epoch ``len(rows)``, from the record's rows."""
        return self.decide_after(self.reader.history(rows, self._read))

    def _read(self, row: Row) -> PastEpoch:
        return past_epoch(row, self.compressed, self.signal, self.costs)

    def decide_after(self, past: Sequence[PastEpoch]) -> Levels:
        """The same from epochs as a policy sees them."""
        names = [self.layers[i] for i in self.compressed]
        found = checked(self.policy, self.policy.decide(past, names), names)
        decisions = dict(zip(self.compressed, found, strict=True))
        every = [decisions.get(i, Decision(DENSE)) for i in range(len(self.layers))]
        return Levels([d.level for d in every], [d.why for d in every], decisions)


@dataclass(frozen=True)
class WholeController:
    """A policy whose only layer is the whole model.

    Attributes:
        signal: which norm it reads as "norm".
        table: of what its levels are: of the batch, or of the period between synchronisations.
        reader: of the rows, which grow from decision to decision.
    """

    policy: Policy
    signal: str
    table: Literal["batch", "sync"]
    reader: Reader = field(default_factory=Reader, init=False, repr=False, compare=False)

    def decide(self, rows: Rows) -> Decision:
        """The level in epoch ``len(rows)``, from the record's rows."""
        past = self.reader.history(rows, self._read)
        found = self.policy.decide(past, [self.table])
        return checked(self.policy, found, [self.table], periods=self.table == "sync")[0]

    def _read(self, row: Row) -> PastEpoch:
        return whole_epoch(row, self.signal, self.table)
