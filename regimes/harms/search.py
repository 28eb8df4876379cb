"""The order of a search for harm: what is known after each round, and what is left of the budget.
No torch at import.

What trains is in `records` (trunks and branches) and `jobs` (a function of the user's).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regimes.errors import RecordError, require
from regimes.harms.decide import HarmEvidence, Left, Pulse, Rules, Run, next_round, parts_within
from regimes.harms.kinds import Kind
from regimes.harms.result import Harm
from regimes.launch import budgeted
from regimes.launch.budgeted import Ended, Round, SearchBudget, sum_seconds
from regimes.plotting.looks import Metric
from regimes.statistics import LEAST

Show = Callable[[str, float], None]  # a line about a run, and the share of the budget that is spent
POINTS = 1.0  # margin of an accuracy, in points
OF_TRUNK = 0.02  # margin of another metric, as a share of the trunk's
SHORTEST = 16  # a window has at least one in so many units


@dataclass(frozen=True)
class Facts:
    """What the first trunk says of a training.

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
        """What counts as no harm unless the user says it."""
        return POINTS if self.shown.name == "accuracy" else OF_TRUNK * abs(self.last)


class Search:
    """A search in its folder.

    Attributes:
        kinds: what pulses change, by arm.
        given: the user's margin.
        parts: windows that are tried first.
        first_seed: of the first trunk.
        told: what no record of a run says of the search; in the log, in plain types.
    """

    def __init__(
        self,
        out: Path,
        kinds: Mapping[str, Kind],
        margin: float | None,
        parts: int,
        first_seed: int,
    ) -> None:
        require(parts >= 2, "parts", parts, "2 or more")
        good = margin is None or (math.isfinite(margin) and margin > 0)
        require(good, "margin", margin, "above 0, and finite")
        self.out, self.kinds, self.given, self.parts = out, kinds, margin, parts
        self.first_seed = first_seed
        self.told: dict[str, Any] = {}

    # -- of what trains ----------------------------------------------------------------------

    def facts_of(self, rounds: Sequence[Round]) -> Facts:
        """What the first trunk says."""
        raise NotImplementedError

    def end_of(self, run: Run, rounds: Sequence[Round]) -> float:
        """The metric of a trunk in the end, in the unit of figures."""
        raise NotImplementedError

    def harm_of(self, run: Run, rounds: Sequence[Round]) -> float:
        """The harm of a pulse that has ended; infinite if the training broke."""
        raise NotImplementedError

    def train(self, runs: Sequence[Run], ended: Callable[[Run, Any], None]) -> None:
        """Train these runs, and call with each as it ends and its result."""
        raise NotImplementedError

    def line(self, run: Run, rounds: Sequence[Round]) -> str:
        """What a run has given, in words."""
        raise NotImplementedError

    def check_result(self, run: Run, result: Any) -> None:
        """ValueError unless a run may have this result in the log."""
        raise NotImplementedError

    def kind_of(self, pulse: Pulse) -> Kind:
        """What a pulse changes; RecordError for one of another search."""
        if pulse.arm not in self.kinds:
            raise RecordError(f"{self.out} has pulses of {pulse.arm!r}, too: name all pulses")
        return self.kinds[pulse.arm]

    # -- names -------------------------------------------------------------------------------

    def label(self, pulse: Pulse | None) -> str:
        """The name of a schedule in tables and figures."""
        if pulse is None:
            return "trunk"
        if len(pulse.spans) > 1:
            spans = ", ".join(f"{first}-{stop - 1}" for first, stop in pulse.spans)
            return f"{pulse.arm} in {spans}"
        units = f"{pulse.length} unit{'s' * (pulse.length > 1)}"
        return f"{pulse.arm}, {units} from {pulse.first}"

    def name(self, run: Run) -> str:
        """The name of a run in the log, and of its folder."""
        return f"{self.label(run[0])}/seed-{self.first_seed + run[1]}"

    # -- the search --------------------------------------------------------------------------

    def rounds(self) -> list[Round]:
        """The rounds so far.

        Raises:
            RecordError: they are of another search.
        """
        found, trunks = budgeted.rounds_of(self.out), set[int]()
        for each in found:
            with budgeted.refuse_damage(self.out, each.line):
                runs = _runs_of(each) if "runs" in each.facts else []
                trunks |= {number for pulse, number in runs if pulse is None}
                budgeted.expect(trunks >= {number for _, number in runs})
                budgeted.as_whole(each.facts.get("parts", 2), 1)
            if [*map(self.name, runs)] != [*each.runs]:
                raise RecordError(f"{self.out} holds another search: choose another folder")
            with budgeted.refuse_damage(self.out, each.line):
                for name, run in zip(each.runs, runs, strict=True):
                    if name in each.results:
                        self.check_result(run, each.results[name])
            for key, value in self.told.items():
                before = each.facts.get(key, value)  # a log of an earlier version does not say
                if before != value:
                    raise RecordError(
                        f"{self.out} holds a search with {key} {before!r}, not {value!r}: choose "
                        "another folder"
                    )
        return found

    def run(self, budget: SearchBudget, jobs: int, show: Show) -> list[Round]:
        """Search within a budget.

        Args:
            jobs: runs at a time.

        Raises:
            RecordError: the folder holds another search.
        """
        self.rounds()
        choose = functools.partial(self._choose, budget, jobs)
        return budgeted.search_in_rounds(
            self.out, choose, functools.partial(self._train, budget, show)
        )

    def known(self, rounds: Sequence[Round]) -> HarmEvidence:
        """What the rounds say.

        Raises:
            ConfigError: no margin was given, and the trunks end at 0, or at both sides of it.
            RecordError: they have pulses of another search.
        """
        facts = self.facts_of(rounds)
        several = tuple(name for name, kind in self.kinds.items() if kind.within)
        margin = self.given or facts.margin
        if self.given is None and facts.shown.name != "accuracy":
            ends = [self.end_of(run, rounds) for run in ended_runs(rounds) if run[0] is None]
            own = (
                f"one of your own: the default is {100 * OF_TRUNK:g} % of the trunk's metric, and "
                f"the trunks end close to 0, at {', '.join(f'{end:.3g}' for end in ends[:4])}"
            )
            mean = statistics.fmean(ends)
            require(abs(mean) > statistics.pstdev(ends), "margin", None, own)
        rules = replace(
            rules_of(facts.units, self._parts_of(rounds) or self.parts),
            arms=(*self.kinds,),
            margin=margin,
            grain=facts.grain,
            several=several,
        )
        harms: dict[Run, float] = {}
        for run in ended_runs(rounds):
            if run[0] is not None:
                self.kind_of(run[0])
            harms[run] = 0.0 if run[0] is None else self.harm_of(run, rounds)
        return HarmEvidence(rules, harms)

    def _parts_of(self, rounds: Sequence[Round]) -> int | None:
        """Windows of the search; None before there was time for any."""
        return int(rounds[1].facts["parts"]) if len(rounds) > 1 else None

    def _choose(
        self, budget: SearchBudget, jobs: int, rounds: Sequence[Round]
    ) -> tuple[list[str], dict[str, Any]]:
        """The next round, and what its line says of it."""
        if not rounds:
            count = min(jobs, LEAST, budget.runs or LEAST)
            return self._chosen([(None, number) for number in range(count)], self.parts)
        known, left = self.known(rounds), self._left(budget, rounds)
        if self._parts_of(rounds) is None:
            parts = parts_within(known.rules, left)
            known = HarmEvidence(replace(known.rules, parts=parts), known.harms)
        return self._chosen(next_round(known, left, jobs), known.rules.parts)

    def _chosen(self, runs: Sequence[Run], parts: int) -> tuple[list[str], dict[str, Any]]:
        plain = [[p and [p.arm, [list(span) for span in p.spans]], number] for p, number in runs]
        return [self.name(run) for run in runs], {"runs": plain, "parts": parts, **self.told}

    def _left(self, budget: SearchBudget, rounds: Sequence[Round]) -> Left:
        """What is left of the budget after some rounds."""
        done = ended_runs(rounds)
        runs = math.inf if budget.runs is None else budget.runs - len(done)
        if budget.minutes is None:
            return Left(runs=runs)
        spent, units = sum_seconds(rounds), self.known(rounds).cost(done)
        return Left(max(0.0, 60 * budget.minutes - spent) * units / max(spent, 1e-9), runs)

    def _train(self, budget: SearchBudget, show: Show, chosen: Round, ended: Ended) -> None:
        runs = dict(zip(chosen.runs, _runs_of(chosen), strict=True))
        share = budgeted.report_shares(budget, budgeted.rounds_of(self.out))

        def over(run: Run, result: Any) -> None:
            ended(self.name(run), result)
            show(self.line(run, budgeted.rounds_of(self.out)), share())

        self.train([runs[name] for name in chosen.missing], over)

    def found(self, rounds: Sequence[Round]) -> Harm:
        """What the rounds have found, without bytes and rates."""
        known, facts = self.known(rounds), self.facts_of(rounds)
        minutes = sum_seconds(rounds) / 60 / known.cost(ended_runs(rounds))
        return Harm(known, self.kinds, facts.shown, "epoch", minutes=minutes, out=self.out)


def rules_of(units: int, parts: int) -> Rules:
    """Rules without arms; with no more parts than there are windows."""
    least = max(1, round(units / SHORTEST))
    return Rules(units, (), 1.0, parts=max(1, min(parts, units // least)), least=least)


def _runs_of(each: Round) -> list[Run]:
    """The runs of a round, as its line in the log has them."""
    return [(_pulse_of(pulse), budgeted.as_whole(number)) for pulse, number in each.facts["runs"]]


def _pulse_of(plain: Any) -> Pulse | None:
    if plain is None:
        return None
    arm, spans = plain
    found = tuple((budgeted.as_whole(first), budgeted.as_whole(stop)) for first, stop in spans)
    ends = [end for span in found for end in span]
    budgeted.expect(isinstance(arm, str) and bool(ends) and ends == sorted({*ends}))
    return Pulse(arm, found)


def ended_runs(rounds: Sequence[Round]) -> list[Run]:
    """Those that have a result."""
    return [
        run
        for each in rounds
        for name, run in zip(each.runs, _runs_of(each), strict=True)
        if name in each.results
    ]


def result_of(name: str, rounds: Sequence[Round]) -> Any:
    """The result of a run that has ended."""
    return next(each.results[name] for each in rounds if name in each.results)
