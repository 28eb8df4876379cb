"""A search for harm: what its log says, and what is known after each round. No torch at import.

A *trunk* is an unchanged training of one seed. An *arm* is one kind of change that is searched,
such as the level "high". A *pulse* is an arm in some units of a run (``Pulse``); its *harm* is by
how much the run ends worse than the trunk of its seed.

What trains the runs is in `branches` (trunks and branches of the trainer) and `function` (a
function of the user's). Which runs come next is in `decide`.
"""

from __future__ import annotations

import abc
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regimes.base.errors import RecordError, require
from regimes.base.statistics import LEAST
from regimes.plotting.looks import Metric
from regimes.search.harms.decide import next_round, parts_within
from regimes.search.harms.evidence import DELETION, HarmEvidence, Pulse, PulseRun, Rules
from regimes.search.harms.kinds import LEFT_OUT, PulseKind
from regimes.search.harms.result import Harm
from regimes.search.rounds import (
    BudgetLeft,
    Search,
    SearchLog,
    as_integer,
    expect,
    refuse_damage,
)

POINTS = 1.0  # margin of an accuracy, in points
OF_TRUNK = 0.02  # margin of another metric, as a share of the trunk's
SHORTEST = 16  # a window has at least one in so many units


@dataclass(frozen=True)
class Facts:
    """Holds what the first trunk says of a training.

    Attributes:
        units: of a run.
        last: the trunk's metric in the end, in the unit of figures.
        grain: its smallest step; 0: none.
        shown: how it is written.
    """

    units: int
    last: float
    grain: float
    shown: Metric

    @property
    def margin(self) -> float:
        """Return the harm that counts as none unless the user gives a margin: 1 point of accuracy,
        or 2 % of another metric."""
        return POINTS if self.shown.name == "accuracy" else OF_TRUNK * abs(self.last)


