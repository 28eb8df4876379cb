"""Which runs of a search for harm tell most next. No training, no torch.

A run is divided into windows, and one pulse changes the training in each. A window is safe, harmful
or open (`harms.judge`):

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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from regimes.base.statistics import LEAST
from regimes.search.harms.evidence import HarmEvidence, Pulse, PulseRun, Rules
from regimes.search.harms.judge import MOST_SEEDS
from regimes.search.rounds import BudgetLeft

SHARE = 0.25  # of the budget that is left, which the pulses of one round may take


def next_round(evidence: HarmEvidence, budget: BudgetLeft, slots: int = 1) -> list[PulseRun]:
    """Choose the runs that tell most, a trunk before its pulses; [] where all is resolved, or the
    budget is over.

    Args:
        slots: runs at a time.
    """
    if not evidence.harms:  # how long a unit takes is not known yet
        return [
            PulseRun(None, seed) for seed in range(min(slots, LEAST, int(min(budget.runs, LEAST))))
        ]
    first = _missing_of_coarse(evidence)
    if first:
        return _first_within(evidence, first, budget)
    chosen: list[PulseRun] = []
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


def _missing_of_coarse(evidence: HarmEvidence) -> list[PulseRun]:
    """What is missing of the coarse windows, seed by seed."""
    wanted: list[PulseRun] = []
    for seed in range(LEAST):
        wanted.append(PulseRun(None, seed))
        pulses = [pulse for arm in evidence.rules.arms for pulse in evidence.rules.coarse(arm)]
        pulses += [beside for pulse in pulses if (beside := evidence.beside(pulse))]
        wanted += [PulseRun(pulse, seed) for pulse in dict.fromkeys(pulses)]
    # a pulse that broke is harmful, whatever other seeds would do
    broken = {pulse for (pulse, _), harm in evidence.harms.items() if math.isinf(harm)}
    broken |= {beside for pulse in broken if pulse and (beside := evidence.beside(pulse))}
    return [run for run in wanted if run not in evidence.harms and run.pulse not in broken]


def _first_within(
    evidence: HarmEvidence, runs: Sequence[PulseRun], budget: BudgetLeft
) -> list[PulseRun]:
    """The first of these runs that fit into a budget."""
    fitting: list[PulseRun] = []
    for run in runs:
        if evidence.cost([*fitting, run]) > budget.units or len(fitting) >= budget.runs:
            break
        fitting.append(run)
    while fitting and fitting[-1].pulse is None:  # a trunk without pulses says nothing
        fitting.pop()
    return fitting


def _actions(evidence: HarmEvidence, budget: BudgetLeft) -> list[list[PulseRun]]:
    """What could be done, each the runs that it takes, the one first that resolves the most units
    for its cost."""
    rated: list[tuple[float, list[PulseRun]]] = []
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


def _more_seeds(evidence: HarmEvidence, budget: BudgetLeft, slots: int) -> list[PulseRun]:
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
            order = decided, found.n, evidence.cost([PulseRun(pulse, 0)])
            todo.append((*order, pulse, min(MOST_SEEDS, more)))
    chosen: list[PulseRun] = []
    for *_, pulse, more in sorted(todo, key=lambda each: each[:3]):
        runs = [run for run in evidence.missing(pulse, more) if run not in chosen]
        rest = BudgetLeft(budget.units - evidence.cost(chosen), budget.runs - len(chosen))
        chosen += _first_within(evidence, runs, rest)
        if len(chosen) >= slots:
            break
    return chosen


def _deciding(
    evidence: HarmEvidence, pulse: Pulse, budget: BudgetLeft
) -> tuple[float, list[PulseRun]] | None:
    """The next runs of an open pulse, and the cost of all that it needs for each of its units;
    None where the budget has no room for these."""
    verdict = evidence.of(pulse)
    needed = verdict.needed if verdict.n >= LEAST else LEAST
    whole = evidence.missing(pulse, needed or MOST_SEEDS)
    if needed is None or evidence.cost(whole) > budget.units or len(whole) > budget.runs:
        return None
    more = max(LEAST, verdict.n + math.ceil((needed - verdict.n) / 2))
    return evidence.cost(whole) / pulse.length, evidence.missing(pulse, more)
