"""What is known of the harm of pulses, and which pulse tells most next. No training, no torch.

A *pulse* changes the training in the units ``[first, stop)``; its *harm* is its result minus that
of the trunk, by seed. A run is divided into windows, one pulse for each:

1. coarse: ``parts`` windows of about equal length, ``LEAST`` seeds each;
2. a harmful window is halved where it borders on a safe one (between the last safe and the first
   harmful unit), else, if none is safe, the one with the least harm per unit;
3. an open window gets more seeds where they can decide within the budget, and is halved where they
   cannot: half of it may be far from the margin;
4. the safe windows are tried together, because harms of several pulses need not add up;
5. what is left of the budget goes to seeds of the windows that are still open, half as many again
   at a time: the mean of a few may lie at the margin by chance.

Beside each pulse stands the *lost time* of its window: the harm of a run of the same seed that
leaves the same units out. A harmful window in which it is not decided which of the two harms more
gets seeds from what is left in step 5, too.

A window is *safe* if the upper end of the interval of its harm is below the margin, *harmful* if
the lower end is above 0 and the mean above the margin, else *open*. A window is looked at again
after more seeds, and each look may be wrong. So the interval is the 95 % t interval at three seeds,
and its level rises with their number n to ``1 - 0.05 x 3 / n``. Error is spent over the looks (Lan
and DeMets 1983), by a formula that was chosen by simulation. The harm there equals the margin and
is normal, so that each call of safe is wrong. A search that looks after each seed makes one in 6 %
of cases up to 40 seeds, and in 7 % up to 200; with a 95 % interval at each look it would be 15 and
21 %. This module looks less often, and is wrong less often.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from regimes.base.statistics import LEAST, ratio_interval
from regimes.search.rounds import BudgetLeft

Call = Literal["safe", "harmful", "open"]
WORDS: dict[Call, str] = {"safe": "safe", "harmful": "harmful", "open": "unresolved"}
Comparison = Literal["more", "less", "open"]
DELETION = "deletion"  # the arm whose pulses leave their units out
ERROR = 0.05  # of both ends of the interval at the first look
MOST_SEEDS = 200  # more are not proposed
SHARE = 0.25  # of the budget that is left, which the pulses of one round may take


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


class Run(NamedTuple):
    """Names a run of a search for harm.

    Attributes:
        pulse: what the run changes; None: it is a trunk.
        seed: 0 is the first seed of the search, whatever its number.
    """

    pulse: Pulse | None
    seed: int


Harms = Mapping[Run, float]  # of each pulse that was run, by seed; of a trunk 0


@dataclass(frozen=True)
class PulseVerdict:
    """Holds what the harms of one pulse say.

    Attributes:
        harm: mean over seeds; nan without any.
        low, high: its interval, which may be looked at again (`half_width`); nan below `LEAST`
            seeds.
        n: seeds.
        needed: seeds, all together, with which the interval would decide if mean and spread stayed;
            None: no number up to `MOST_SEEDS`, or not known; ``n`` where it is decided.
    """

    call: Call
    harm: float
    low: float
    high: float
    n: int
    needed: int | None


def judge_harms(harms: Sequence[float], margin: float, grain: float = 0.0) -> PulseVerdict:
    """Judge the harms of one pulse, one number per seed. An infinite one is a training that broke.

    Args:
        margin: in the unit of harm; what is below counts as none.
        grain: the smallest step of the metric, e.g. 1 / test samples of an accuracy. Rounding to it
            has a standard deviation of grain / sqrt(6) in a difference, and the harms of a few
            seeds that are alike by rounding have no smaller one.

    >>> judge_harms([0.1, 0.2, 0.3], margin=1.0).call, judge_harms([1.0, 1.1, 1.2], margin=0.5).call
    ('safe', 'harmful')
    """
    n = len(harms)
    if any(math.isinf(x) for x in harms):
        return PulseVerdict("harmful", math.inf, math.inf, math.inf, n, n)
    if n < LEAST:
        mean = float(np.mean(harms)) if n else math.nan
        return PulseVerdict("open", mean, math.nan, math.nan, n, None)
    mean, spread = float(np.mean(harms)), max(float(np.std(harms, ddof=1)), grain / math.sqrt(6))
    half = half_width(spread, n)
    call: Call = "open"
    if mean + half < margin:
        call = "safe"
    elif mean - half > 0 and mean > margin:
        call = "harmful"
    needed = n if call != "open" else seeds_needed(mean, spread, margin, n)
    return PulseVerdict(call, mean, mean - half, mean + half, n, needed)


@dataclass(frozen=True)
class LostTime:
    """Compares the harm of a pulse with that of its units left out, over the seeds that have both.

    Attributes:
        call: does the pulse harm more or less? By the interval of the paired difference.
        lost: the verdict on the units left out.
        times: the harm as a multiple of it, the ratio of the means; nan where the units left out
            may harm by nothing.
        low, high: the interval of the multiple.
    """

    call: Comparison
    lost: PulseVerdict
    times: float
    low: float
    high: float

    def spell(self, number: float) -> str:
        """Write the multiple, or an end of its interval, in the digits of the multiple."""
        return f"{number:.{2 if self.times < 1 else 1 if self.times < 10 else 0}f}"


def judge_lost_time(
    harms: Sequence[float], lost: Sequence[float], margin: float, grain: float = 0.0
) -> LostTime:
    """Compare a pulse with its units left out, one number per seed of both; other arguments as for
    `judge_harms`.

    >>> judge_lost_time([2.0, 2.1, 2.2], [1.0, 1.1, 0.9], margin=0.5).call
    'more'
    """
    verdict, n = judge_harms(lost, margin, grain), len(lost)
    if any(map(math.isinf, (*harms, *lost))):
        broke: Comparison = "more" if math.isinf(sum(harms)) else "less"
        return LostTime(broke, verdict, math.nan, math.nan, math.nan)
    if n < LEAST:
        return LostTime("open", verdict, math.nan, math.nan, math.nan)
    differences, least = np.subtract(harms, lost), grain / math.sqrt(6)
    mean = float(np.mean(differences))
    half = half_width(max(float(np.std(differences, ddof=1)), least), n)
    call: Comparison = "more" if mean > half else "less" if mean < -half else "open"
    if verdict.low <= 0:
        return LostTime(call, verdict, math.nan, math.nan, math.nan)
    ends = ratio_interval(harms, lost, _quantile(n), least)
    return LostTime(call, verdict, float(np.mean(harms)) / verdict.harm, *ends)


def half_width(spread: float, n: int) -> float:
    """Return half of the t interval of a mean of ``n`` values, of the level ``1 - 0.05 x LEAST /
    n``."""
    return _quantile(n) * spread / math.sqrt(n)


@functools.cache
def _quantile(n: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - ERROR / 2 * LEAST / n, n - 1))


def seeds_needed(mean: float, spread: float, margin: float, n: int = 0) -> int | None:
    """Return the smallest number of seeds above ``n`` at which the interval decides, at this mean
    and spread; None above `MOST_SEEDS`."""
    distance = margin - mean if mean < margin else mean
    counts = range(max(LEAST, n + 1), MOST_SEEDS + 1)
    return next((k for k in counts if half_width(spread, k) < distance), None)


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
        seeds = sorted(s for own, s in self.harms if own == beside and Run(pulse, s) in self.harms)
        harms, lost = ([self.harms[Run(own, s)] for s in seeds] for own in (pulse, beside))
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

    def cost(self, runs: Sequence[Run]) -> float:
        """Return how many units training these runs takes."""
        return sum(units_trained(run, self.rules.units) for run in runs)

    def missing(self, pulse: Pulse, seeds: int) -> list[Run]:
        """Return the runs by which a pulse, and its window left out, get so many seeds; runs of
        trunks that are there come first."""
        have = {seed for own, seed in self.harms if own == pulse}
        trunks = [seed for own, seed in self.harms if own is None]
        spare = [seed for seed in sorted(trunks) if seed not in have]
        new = (s for s in itertools.count() if s not in trunks and s not in have)
        chosen = [*spare, *itertools.islice(new, max(0, seeds))][: max(0, seeds - len(have))]
        beside = None if math.isinf(self.of(pulse).harm) else self.beside(pulse)
        runs: list[Run] = []
        for seed in [*sorted(have), *chosen]:
            if seed not in trunks:
                runs.append(Run(None, seed))
            if seed not in have:
                runs.append(Run(pulse, seed))
            if beside and Run(beside, seed) not in self.harms:
                runs.append(Run(beside, seed))
        return runs


def units_trained(run: Run, units: int) -> int:
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


# -- what next -------------------------------------------------------------------------------


def next_round(evidence: HarmEvidence, budget: BudgetLeft, slots: int = 1) -> list[Run]:
    """Choose the runs that tell most, a trunk before its pulses; [] where all is resolved, or the
    budget is over.

    Args:
        slots: runs at a time.
    """
    if not evidence.harms:  # how long a unit takes is not known yet
        return [Run(None, seed) for seed in range(min(slots, LEAST, int(min(budget.runs, LEAST))))]
    first = _missing_of_coarse(evidence)
    if first:
        return _first_within(evidence, first, budget)
    chosen: list[Run] = []
    for action in _actions(evidence, budget):
        runs = [*chosen, *(run for run in action if run not in chosen)]
        enough = len(chosen) >= slots and evidence.cost(runs) > SHARE * budget.units
        if enough or evidence.cost(runs) > budget.units or len(runs) > budget.runs:
            continue
        chosen = runs
    return chosen or _more_seeds(evidence, budget, slots)


def parts_within(rules: Rules, budget: BudgetLeft) -> int:
    """Return how many coarse windows a budget has time for: as many as ``rules.parts`` if `LEAST`
    seeds of all take at most half of it, else fewer, at least 2."""
    for parts in range(rules.parts, 2, -1):
        evidence = HarmEvidence(replace(rules, parts=parts), {})
        if (
            evidence.cost(_missing_of_coarse(evidence)) <= budget.units / 2
            and len(_missing_of_coarse(evidence)) <= budget.runs / 2
        ):
            return parts
    return min(2, rules.parts)


def _missing_of_coarse(evidence: HarmEvidence) -> list[Run]:
    """What is missing of the coarse windows, seed by seed."""
    wanted: list[Run] = []
    for seed in range(LEAST):
        wanted.append(Run(None, seed))
        pulses = [pulse for arm in evidence.rules.arms for pulse in evidence.rules.coarse(arm)]
        pulses += [beside for pulse in pulses if (beside := evidence.beside(pulse))]
        wanted += [Run(pulse, seed) for pulse in dict.fromkeys(pulses)]
    # a pulse that broke is harmful, whatever other seeds would do
    broken = {pulse for (pulse, _), harm in evidence.harms.items() if math.isinf(harm)}
    broken |= {beside for pulse in broken if pulse and (beside := evidence.beside(pulse))}
    return [run for run in wanted if run not in evidence.harms and run.pulse not in broken]


def _first_within(evidence: HarmEvidence, runs: Sequence[Run], budget: BudgetLeft) -> list[Run]:
    """The first of these runs that fit into a budget."""
    fitting: list[Run] = []
    for run in runs:
        if evidence.cost([*fitting, run]) > budget.units or len(fitting) >= budget.runs:
            break
        fitting.append(run)
    while fitting and fitting[-1].pulse is None:  # a trunk without pulses says nothing
        fitting.pop()
    return fitting


def _actions(evidence: HarmEvidence, budget: BudgetLeft) -> list[list[Run]]:
    """What could be done, each the runs that it takes, the one first that resolves the most units
    for its cost."""
    rated: list[tuple[float, list[Run]]] = []
    for arm in evidence.rules.arms:
        for pulse in evidence.windows(arm):
            if evidence.of(pulse).call != "open":
                continue
            if (runs := _deciding(evidence, pulse, budget)) is not None:
                rated.append(runs)
            elif halves := evidence.rules.halves(pulse):
                both = (evidence.missing(half, LEAST) for half in halves)
                each = [*dict.fromkeys(itertools.chain.from_iterable(both))]
                # a half may stay open, so the units of both count for one
                rated.append((2 * evidence.cost(each) / pulse.length, each))
        for union in evidence.unions(arm):
            call = evidence.of(union).call
            runs = _deciding(evidence, union, budget) if call == "open" else None
            if runs is not None:
                rated.append(runs)
            if call == "safe" or runs is not None:  # else without its worst window
                break
    return [runs for _, runs in sorted(rated, key=lambda action: action[0])]


def _more_seeds(evidence: HarmEvidence, budget: BudgetLeft, slots: int) -> list[Run]:
    """Half as many seeds again of the open windows, of those with the fewest first: what no
    expected number of seeds decides, others than these may, and the budget is there for it. Then of
    the harmful windows that may harm as much as lost time."""
    todo: list[tuple[bool, int, float, Pulse, int]] = []
    for pulse in (pulse for arm in evidence.rules.arms for pulse in evidence.windows(arm)):
        found, beside = evidence.of(pulse), evidence.lost_time(pulse)
        decided, more = found.call != "open", found.n + found.n // 2
        if decided:
            few = beside is not None and beside.lost.n < LEAST
            alike = found.call == "harmful" and beside is not None and beside.call == "open"
            if math.isinf(found.harm) or not (few or alike):
                continue
            more = found.n if few else more
        if LEAST <= found.n < MOST_SEEDS:
            order = decided, found.n, evidence.cost([Run(pulse, 0)])
            todo.append((*order, pulse, min(MOST_SEEDS, more)))
    chosen: list[Run] = []
    for *_, pulse, more in sorted(todo, key=lambda each: each[:3]):
        runs = [run for run in evidence.missing(pulse, more) if run not in chosen]
        rest = BudgetLeft(budget.units - evidence.cost(chosen), budget.runs - len(chosen))
        chosen += _first_within(evidence, runs, rest)
        if len(chosen) >= slots:
            break
    return chosen


def _deciding(
    evidence: HarmEvidence, pulse: Pulse, budget: BudgetLeft
) -> tuple[float, list[Run]] | None:
    """The next runs of an open pulse, and the cost of all that it needs for each of its units;
    None where the budget has no room for these."""
    verdict = evidence.of(pulse)
    needed = verdict.needed if verdict.n >= LEAST else LEAST
    whole = evidence.missing(pulse, needed or MOST_SEEDS)
    if needed is None or evidence.cost(whole) > budget.units or len(whole) > budget.runs:
        return None
    more = max(LEAST, verdict.n + math.ceil((needed - verdict.n) / 2))
    return evidence.cost(whole) / pulse.length, evidence.missing(pulse, more)