class HarmSearch(Search[PulseRun]):
    """Searches for harm, whatever trains its runs.

    Attributes:
        kinds: what pulses change, by arm; units left out as well.
        arms: those that are searched.
        lost_time: are the same units left out beside each pulse?
        given: the user's margin.
        parts: windows that are tried first.
        first_seed: of the first trunk.
    """

    kind = "harm"

    def __init__(
        self,
        out: Path,
        kinds: Mapping[str, PulseKind],
        margin: float | None,
        parts: int,
        first_seed: int,
        lost_time: bool,
    ) -> None:
        require(parts >= 2, "parts", parts, "2 or more")
        good = margin is None or (math.isfinite(margin) and margin > 0)
        require(good, "margin", margin, "above 0, and finite")
        self.out, self.given, self.parts, self.first_seed = out, margin, parts, first_seed
        self.arms, self.lost_time, self.question = (*kinds,), lost_time, {}
        # a search that compares with lost time goes on without, and the other way round
        self.kinds = {DELETION: LEFT_OUT, **kinds}

    # -- of what trains ----------------------------------------------------------------------

    @abc.abstractmethod
    def facts_of(self, log: SearchLog[PulseRun]) -> Facts:
        """Return what the first trunk says."""

    @abc.abstractmethod
    def end_of(self, run: PulseRun, log: SearchLog[PulseRun]) -> float:
        """Return the metric of a trunk in the end, in the unit of figures."""

    @abc.abstractmethod
    def harm_of(self, run: PulseRun, log: SearchLog[PulseRun]) -> float:
        """Return the harm of a pulse that has ended; infinite if the training broke."""

    def kind_of(self, pulse: Pulse) -> PulseKind:
        """Return what a pulse changes; RecordError for one of another search."""
        if pulse.arm not in self.kinds:
            raise RecordError(f"{self.out} has pulses of {pulse.arm!r}, too: name all pulses")
        return self.kinds[pulse.arm]

    # -- names -------------------------------------------------------------------------------

    def label(self, pulse: Pulse | None) -> str:
        """Name a schedule, in tables and figures."""
        if pulse is None:
            return "trunk"
        if len(pulse.spans) > 1:
            spans = ", ".join(f"{first}-{stop - 1}" for first, stop in pulse.spans)
            return f"{pulse.arm} in {spans}"
        units = f"{pulse.length} unit{'s' * (pulse.length > 1)}"
        return f"{pulse.arm}, {units} from {pulse.first}"

    def name(self, run: PulseRun) -> str:
        """Name a run, in the log and as its folder."""
        return f"{self.label(run.pulse)}/seed-{self.first_seed + run.seed}"

    # -- the search --------------------------------------------------------------------------

    def decode(self, names: Sequence[str], facts: Mapping[str, Any]) -> list[PulseRun]:
        as_integer(facts.get("parts", 2), 1)  # `_parts_of` reads it when its line is not known
        return [
            PulseRun(_pulse_of(pulse), as_integer(seed)) for pulse, seed in facts.get("runs", [])
        ]

    def load_log(self) -> SearchLog[PulseRun]:
        found, trunks = super().load_log(), set[int]()
        for each in found.rounds:
            with refuse_damage(self.out, each.line_number):
                trunks |= {run.seed for run in each.runs if run.pulse is None}
                expect(trunks >= {run.seed for run in each.runs})
        return found

    def choose(
        self, log: SearchLog[PulseRun], budget: BudgetLeft
    ) -> tuple[list[PulseRun], dict[str, Any]]:
        parts: int | None = self.parts
        if not log.rounds:
            runs = [PulseRun(None, seed) for seed in range(int(min(self.jobs, LEAST, budget.runs)))]
        else:
            evidence, parts = self.judge(log), _parts_of(log)
            if parts is None:
                parts = parts_within(evidence.rules, budget)
                evidence = HarmEvidence(replace(evidence.rules, parts=parts), evidence.harms)
            runs = next_round(evidence, budget, self.jobs)
        plain = [[p and [p.arm, [list(span) for span in p.spans]], seed] for p, seed in runs]
        return runs, {"runs": plain, "parts": parts}

    def judge(self, log: SearchLog[PulseRun]) -> HarmEvidence:
        """Judge what the rounds say.

        Raises:
            ConfigError: no margin was given, and the trunks end at 0, or at both sides of it.
            RecordError: they have pulses of another search.
        """
        facts = self.facts_of(log)
        several = tuple(name for name, kind in self.kinds.items() if kind.by_policy)
        margin = self.given or facts.margin
        if self.given is None and facts.shown.name != "accuracy":
            ends = [self.end_of(run, log) for run in log.ended if run.pulse is None]
            own = (
                f"one of your own: the default is {100 * OF_TRUNK:g} % of the trunk's metric, and "
                f"the trunks end close to 0, at {', '.join(f'{end:.3g}' for end in ends[:4])}"
            )
            mean = statistics.fmean(ends)
            require(abs(mean) > statistics.pstdev(ends), "margin", None, own)
        rules = replace(
            rules_of(facts.units, _parts_of(log) or self.parts),
            arms=self.arms,
            margin=margin,
            grain=facts.grain,
            several=several,
            lost_time=self.lost_time,
        )
        for pulse, _ in log.ended:
            if pulse is not None:
                self.kind_of(pulse)
        harms = {run: 0.0 if run.pulse is None else self.harm_of(run, log) for run in log.ended}
        return HarmEvidence(rules, harms)

    def conclude(self, log: SearchLog[PulseRun]) -> Harm:
        """Return what the rounds have found, without bytes and rates."""
        evidence, facts = self.judge(log), self.facts_of(log)
        minutes = log.seconds / 60 / evidence.cost(log.ended)
        return Harm(evidence, self.kinds, facts.shown, "epoch", minutes=minutes, out=self.out)


def _parts_of(log: SearchLog[PulseRun]) -> int | None:
    """Into how many windows the search divides a run; None until this is fixed.

    Round 0 trains only trunks, which show what a unit costs. Therefore the number of windows that
    the budget allows is fixed in the line of round 1, and holds from then on.
    """
    return int(log.rounds[1].facts["parts"]) if len(log.rounds) > 1 else None


def rules_of(units: int, parts: int) -> Rules:
    """Return rules without arms, with no more parts than there are windows."""
    least = max(1, round(units / SHORTEST))
    return Rules(units, (), 1.0, parts=max(1, min(parts, units // least)), least=least)


def _pulse_of(plain: Any) -> Pulse | None:
    """A pulse, as the log has it."""
    if plain is None:
        return None
    arm, spans = plain
    units = tuple((as_integer(first), as_integer(stop)) for first, stop in spans)
    ends = [end for span in units for end in span]
    expect(isinstance(arm, str) and bool(ends) and ends == sorted({*ends}))
    return Pulse(arm, units)
