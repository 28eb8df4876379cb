"""L-GreCo and GraVAC, which weigh a level's error against its traffic. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Annotated, Any, Literal

from regimes.base.capabilities import declared_needs
from regimes.base.config import DENSE, Bounds
from regimes.base.config.bounds import Count
from regimes.base.errors import ConfigError, RecordError, require, unexpected_value
from regimes.policies.base import Decision, Policy, start_level
from regimes.policies.history import History, LevelCost, PastEpoch, as_history
from regimes.policies.ladders import Rungs

Table = Sequence[Sequence[float]]  # a row per layer, a column per level
Gains = list[float | None]  # of a level, smoothed, after each epoch; None before a measurement
ShareAboveZero = Annotated[float, Bounds("a share above 0, up to 1", above=0, high=1)]


def allocate_levels(
    errors: Table, floats: Table, bound: float, bins: int = 10_000
) -> list[int] | None:
    """The column of each row with the fewest floats and errors that sum to at most ``bound``, or
    None.

    L-GreCo's dynamic programme (Markov et al., MLSys 2024). Errors are rounded up to
    ``bins`` equal parts of the bound, so the result never exceeds it.
    """
    import numpy as np

    if bound < 0 or not math.isfinite(bound):
        return None
    spent = [[_spent(error, bound, bins) for error in row] for row in errors]
    # after so many layers, the floats of these, by the error that they may spend
    fewest = np.empty((len(spent) + 1, bins + 1))
    fewest[0] = 0.0
    sums = np.empty(bins + 1)
    for before, after, row, costs in zip(fewest[:-1], fewest[1:], spent, floats, strict=True):
        # `here` and `option` are views: with s bins spent, floats move up by s places
        least, *others = sorted(zip(row, costs, strict=True))
        after[: least[0]], here = np.inf, after[least[0] :]
        np.add(before[: len(here)], least[1], out=here)
        for bins_spent, sent in others:
            option, here = sums[bins_spent:], after[bins_spent:]
            np.add(before[: len(here)], sent, out=option)
            np.minimum(here, option, out=here)
    if not np.isfinite(fewest[-1, -1]):
        return None
    # back from the last layer: the option that gave the fewest floats with what is left to spend
    left, columns = bins, []
    for before, row, costs in zip(fewest[-2::-1], spent[::-1], floats[::-1], strict=True):
        options = [
            before[left - s] + x if s <= left else inf for s, x in zip(row, costs, strict=True)
        ]
        columns.append(options.index(min(options)))
        left -= row[columns[-1]]
    return columns[::-1]


def _spent(error: float, bound: float, bins: int) -> int:
    """How many bins an error fills; ``bins + 1`` beyond the bound."""
    if error == 0:
        return 0
    if not error <= bound:
        return bins + 1
    return math.ceil(error / bound * bins * (1 - 1e-12))  # a quotient may round to above a bin


def lost_norms(past: PastEpoch, layer: int, levels: Sequence[str]) -> list[float] | None:
    """The norm that each level has lost of a layer's gradient; None where it is not measured."""
    norm = past.value("norm", layer)
    shares = [past.value(f"error:{level}", layer) for level in levels]
    if norm is None or None in shares:
        return None
    return [norm * math.sqrt(max(share or 0.0, 0.0)) for share in shares]


def level_cost(past: PastEpoch, level: str) -> LevelCost:
    """What a step sends at a level; RecordError where the record does not say."""
    if level not in past.costs:
        raise RecordError(f"the record does not say what a step sends at level {level!r}")
    return past.costs[level]


