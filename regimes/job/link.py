"""What a unit's steps wait for the link: measured on processes, or predicted for a trace.

The column "link" of a row, for the policy that follows it (``policies.link``).
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regimes.collectives.world import World
from regimes.errors import require
from regimes.job.clock import LOOP, Clock
from regimes.policies import Policy
from regimes.policies.link import LinkLadder, Reading, link_of
from regimes.records.schema import LinkSeconds

PROBE = 0.2  # of a unit's bytes, sent again at its end: seconds of a byte on this link
MOST = 1 << 20  # bytes of that
WITHIN = ("sum", "join")  # collectives of one worker's processes, over their own links
Row = Mapping[str, Any]


class LinkMeter:
    """Gives each unit's row the seconds of its mean step, the same on all processes.

    Attributes:
        rule: the policy that reads them.
    """

    def __init__(self, world: World, rule: LinkLadder) -> None:
        self.world, self.rule = world, rule
        self._waited: float | None = world.seconds  # in collectives, when the unit began
        self._exchange: float | None = None
        self._clock: Clock

    @classmethod
    def of(cls, world: World, rules: Mapping[str, Policy]) -> LinkMeter | None:
        """A meter for the one of these policies, by field, that follows the link; None: none does.

        Raises:
            ConfigError: two do, or one chooses what it cannot.
        """
        found = {field: rule for field in rules if (rule := link_of(rules[field], field))}
        expected = "another policy: one of them follows the link"
        require(len(found) < 2, max(found, default=""), "link", expected)
        return cls(world, next(iter(found.values()))) if found else None

    @property
    def measures(self) -> bool:
        """Does ``take`` send something?"""
        return not self.rule.trace and self.world.processes > 1

    def begin(self) -> None:
        """A unit's steps begin."""
        self._waited, self._exchange = self.world.seconds, None

    def stop(self, clock: Clock) -> None:
        """A unit's steps are over. What a GPU has waited for is read from the clock in ``take``."""
        if self._waited is not None:
            self._exchange = self.world.seconds - self._waited
        self._clock = clock

    def forget(self) -> None:
        """A state was loaded: of the unit under way some seconds are those of another process."""
        self._waited = None

    def take(
        self, seconds: Mapping[str, float], row: Row, rows: Sequence[Row]
    ) -> LinkSeconds | None:
        """The column of a unit, see `Reading`; None if it has no steps, or some of them were taken
        before a state was loaded. On processes it sends up to a fifth of the unit's bytes again.

        Args:
            seconds: where the unit's time went on this process, by name (``job.clock``).
            row: of the unit, with its traffic.
            rows: of the units before.
        """
        if not row["steps"]:
            return None
        if self.rule.trace:
            start = math.fsum(_seconds(before) for before in rows)
            return _column(predicted(self.rule, self.world.workers, row, start))
        known, steps = self._exchange is not None, row["steps"]
        exchange = ((self._exchange or 0.0) + self._clock.marked) / steps
        compute, compress, waited = (seconds.get(name, 0.0) / steps for name in LOOP)
        probe = bytes(min(MOST, int(PROBE * steps * sum(_per_step(row, "bytes").values()))))
        small, large = self._time_gathers(probe) if self.measures else (0.0, 0.0)
        mine = known, compute + compress, compute + compress + waited, exchange, small, large
        everyone = self.world.gather_object(mine) if self.measures else [mine]
        all_known, own, whole, exchanges, smalls, larges = zip(*everyone, strict=True)
        if not all(all_known):
            return None
        # A process that waits for a slower one does not wait for the link: what the slowest one
        # waits is what a faster link would save.
        exposed = max(0.0, max(whole) - max(own))
        exchange = max(exposed, min(exchanges))
        moved = self._predict_moving(row, len(probe), max(0.0, min(larges) - min(smalls)))
        return _column(Reading(max(own), exposed, exchange, max(0.0, exchange - moved)))

    def _time_gathers(self, probe: bytes) -> tuple[float, float]:
        """Seconds in which every process gets nothing from every other one, and this many bytes."""
        self.world.barrier()  # or a process that is late would count as a slow link
        began = time.perf_counter()
        self.world.barrier()
        empty = time.perf_counter()
        self.world.gather_object(probe)
        return empty - began, time.perf_counter() - empty

    def _predict_moving(self, row: Row, size: int, seconds: float) -> float:
        """Seconds that a step's bytes take, when ``size`` bytes of each process have reached all
        others in ``seconds``."""
        from regimes.network import Network, Work

        count = self.world.processes // self.world.shards
        if count < 2 or not size or not seconds:
            return 0.0
        bandwidth = 8 * size * (self.world.processes - 1) / seconds
        calls, sent = _per_step(row, "calls"), _per_step(row, "bytes")
        return float(Work(0.0, 0.0, calls, sent).communicate(Network(bandwidth), count))


def predicted(rule: LinkLadder, workers: int, row: Row, start: float) -> Reading:
    """The mean step of a unit on the link of a trace, as `regimes cost` predicts it for a ring.

    Each step computes, and then waits for its exchange, which goes on at another speed when the
    link changes meanwhile.

    Args:
        row: of the unit, with its traffic.
        start: seconds since the trace began.
    """
    from regimes.network import Network, Work

    work = Work(rule.compute, 0.0, _per_step(row, "calls"), _per_step(row, "bytes"))
    empty = replace(work, bytes=dict.fromkeys(work.calls, 0.0))
    links = [Network(mbit * 1e6, ms * 1e-3) for _, mbit, ms in rule.trace]
    whole = [float(work.communicate(link, workers)) for link in links]
    least = [float(empty.communicate(link, workers)) for link in links]
    ends = list(itertools.accumulate(lasts for lasts, _, _ in rule.trace))
    now, exchange, latency = start, 0.0, 0.0
    for _ in range(row["steps"]):
        now, left = now + rule.compute, 1.0
        while left > 0:
            at = math.fmod(now, ends[-1])
            i = min(bisect.bisect_right(ends, at), len(ends) - 1)
            # the next float, where rounding would leave no time at all
            end = max(now + ends[i] - at, math.nextafter(now, math.inf))
            needed = left * whole[i]
            part = left if now + needed <= end else left * (end - now) / needed
            latency += part * least[i]
            exchange += part * whole[i]
            now, left = (now + needed, 0.0) if part == left else (end, left - part)
    steps = row["steps"]
    return Reading(rule.compute, exchange / steps, exchange / steps, latency / steps)


def _column(reading: Reading) -> LinkSeconds:
    compute, exposed, exchange, latency = reading
    return LinkSeconds(compute=compute, exposed=exposed, exchange=exchange, latency=latency)


def _per_step(row: Row, what: str) -> dict[str, float]:
    """A step's calls, or bytes, by kind of collective, of those between workers."""
    sent = row["collectives"][what]
    return {kind: n / row["steps"] for kind, n in sent.items() if kind not in WITHIN}


def _seconds(row: Row) -> float:
    """All steps of a unit together; 0 where they are not known."""
    link = row.get("link") or {"compute": 0.0, "exposed": 0.0}
    return float(row["steps"] * (link["compute"] + link["exposed"]))
