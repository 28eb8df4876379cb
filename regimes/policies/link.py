"""Levels that follow the link: so many bytes that little of a step is exposed communication.

The pure part: what past units say of the link, and the level that follows. What measures or
predicts a unit's seconds is ``job.link``. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from regimes.capabilities import (
    LEVEL_BYTES,
    LINK_SECONDS,
    OWN_COLLECTIVES,
    WORKERS_OF_A_UNIT,
    declared_needs,
)
from regimes.config.bounds import InnerShare, NonNegative
from regimes.errors import ConfigError, require
from regimes.policies.base import Decision, follow_level, start_level
from regimes.policies.history import History, PastEpoch, as_history, level_cost
from regimes.policies.ladders import Rungs

CONFIRM = 3  # units whose medians are read: one that was disturbed decides nothing
HOLD = 20  # units from a change to the next one, on a link that stays as it is
CHANGED = 2.0  # the link is another one when an exchange takes so many times as long, or less
MATERIAL = 0.25  # and when the difference is such a share of the seconds that may be exposed
ROOM = 0.8  # of what may be exposed: a level that is not in use must be predicted to stay below
MOVING = 0.1  # at least such a share of an exchange grows with its bytes, whatever was measured
KNOWN = 100  # units for which an exchange that was measured at a level is expected to be the same
HIDES = 2 / 3  # of a step's computation, until it was seen: the backward pass, as in `network`
SEEN = 0.05  # what is exposed, of an exchange, from which on it tells what a step can hide


class Reading(NamedTuple):
    """Where the seconds of a unit's mean step went.

    Attributes:
        compute: of the slowest process, compression included.
        exposed: waited for the exchange beside that.
        exchange: in collectives, also while gradients were computed.
        latency: of ``exchange``, what would remain without its bytes.
    """

    compute: float
    exposed: float
    exchange: float
    latency: float


@dataclass
class _Seen:
    """What the units at the present level have shown.

    Attributes:
        level: of the last unit.
        first: the level of the first unit is still in use.
        units: since the level began.
        recent: the last readings, at most `CONFIRM`.
        reference: seconds of an exchange when the level began; None: not yet known.
        hidden: seconds of an exchange that a step has hidden, at any level; None: not yet seen.
        total: units so far.
        measured: the last exchange of each level on this link, and the unit that it was.
    """

    level: str = ""
    first: bool = True
    units: int = 0
    recent: list[Reading] = field(default_factory=list)
    reference: float | None = None
    hidden: float | None = None
    total: int = 0
    measured: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def exchanges(self) -> dict[str, float]:
        """Seconds of an exchange at each level that was measured not long ago."""
        recent = self.total - KNOWN
        return {level: value for level, (unit, value) in self.measured.items() if unit >= recent}

    @property
    def now(self) -> Reading:
        return Reading(*map(median, zip(*self.recent, strict=True)))


@dataclass(frozen=True)
class LinkLadder(Rungs):
    """The least compression at which a step waits for its bytes at most for a share of its seconds.

    *Reads.* Of each unit, the seconds that its mean step computed, waited for the exchange, and was
    in collectives, and what of these would remain without bytes (`Reading`); all processes have the
    same numbers. Medians over the last three units at a level count.

    *Predicts.* Another level's exchange takes as long as it did when it was last measured on this
    link, in the last 100 units. Otherwise it takes as long as the present one, except that the part
    that moves bytes grows with the bytes of a step at each level; a period's grows with the number
    of synchronisations. A step hides as much of it as it was seen to hide. What a step would wait
    without bytes, no level saves, so it is no reason against one: the shortest exchange of any
    level on this link bounds it. The run has the last of ``levels`` whose bytes are waited for
    at most ``exposed`` of the step, and 0.8 of that for a level that is not in use; none: the
    first of ``levels``, at which a run begins.

    *Waits.* From a change to the next one there are 20 units, unless the exchange takes twice as
    long as when the level began, or half as long: then the link is another one, and the level
    follows as soon as two of the last three units show it. An exchange whose seconds stay within a
    factor of 1.4 of their middle therefore changes the level at most once in 20 decisions.

    In a simulation nothing is sent. ``trace`` then says what link each worker has, and ``compute``
    how long a step computes; the seconds are those that `regimes cost` predicts for a ring. A trace
    goes from one of its links to the next as the predicted seconds pass, and begins again at its
    end. With a trace nothing is measured on processes either.

    Attributes:
        levels: from the highest compression to the lowest; of a ``sync_policy``, periods in steps,
            from the longest to the shortest: ``("64", "16", "4")``.
        exposed: of a step's seconds, those that it may wait for bytes.
        trace: (seconds that it lasts, Mbit/s, ms of latency) of one link after the other.
        compute: seconds of a step's computation, beside a trace.

    Raises:
        ConfigError: a trace without ``compute``, or the reverse; a link that there cannot be; at
            the first decision, levels that are not in the order of their bytes.
    """

    exposed: InnerShare = 0.1
    trace: tuple[tuple[float, float, float], ...] = ()
    compute: NonNegative = 0.0
    needs: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trace:
            require(self.compute == 0, "policy.compute", self.compute, "none without policy.trace")
            return
        expected = "seconds of a step's computation, beside policy.trace"
        require(self.compute > 0, "policy.compute", self.compute, expected)
        from regimes.network import Network  # here: it loads scipy

        for lasts, bandwidth, latency in self.trace:
            require(lasts > 0, "policy.trace", lasts, "seconds above 0, Mbit/s, and ms of latency")
            Network(bandwidth * 1e6, latency * 1e-3).checked()

    @property
    def requires(self) -> frozenset[str]:
        """Bytes of levels, unless these are periods, whose number says what they send."""
        needed = {LINK_SECONDS, OWN_COLLECTIVES, WORKERS_OF_A_UNIT}
        return frozenset(needed if self.are_periods else {LEVEL_BYTES, *needed})

    @property
    def are_periods(self) -> bool:
        """Are the levels numbers of steps?"""
        return all(name.isdecimal() and int(name) for name in self.levels)

    def decide(self, history: Sequence[PastEpoch], layers: Sequence[str]) -> list[Decision]:
        if not history:
            self._check_order(history)
            return start_level(self.levels[0], layers)
        seen = as_history(history).accumulate(self._add, _Seen, self._add)
        if seen.level not in self.levels:  # of a trunk
            return follow_level(self.levels[0], {"rule": "start"}, history)
        if len(seen.recent) < CONFIRM:
            return follow_level(seen.level, None, history)
        now = seen.now
        may = seen.first or seen.units >= HOLD or self._is_another_link(seen, now)
        shares = self._shares(seen, now, history[-1])
        level = self._best(shares, seen.level) if may else seen.level
        why = {"rule": "link", "old": shares[seen.level], "new": shares[level]}
        return follow_level(level, why, history)

    def _add(self, seen: _Seen, epochs: Sequence[PastEpoch]) -> _Seen:
        for past in epochs:
            level = next(iter(past.levels), self.levels[0])
            if level != seen.level:
                seen.first = not seen.level
                seen.level, seen.units, seen.recent, seen.reference = level, 0, [], None
            seen.units, seen.total = seen.units + 1, seen.total + 1
            if past.link:
                seen.recent = [*seen.recent[1 - CONFIRM :], Reading(**past.link)]
            if past.link and len(seen.recent) == CONFIRM:
                now = seen.now
                seen.reference = now.exchange if seen.reference is None else seen.reference
                if self._is_another_link(seen, now):
                    seen.measured = {}
                seen.measured[level] = seen.total, now.exchange
                if now.exposed > SEEN * now.exchange:
                    seen.hidden = now.exchange - now.exposed
                elif seen.hidden is not None:
                    seen.hidden = max(seen.hidden, now.exchange)
        return seen

    def _is_another_link(self, seen: _Seen, now: Reading) -> bool:
        before = seen.reference or 0.0
        far = not before <= CHANGED * now.exchange <= CHANGED**2 * before
        allowed = self.exposed * (now.compute + now.exposed)
        return far and abs(now.exchange - before) > MATERIAL * allowed

    def _shares(self, seen: _Seen, now: Reading, past: PastEpoch) -> dict[str, float]:
        """What a step waits for bytes at each level, of its seconds: as measured at this one,
        predicted at others."""
        hidden = max(now.exchange, HIDES * now.compute) if seen.hidden is None else seen.hidden
        known = seen.exchanges
        if past.costs:
            # a burst that the link lets through makes bytes look free: then only the bound is left
            empty = min(now.latency, (1 - MOVING) * now.exchange, *known.values())
            loads = {level: level_cost(past, level).bytes for level in self.levels}
        else:  # of a period, the whole exchange is as seldom as its steps are many
            empty, loads = 0.0, {level: 1 / int(level) for level in self.levels}
        moving, least = now.exchange - empty, max(0.0, empty - hidden)
        shares = {}
        for level, load in loads.items():
            exchange = known.get(level, empty + moving * load / loads[seen.level])
            exposed = now.exposed if level == seen.level else max(0.0, exchange - hidden)
            shares[level] = _share(max(0.0, exposed - least), now.compute + least)
        return shares

    def _best(self, shares: Mapping[str, float], present: str) -> str:
        for level in reversed(self.levels):
            room = 1.0 if level == present else ROOM
            if shares[level] <= room * self.exposed:
                return level
        return self.levels[0]

    def _check_order(self, history: Sequence[PastEpoch]) -> None:
        known = history.ahead if isinstance(history, History) else None
        if known is not None and known.costs:
            loads = [known.costs[name].bytes for name in self.levels if name in known.costs]
            order = "levels from the highest compression, each with more bytes than the one before"
            rising = all(a < b for a, b in itertools.pairwise(loads))
            require(rising, "policy.levels", list(self.levels), order)


def _share(waited: float, others: float) -> float:
    return waited / (others + waited) if waited else 0.0


def link_of(rule: Any, field: str = "policy") -> LinkLadder | None:
    """The policy as one that follows the link; None: another.

    Args:
        field: where it stands; of a "sync_policy" levels are periods.

    Raises:
        ConfigError: it is a part of another policy, or chooses what it cannot.
    """
    if rule is None or LINK_SECONDS not in declared_needs(rule):
        return None
    if not isinstance(rule, LinkLadder):
        raise ConfigError(
            f'{field}: the policy "link" follows one link with one level for all compressed '
            f'layers: let {field}.name be "link"'
        )
    if field == "sync_policy":
        falling = rule.are_periods and [*rule.levels] == sorted(rule.levels, key=int, reverse=True)
        expected = 'periods in steps, from the longest to the shortest, like ["64", "16", "4"]'
        require(falling, "sync_policy.levels", list(rule.levels), expected)
    elif field != "policy":
        raise ConfigError(
            f'{field}: the policy "link" chooses levels of a compressor, as policy, or periods, as '
            "sync_policy: name another"
        )
    return rule