@dataclass(frozen=True)
class LGreCo(Rungs):
    """L-GreCo (Markov et al., MLSys 2024): levels by layer, for the summed error of another policy.

    After every ``interval`` epochs it takes the levels that send the fewest floats with a sum of
    the layers' errors of at most ``alpha`` times the sum at the levels of ``base``. A layer's error
    is the norm that its level loses, from the instrument ``error`` and the norm of its gradient
    over the epoch. Without errors ``base`` gives the levels. ACCORDION as ``base`` is the
    authors' combination of the two.

    Differences with the authors: they search all ranks from half to twice the base's, every 100
    steps, with the mean of the last 10 gradients; here it is ``levels``, at the end of a unit.

    Attributes:
        levels: from the highest compression to the lowest, with the levels of ``base``.
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
        from regimes.policies import make_policy

        if isinstance(self.base, dict):
            return make_policy(self.base, "policy.base")
        if isinstance(self.base, Policy):
            return self.base
        raise unexpected_value("policy.base", self.base, "a table with a name")

    @property
    def requires(self) -> frozenset[str]:
        return declared_needs(self.rule)

    @property
    def needs(self) -> tuple[str, ...]:
        own = ("norm", *(f"error:{level}" for level in self.levels))
        return tuple(dict.fromkeys((*own, *self.rule.needs)))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        base = self._decide_base(history, layers)
        if not history:
            return base
        if (len(history) - 1) % self.interval:
            return [Decision(level) for level in history[-1].levels]
        allocated = self._allocate_layers(history[-1], base)
        return [allocated.get(i, decision) for i, decision in enumerate(base)]

    def _decide_base(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        """The decisions of ``base`` after this history, had the run used the levels of ``base``."""

        def extend(past: History, epochs: Sequence[PastEpoch]) -> History:
            for epoch in epochs:
                levels = [d.level for d in self.rule.decide(past, layers)]
                past.append(replace(epoch, levels=levels))
            return past

        known = as_history(history)
        key = (self._decide_base, *layers)
        past = known.accumulate(key, History, extend)
        return self.rule.decide(past, layers)

    def _allocate_layers(self, last: PastEpoch, base: Sequence[Decision]) -> dict[int, Decision]:
        """The decision for each layer with known errors; empty where no allocation within the
        bound sends less."""
        by_layer = {i: row for i in range(len(base)) if (row := lost_norms(last, i, self.levels))}
        errors = list(by_layer.values())
        floats = [[level_cost(last, level).floats[i] for level in self.levels] for i in by_layer]
        base_columns = [self.rung(base[i].level) for i in by_layer]
        bound = self.alpha * _total(errors, base_columns)
        columns = allocate_levels(errors, floats, bound)
        if columns is None or _total(floats, columns) > _total(floats, base_columns):
            return {}
        why = {"rule": "allocation", "new": _total(errors, columns), "threshold": bound}
        return {
            i: Decision(self.levels[k], {**why, "base": base[i].level})
            for i, k in zip(by_layer, columns, strict=True)
        }


def _total(table: Table, columns: Sequence[int]) -> float:
    return sum(row[k] for row, k in zip(table, columns, strict=True))


@dataclass(frozen=True)
class GraVAC(Rungs):
    """GraVAC (Tyagi & Swany, IEEE CLOUD 2023), for the whole model.

    The gain of a level is the share of the gradient's norm that it sends, summed over layers and
    smoothed over epochs. The search starts at the lowest compression and tries the next level every
    ``interval`` epochs, until the two best products of throughput and gain differ by less than
    ``tolerance`` (see ``stopping``), or no level is left; then the best level stays. An epoch uses
    the level of the search if its gain is at least ``gain``, else the lowest compression if its
    gain is, else dense.

    Differences with the authors: they smooth by steps (0.05, windows of 25 steps) and include error
    feedback in the gain. Here the gain is the mean gradient's, from the instrument ``error`` and
    the norm over an epoch: a level sends sqrt(1 - error) of a layer's norm, as projections and TopK
    do. Recorded tournaments used "best", so the authors' ``stopping`` is not the default.

    Attributes:
        levels: from the highest compression to the lowest.
        seconds: of a step by level, as measured or as ``regimes cost`` predicts for a network;
            without them throughput is one over the bytes of a step.
        smoothing: the weight of the latest epoch in the gain.
        stopping: "best" divides the difference of the two best products by the best, which stays;
            "authors" divides it by the second best, and the more compressed of the two stays.
    """

    gain: ShareAboveZero = 0.75
    tolerance: Annotated[float, Bounds("a share below 1", low=0, below=1)] = 0.05
    interval: Count = 1
    smoothing: ShareAboveZero = 0.5
    seconds: dict[str, float] = field(default_factory=dict)
    stopping: Literal["best", "authors"] = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = all(0 < value < inf for value in self.seconds.values())
        good = not self.seconds or (positive and self.seconds.keys() == set(self.levels))
        require(good, "policy.seconds", self.seconds, "a positive number for each level")

    @property
    def names(self) -> tuple[str, ...]:
        return (DENSE, *reversed(self.levels))

    @property
    def needs(self) -> tuple[str, ...]:
        return ("norm", *(f"error:{level}" for level in self.levels))

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            return start_level(self.levels[-1], layers)
        history = as_history(history)
        gains = {level: self._gains(history, level) for level in self.levels}
        tried = self._search(history, gains)
        last = {level: values[-1] or 0.0 for level, values in gains.items()}
        level = next((x for x in (tried, self.levels[-1]) if last[x] >= self.gain), DENSE)
        why = {"rule": "gain", "new": last[tried], "threshold": self.gain, "level": tried}
        return [Decision(level, why)] * len(layers)

    def _gains(self, history: Sequence[PastEpoch], level: str) -> Gains:
        def extend(gains: Gains, epochs: Sequence[PastEpoch]) -> Gains:
            for past in epochs:
                now, share = _gain(past, f"error:{level}"), self.smoothing
                before = gains[-1] if gains else None
                if now is not None and before is not None:
                    now = (1 - share) * before + share * now
                gains.append(before if now is None else now)
            return gains

        return as_history(history).accumulate((self._gains, level), list, extend)

    def _search(self, history: Sequence[PastEpoch], gains: dict[str, Gains]) -> str:
        """The level that the search tries in the next epoch, or ended at."""
        order, authors = self.levels[::-1], self.stopping == "authors"
        products: list[float] = []
        for tried, level in enumerate(order, start=1):
            last = tried * self.interval - 1  # the last epoch of the level's trial
            if last >= len(history):
                return level
            gain = gains[level][last] or 0.0
            one_step = (
                self.seconds[level] if self.seconds else level_cost(history[last], level).bytes
            )
            products.append(1 / one_step * gain)  # in any unit, because only ratios count
            best, *rest = sorted(range(tried), key=lambda i: -products[i])
            if rest:
                high, second = products[best], products[rest[0]]
                if high - second < self.tolerance * (second if authors else high):
                    return order[max(best, rest[0]) if authors else best]
        return order[products.index(max(products))]


def _gain(past: PastEpoch, name: str) -> float | None:
    """The share of the gradient's norm that a level sends; None where not measured."""
    norms, errors = past.statistics.get("norm", []), past.statistics.get(name, [])
    pairs = zip(norms, errors, strict=False)
    known = [(norm, error) for norm, error in pairs if norm is not None and error is not None]
    total = sum(norm for norm, _ in known)
    if not total:
        return None
    return sum(norm * math.sqrt(max(1 - error, 0.0)) for norm, error in known) / total
