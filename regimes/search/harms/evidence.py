"""What a search for harm knows: its rules, its windows as they are divided, the harms so far. No
torch.

A *pulse* changes the training in the units ``[first, stop)``; its *harm* is its result minus that
of the trunk, by seed. A run is divided into windows, one pulse for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regimes.search.harms.judge import LostTime, PulseVerdict, judge_harms, judge_lost_time

DELETION = "deletion"  # the arm whose pulses leave their units out


@dataclass(frozen=True, order=True)
class Pulse:
    """Names a change of some units.

    Attributes:
        arm: what is changed.
        spans: units ``[first, stop)``, in order, that do not touch.
    """

    arm: str
    spans: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        return self.spans[0][0]

    @property
    def length(self) -> int:
        """Return how many units are changed."""
        return sum(stop - first for first, stop in self.spans)


class PulseRun(NamedTuple):
    """Names a run of a search for harm.

    Attributes:
        pulse: what the run changes; None: it is a trunk.
        seed: 0 is the first seed of the search, whatever its number.
    """

    pulse: Pulse | None
    seed: int


Harms = Mapping[PulseRun, float]  # of each pulse that was run, by seed; of a trunk 0


@dataclass(frozen=True)
class Rules:
    """Say what a search for harm is about: the length of a run, what is changed, and what counts as
    harm.

    Attributes:
        units: of the run.
        arms: what is changed, a search for each.
        margin, grain: as for `judge_harms`.
        parts: coarse windows.
        least: units of the shortest window.
        several: the arms that can be changed in several spans of one run.
        lost_time: does the same time left out stand beside each window?
    """

    units: int
    arms: tuple[str, ...]
    margin: float
    grain: float = 0.0
    parts: int = 4
    least: int = 1
    several: tuple[str, ...] = ()
    lost_time: bool = False

    def coarse(self, arm: str) -> list[Pulse]:
        """Return the first windows of an arm.

        >>> [pulse.spans for pulse in Rules(10, ("high",), 1.0).coarse("high")]
        [((0, 2),), ((2, 5),), ((5, 8),), ((8, 10),)]
        """
        parts = max(1, min(self.parts, self.units // self.least))
        ends = [round(i * self.units / parts) for i in range(parts + 1)]
        return [Pulse(arm, (span,)) for span in itertools.pairwise(ends)]

    def halves(self, pulse: Pulse) -> list[Pulse]:
        """Divide a window in two; [] if it is too short."""
        ((first, stop),) = pulse.spans
        if stop - first < 2 * self.least:
            return []
        middle = (first + stop) // 2
        return [Pulse(pulse.arm, ((first, middle),)), Pulse(pulse.arm, ((middle, stop),))]

    def onsets(self) -> list[int]:
        """Return every unit in which some window of the search may begin."""
        todo, found = self.coarse(""), set[int]()
        while todo:
            found |= {pulse.first for pulse in todo}
            todo = [half for pulse in todo for half in self.halves(pulse)]
        return sorted(found)


@dataclass(frozen=True)
class HarmEvidence:
    """Holds what a search knows: its rules, and the harms so far."""

    rules: Rules
    harms: Harms

    def of(self, pulse: Pulse) -> PulseVerdict:
        """Judge a pulse by the harms of its seeds so far."""
        by_seed = sorted(self.harms.items(), key=lambda item: item[0][1])
        values = [harm for (own, _), harm in by_seed if own == pulse]
        return judge_harms(values, self.rules.margin, self.rules.grain)

    def beside(self, pulse: Pulse) -> Pulse | None:
        """Return the pulse that leaves a window out, where the search compares with it; else
        None."""
        compared = self.rules.lost_time and pulse.arm != DELETION and len(pulse.spans) == 1
        return Pulse(DELETION, pulse.spans) if compared else None

    def lost_time(self, pulse: Pulse) -> LostTime | None:
        """Compare a pulse with the same units left out; None where they are not compared."""
        if (beside := self.beside(pulse)) is None:
            return None
        seeds = sorted(
            s for own, s in self.harms if own == beside and PulseRun(pulse, s) in self.harms
        )
        harms, lost = ([self.harms[PulseRun(own, s)] for s in seeds] for own in (pulse, beside))
        return judge_lost_time(harms, lost, self.rules.margin, self.rules.grain)

    def windows(self, arm: str) -> list[Pulse]:
        """Return the windows of an arm as they are divided now, in order."""
        windows = self.rules.coarse(arm)
        while (found := self._to_halve(windows)) is not None:
            windows[found : found + 1] = self.rules.halves(windows[found])
        return windows

    def _to_halve(self, windows: Sequence[Pulse]) -> int | None:
        """The place of the next window to halve; one with halves that were tried is."""
        tried = {pulse for pulse, _ in self.harms}
        begun = (i for i, window in enumerate(windows) if tried & {*self.rules.halves(window)})
        if (place := next(begun, None)) is not None:
            return place
        found = [self.of(pulse) for pulse in windows]
        calls = [each.call for each in found]
        harmful = [
            i for i, call in enumerate(calls) if call == "harmful" and self.rules.halves(windows[i])
        ]
        beside = [
            i for i in harmful if "safe" in (*calls[max(0, i - 1) : i], *calls[i + 1 : i + 2])
        ]
        if beside:
            return beside[-1]
        if harmful and {*calls} == {"harmful"}:
            return min(harmful, key=lambda i: found[i].harm / windows[i].length)
        return None

    def phases(self, arm: str) -> list[Pulse]:
        """Return the windows of an arm for an answer: in place of two halves, neither of them
        tried, the window that they divide."""
        windows = self.windows(arm)
        untried = {window for window in windows if not self.of(window).n}
        phases: list[Pulse] = []
        for window in windows:
            whole = self.divided(window)
            known = whole if whole and {*self.rules.halves(whole)} <= untried else window
            if known not in phases:
                phases.append(known)
        return phases

    def divided(self, half: Pulse) -> Pulse | None:
        """Return the window that was tried and then divided into this one and another; None if
        there is none."""
        todo = self.rules.coarse(half.arm)
        while todo:
            window = todo.pop()
            halves = self.rules.halves(window)
            if half in halves:
                return window if self.of(window).n else None
            todo += halves
        return None

    def unions(self, arm: str) -> list[Pulse]:
        """Join all safe windows of an arm into one pulse, then all without the one of the largest
        harm per unit, and so on; each pulse has two windows or more."""
        safe = [pulse for pulse in self.windows(arm) if self.of(pulse).call == "safe"]
        unions = []
        while len(safe) > 1:
            spans = _join_spans([pulse.spans[0] for pulse in safe])
            if len(spans) == 1 or arm in self.rules.several:
                unions.append(Pulse(arm, spans))
            safe.remove(max(safe, key=lambda pulse: self.of(pulse).harm / pulse.length))
        return unions

    def best(self, arm: str) -> Pulse | None:
        """Return the pulse of the most units that was shown to be safe as a whole; of several, the
        one with the lowest upper end of its harm."""
        tried = [*self.windows(arm), *self.unions(arm)]
        safe = [pulse for pulse in tried if self.of(pulse).call == "safe"]
        return max(safe, key=lambda each: (each.length, -self.of(each).high), default=None)

    def cost(self, runs: Sequence[PulseRun]) -> float:
        """Return how many units training these runs takes."""
        return sum(units_trained(run, self.rules.units) for run in runs)

    def missing(self, pulse: Pulse, seeds: int) -> list[PulseRun]:
        """Return the runs by which a pulse, and its window left out, get so many seeds; runs of
        trunks that are there come first."""
        have = {seed for own, seed in self.harms if own == pulse}
        trunks = [seed for own, seed in self.harms if own is None]
        spare = [seed for seed in sorted(trunks) if seed not in have]
        new = (s for s in itertools.count() if s not in trunks and s not in have)
        chosen = [*spare, *itertools.islice(new, max(0, seeds))][: max(0, seeds - len(have))]
        beside = None if math.isinf(self.of(pulse).harm) else self.beside(pulse)
        runs: list[PulseRun] = []
        for seed in [*sorted(have), *chosen]:
            if seed not in trunks:
                runs.append(PulseRun(None, seed))
            if seed not in have:
                runs.append(PulseRun(pulse, seed))
            if beside and PulseRun(beside, seed) not in self.harms:
                runs.append(PulseRun(beside, seed))
        return runs


def units_trained(run: PulseRun, units: int) -> int:
    """Return how many units a run trains, of a training of so many; what its trunk has trained is
    there."""
    pulse, _ = run
    if pulse is None:
        return units
    return units - (pulse.spans[-1][1] if pulse.arm == DELETION else pulse.first)


def _join_spans(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans without those that touch.

    >>> _join_spans([(0, 2), (2, 3), (5, 6)])
    ((0, 3), (5, 6))
    """
    spans_apart: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        if spans_apart and spans_apart[-1][1] == first:
            first = spans_apart.pop()[0]
        spans_apart.append((first, stop))
    return tuple(spans_apart)
