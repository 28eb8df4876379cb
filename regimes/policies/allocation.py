"""Levels allocated over layers: the fewest floats for the error of another policy. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from regimes.errors import ConfigError, require, unexpected
from regimes.policies.base import Decision, Policy
from regimes.policies.history import History, PastEpoch, as_history, cost
from regimes.policies.ladders import Rungs

Table = Sequence[Sequence[float]]  # a row per layer, a column per level


def allocate(errors: Table, floats: Table, bound: float, bins: int = 10_000) -> list[int] | None:
    """The column of each row, so that the floats are fewest and the errors sum to ``bound`` at
    most; None if there is none.

    L-GreCo's dynamic programme (Markov et al., MLSys 2024, section 3): errors are rounded up to
    ``bins`` equal parts of the bound, so that what it finds keeps within it.
    """
    import numpy as np

    if bound < 0 or not math.isfinite(bound):
        return None
    least = np.zeros(bins + 1)  # floats of the layers so far, by the error that they may spend
    choices = []
    for row, costs in zip(errors, floats, strict=True):
        options = np.full((len(row), bins + 1), np.inf)
        for option, error, sent in zip(options, row, costs, strict=True):
            spent = _spent(error, bound, bins)
            if spent <= bins:
                option[spent:] = least[: bins + 1 - spent] + sent
        choices.append(options.argmin(0))
        least = options.min(0)
    if not np.isfinite(least[-1]):
        return None
    left, found = bins, []
    for row, choice in zip(reversed(errors), reversed(choices), strict=True):
        found.append(int(choice[left]))
        left -= _spent(row[found[-1]], bound, bins)
    return found[::-1]


def _spent(error: float, bound: float, bins: int) -> int:
    """How many bins an error fills; more than there are where it is beyond the bound."""
    if error == 0:
        return 0
    if not error <= bound:
        return bins + 1
    return math.ceil(error / bound * bins * (1 - 1e-12))


@dataclass(frozen=True)
class LGreCo(Rungs):
    """L-GreCo (Markov et al., MLSys 2024): levels by layer, for the summed error of another policy.

    After every ``interval`` epochs the levels that send the fewest floats are sought, such that
    the layers' errors sum to ``alpha`` times what they would sum to at the levels that ``base``
    asks for; a layer's error is the norm of what its level loses, from the instrument ``error``
    and the norm of its gradient over the epoch. Before there are errors the levels are those of
    ``base``. With ACCORDION as ``base`` this is the authors' combination of the two.

    Differences with the authors: they seek among all ranks from half to twice the base's, every
    100 steps, in the mean of the last 10 gradients; here it is among ``levels`` and at the end of
    a unit.

    Attributes:
        levels: from the highest compression to the lowest; those of ``base`` among them.
        base: a policy's table, or the object.
        alpha: from 1 up: for less error choose a base that sends more.
    """

    base: Any = field(default_factory=lambda: {"name": "static", "level": "mid"})
    alpha: float = 1.0
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.alpha < math.inf, "policy.alpha", self.alpha, "a number from 1")
        require(self.interval >= 1, "policy.interval", self.interval, "at least 1 epoch")
        if strange := set(self.rule.names) - set(self.levels):
            raise ConfigError(
                f"policy.base asks for level {min(strange)!r}, which is not one of policy.levels "
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
        last = history[-1]
        known = [i for i in range(len(layers)) if self._errors(last, i) is not None]
        found = self._allocated(last, base, known)
        return [found.get(i, decision) for i, decision in enumerate(base)]

    def _base(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """What ``base`` decides, which keeps levels of its own."""

        def extend(past: History, epochs: Sequence[PastEpoch]) -> History:
            for epoch in epochs:
                levels = [d.level for d in self.rule.decide(past, layers)]
                past.append(replace(epoch, levels=levels))
            return past

        past = as_history(history).accumulate((self._base, *layers), History, extend)
        return self.rule.decide(past, layers)

    def _errors(self, last: PastEpoch, layer: int) -> list[float] | None:
        """What each level loses of a layer's gradient; None where that is not known."""
        norm = last.statistics.get("norm", [None] * (layer + 1))[layer]
        names = [f"error:{level}" for level in self.levels]
        shares = [last.statistics.get(name, [None] * (layer + 1))[layer] for name in names]
        if norm is None or any(share is None for share in shares):
            return None
        return [norm * math.sqrt(max(share or 0.0, 0.0)) for share in shares]

    def _allocated(
        self, last: PastEpoch, base: Sequence[Decision], known: Sequence[int]
    ) -> dict[int, Decision]:
        """By layer; those of ``base`` where nothing else keeps within the bound for less."""
        errors = [self._errors(last, i) or [] for i in known]
        floats = [[cost(last, level).floats[i] for level in self.levels] for i in known]
        asked = [self.rung(base[i].level) for i in known]
        bound = self.alpha * sum(row[k] for row, k in zip(errors, asked, strict=True))
        found = allocate(errors, floats, bound)
        if found is None or _total(floats, found) > _total(floats, asked):
            return {}
        why = {"rule": "allocation", "new": _total(errors, found), "threshold": bound}
        return {
            i: Decision(self.levels[k], {**why, "base": base[i].level})
            for i, k in zip(known, found, strict=True)
        }


def _total(table: Table, columns: Sequence[int]) -> float:
    return sum(row[k] for row, k in zip(table, columns, strict=True))
