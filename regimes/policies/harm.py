"""Levels by predicted harm: nothing is measured, the learning rates are known before. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from regimes.capabilities import LEVEL_BYTES, RATES_AHEAD
from regimes.config import Bounds
from regimes.config.bounds import NonNegative, Positive
from regimes.errors import ConfigError, require
from regimes.policies.allocation import Table, lost_norms
from regimes.policies.base import Decision, follow_level, start_level
from regimes.policies.history import Ahead, PastEpoch, as_history
from regimes.policies.ladders import Rungs

Rate = Annotated[float, Bounds("a number from 0 up", low=0)]


def spread_budget(harms: Table, costs: Table, budget: float) -> list[int] | None:
    """The column of each row with the least sum of harms and costs that sum to at most ``budget``.

    From the cheapest columns on, the step with the most harm saved per cost is taken while it fits,
    so that in the end the marginal harm per cost is the same in all rows, up to one step (Everett,
    1963). Among equal steps an earlier row comes first. No other choice of the same cost has
    less harm; of a budget between two such costs the rest is filled by later steps that fit.

    Args:
        harms, costs: a row for each unit or layer, a column for each level.

    Returns:
        None: the cheapest columns cost more.

    >>> costs = [[1, 2, 4], [1, 2, 4]]
    >>> spread_budget([[3, 1, 0], [3, 1, 0]], costs, 4)
    [1, 1]
    >>> spread_budget([[3, 1, 0], [6, 2, 0]], costs, 6)
    [1, 2]
    """
    columns = [
        min(range(len(row)), key=lambda k: (cost[k], row[k], k))
        for row, cost in zip(harms, costs, strict=True)
    ]
    left = budget - sum(cost[k] for cost, k in zip(costs, columns, strict=True))
    if left < -1e-9 * budget:
        return None
    steps = [
        (-saved, i, now, after)
        for i, (row, cost) in enumerate(zip(harms, costs, strict=True))
        for saved, now, after in _hull(row, cost, columns[i])
    ]
    for _, i, now, after in sorted(steps, key=lambda step: step[:2]):
        more = costs[i][after] - costs[i][now]
        if columns[i] == now and more <= left + 1e-9 * budget:
            columns[i], left = after, left - more
    return columns


def _hull(
    harms: Sequence[float], costs: Sequence[float], first: int
) -> list[tuple[float, int, int]]:
    """(harm saved per cost, column, next column): the lower convex hull from a column on."""
    found: list[tuple[float, int, int]] = []
    now = first
    while True:
        saved = [
            ((harms[now] - harms[k]) / (costs[k] - costs[now]), -costs[k], -k)
            for k in range(len(costs))
            if costs[k] > costs[now] and harms[k] < harms[now]
        ]
        if not saved:
            return found
        most, _, after = max(saved)
        found.append((most, now, -after))
        now = -after


@dataclass(frozen=True)
class LeastHarm(Rungs):
    """The levels over the run with the least predicted harm, of all that send so many bytes.

    The harm of a step at a level is ``c (rate / peak)^p``: an exponent of 1.7 with error feedback
    and of 0.5 without, as measured (docs/findings/law.md), and c the bytes of a dense step over the
    bytes of a step at the level, minus 1. Harms of steps are taken to add up. The levels of all
    units are chosen before the run, from its schedule of learning rates, such that the marginal
    harm per byte is the same in all of them (`spread_budget`). A level of an intermediate number of
    bytes then sends about ``rate^(p/2)``. Of two levels that send the same bytes, one without
    feedback, that is chosen above 0.49 of the peak rate.

    Attributes:
        levels: from the highest compression to the lowest, one or more.
        budget: bytes of the whole run: a share of the bytes at the level that sends most, or the
            name of a level, for as many as it sends throughout.
        exponent: of levels with error feedback.
        dropped_exponent, dropped_harm: the exponent of levels without, and their c as a multiple of
            what it is with feedback.
        harms: c of each level, in any unit, in place of the formula.
        rates: the learning rate of each unit, where nothing else knows it (a hook), in any unit. A
            run that is longer stays at the last unit's level.
        by_layer: within a unit levels differ between layers: those with the least sum of errors, of
            all that send at most the floats of the unit's level. A layer's error is L-GreCo's, of
            the unit before, times the level's part of the law; without errors all layers have the
            unit's level.
    """

    fewest: ClassVar[int] = 1

    budget: float | str = 0.5
    exponent: NonNegative = 1.7
    dropped_exponent: NonNegative = 0.5
    dropped_harm: Positive = 0.43  # 0.49^(1.7 - 0.5)
    harms: dict[str, NonNegative] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    by_layer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.budget, str) or 0 < self.budget <= 1
        require(good, "policy.budget", self.budget, "a share in (0, 1], or the name of a level")
        known = not self.harms or self.harms.keys() == set(self.levels)
        require(known, "policy.harms", self.harms, "a number for each level")
        good = not self.rates or (max(self.rates) > 0 and all(map(math.isfinite, self.rates)))
        require(good, "policy.rates", list(self.rates), "finite numbers, one of them above 0")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({LEVEL_BYTES} if self.rates else {LEVEL_BYTES, RATES_AHEAD})

    @property
    def needs(self) -> tuple[str, ...]:
        if not self.by_layer:
            return ()
        return ("norm", *(f"error:{level}" for level in self.levels))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        past = as_history(history)
        plan = past.accumulate(self._plan, lambda: self._plan(past.ahead), lambda made, _: made)
        unit = min(len(history), len(plan) - 1)
        level, rate = self.levels[plan[unit]], self._shares(past.ahead)[unit]
        if not history:
            return start_level(level, layers)
        decided = follow_level(level, {"rule": "harm", "new": rate}, history)
        if self.by_layer:
            decided = self._among_layers(history[-1], level, rate, past.ahead, decided)
        return decided

    def predicted(self, ahead: Ahead | None) -> list[tuple[str, float]]:
        """The level of each unit with its harm, in the unit of c times steps.

        Raises:
            ConfigError: rates or bytes are not known, or the budget is below what the highest
                compression sends.
        """
        columns, (harms, _) = self._plan(ahead), self._tables(ahead)
        return [(self.levels[k], row[k]) for k, row in zip(columns, harms, strict=True)]

    def _plan(self, ahead: Ahead | None) -> list[int]:
        """The column of each unit's level."""
        harms, costs = self._tables(ahead)
        assert ahead is not None
        sent = [ahead.costs[level].bytes for level in self.levels]
        if isinstance(self.budget, str):
            if self.budget not in ahead.costs:
                names = ", ".join(ahead.costs)
                require(False, "policy.budget", self.budget, f"a share, or one of {names}")
            one = ahead.costs[self.budget].bytes
        else:
            one = self.budget * max(sent)
        columns = spread_budget(harms, costs, one * sum(self._steps(ahead)))
        if columns is None:
            share = min(sent) / max(sent)
            raise ConfigError(
                f"policy.budget = {self.budget!r}: the highest compression throughout sends more "
                f"bytes, {share:.3g} of those of the level that sends most: raise it, or add a "
                "level"
            )
        return columns

    def _tables(self, ahead: Ahead | None) -> tuple[Table, Table]:
        """Harm and bytes of each unit at each level."""
        if ahead is None or not ahead.costs:
            raise ConfigError("the policy harm needs the bytes of a step at each level")
        shares, steps = self._shares(ahead), self._steps(ahead)
        factors = [self._factor(level, ahead) for level in self.levels]
        weights = [self._weights(share, ahead) for share in shares]
        harms = [
            [n * c * w for c, w in zip(factors, row, strict=True)]
            for n, row in zip(steps, weights, strict=True)
        ]
        return harms, [[n * ahead.costs[level].bytes for level in self.levels] for n in steps]

    def _factor(self, level: str, ahead: Ahead) -> float:
        """c of a level with feedback; what dropping multiplies it by is in ``_weights``."""
        if self.harms:
            return self.harms[level]
        return ahead.costs["dense"].bytes / ahead.costs[level].bytes - 1

    def _weights(self, share: float, ahead: Ahead) -> list[float]:
        """What the rate makes of each level's c."""
        dropped = 1.0 if self.harms else self.dropped_harm
        kept = share**self.exponent
        return [
            dropped * share**self.dropped_exponent if level in ahead.dropping else kept
            for level in self.levels
        ]

    def _shares(self, ahead: Ahead | None) -> list[float]:
        """The rate of each unit, as a share of the highest."""
        rates = self.rates or (() if ahead is None else ahead.rates)
        if not rates:
            raise ConfigError("policy.rates: the policy harm needs the learning rate of each unit")
        return [rate / max(rates) for rate in rates]

    def _steps(self, ahead: Ahead) -> Sequence[float]:
        units = len(self.rates or ahead.rates)
        return ahead.steps if len(ahead.steps) == units else [1.0] * units

    def _among_layers(
        self,
        last: PastEpoch,
        level: str,
        rate: float,
        ahead: Ahead | None,
        decided: Sequence[Decision],
    ) -> list[Decision]:
        """The decisions of a unit by the layers' errors in the one before."""
        assert ahead is not None
        errors = {i: row for i in range(len(decided)) if (row := lost_norms(last, i, self.levels))}
        weights = self._weights(rate, ahead)
        harms = [[e * w for e, w in zip(row, weights, strict=True)] for row in errors.values()]
        costs = [[ahead.costs[name].floats[i] for name in self.levels] for i in errors]
        budget = sum(ahead.costs[level].floats[i] for i in errors)
        columns = spread_budget(harms, costs, budget) or []
        why: Mapping[str, Any] = {"rule": "harm", "new": rate, "base": level}
        chosen = {
            i: Decision(self.levels[k], dict(why)) for i, k in zip(errors, columns, strict=False)
        }
        return [chosen.get(i, decision) for i, decision in enumerate(decided)]
