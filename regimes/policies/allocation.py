"""L-GreCo: levels per layer that send the fewest floats at a given total error. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Annotated, Any

from regimes.config import Bounds
from regimes.config.bounds import Count
from regimes.errors import ConfigError, unexpected
from regimes.policies.base import Decision, Policy
from regimes.policies.history import History, PastEpoch, as_history, cost
from regimes.policies.ladders import Rungs

Table = Sequence[Sequence[float]]  # a row per layer, a column per level


def allocate(errors: Table, floats: Table, bound: float, bins: int = 10_000) -> list[int] | None:
    """The column of each row with the fewest floats whose errors sum to at most ``bound``, or None.

    L-GreCo's dynamic programme (Markov et al., MLSys 2024, section 3). Errors are rounded up to
    ``bins`` equal parts of the bound, so the result never exceeds it.
    """
    import numpy as np

    if bound < 0 or not math.isfinite(bound):
        return None
    fewest = np.zeros(bins + 1)  # floats of the layers so far, by the error that they may spend
    choices = []
    for row, costs in zip(errors, floats, strict=True):
        options = np.full((len(row), bins + 1), np.inf)
        for option, error, sent in zip(options, row, costs, strict=True):
            spent = _spent(error, bound, bins)
            if spent <= bins:
                option[spent:] = fewest[: bins + 1 - spent] + sent
        choices.append(options.argmin(0))
        fewest = options.min(0)
    if not np.isfinite(fewest[-1]):
        return None
    left, columns = bins, []
    for row, choice in zip(reversed(errors), reversed(choices), strict=True):
        columns.append(int(choice[left]))
        left -= _spent(row[columns[-1]], bound, bins)
    return columns[::-1]


def _spent(error: float, bound: float, bins: int) -> int:
    """How many bins an error fills; ``bins + 1`` beyond the bound."""
    if error == 0:
        return 0
    if not error <= bound:
        return bins + 1
    return math.ceil(error / bound * bins * (1 - 1e-12))


@dataclass(frozen=True)
class LGreCo(Rungs):
    """L-GreCo (Markov et al., MLSys 2024): levels by layer, for the summed error of another policy.

    After every ``interval`` epochs it takes the levels that send the fewest floats with a sum of
    the layers' errors of at most ``alpha`` times the sum at the levels of ``base``. A layer's error
    is the norm that its level loses, from the instrument ``error`` and the norm of its gradient
    over the epoch. Without errors the levels are those of ``base``. ACCORDION as ``base`` is the
    authors' combination of the two.

    Differences with the authors: they search all ranks from half to twice the base's, every 100
    steps, with the mean of the last 10 gradients; here it is ``levels``, at the end of a unit.

    Attributes:
        levels: from the highest compression to the lowest, with those of ``base``.
        base: a policy's table, or the object.
        alpha: from 1 up; for less error choose a base that sends more.
    """

    base: Any = field(default_factory=lambda: {"name": "static", "level": "mid"})
    alpha: Annotated[float, Bounds("a number from 1", low=1, below=inf)] = 1.0
    interval: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.rule.names) - set(self.levels):
            raise ConfigError(
                f"policy.base asks for level {min(unknown)!r}, which is not one of policy.levels "
                f"{list(self.levels)}"
            )

    @cached_property
    def rule(self) -> Policy:
        """``base`` as an object."""
        from regimes.policies import policy

        if isinstance(self.base, dict):
            return policy(self.base, "policy.base")
        if isinstance(self.base, Policy):
            return self.base
        raise unexpected("policy.base", self.base, "a table with a name")

    @property
    def needs(self) -> tuple[str, ...]:
        own = ("norm", *(f"error:{level}" for level in self.levels))
        return tuple(dict.fromkeys((*own, *self.rule.needs)))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        base = self._base(history, layers)
        if not history:
            return base
        if (len(history) - 1) % self.interval:
            return [Decision(level) for level in history[-1].levels]
        allocated = self._allocated(history[-1], base)
        return [allocated.get(i, decision) for i, decision in enumerate(base)]

    def _base(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """What ``base`` decides after a history with the levels that it decided itself."""

        def extend(past: History, epochs: Sequence[PastEpoch]) -> History:
            for epoch in epochs:
                levels = [d.level for d in self.rule.decide(past, layers)]
                past.append(replace(epoch, levels=levels))
            return past

        past = as_history(history).accumulate((self._base, *layers), History, extend)
        return self.rule.decide(past, layers)

    def _errors(self, last: PastEpoch, layer: int) -> list[float] | None:
        """The norm that each level loses of a layer's gradient; None where it is not measured."""
        norm = last.statistics.get("norm", [None] * (layer + 1))[layer]
        names = [f"error:{level}" for level in self.levels]
        shares = [last.statistics.get(name, [None] * (layer + 1))[layer] for name in names]
        if norm is None or any(share is None for share in shares):
            return None
        return [norm * math.sqrt(max(share or 0.0, 0.0)) for share in shares]

    def _allocated(self, last: PastEpoch, base: Sequence[Decision]) -> dict[int, Decision]:
        """By layer with errors; empty where no allocation within the bound sends less."""
        by_layer = {i: row for i in range(len(base)) if (row := self._errors(last, i)) is not None}
        errors = list(by_layer.values())
        floats = [[cost(last, level).floats[i] for level in self.levels] for i in by_layer]
        base_columns = [self.rung(base[i].level) for i in by_layer]
        bound = self.alpha * _total(errors, base_columns)
        columns = allocate(errors, floats, bound)
        if columns is None or _total(floats, columns) > _total(floats, base_columns):
            return {}
        why = {"rule": "allocation", "new": _total(errors, columns), "threshold": bound}
        return {
            i: Decision(self.levels[k], {**why, "base": base[i].level})
            for i, k in zip(by_layer, columns, strict=True)
        }


def _total(table: Table, columns: Sequence[int]) -> float:
    return sum(row[k] for row, k in zip(table, columns, strict=True))
