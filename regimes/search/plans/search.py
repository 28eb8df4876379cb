"""The short runs of a plan within a budget, each a record."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regimes.base.config import DENSE, RunConfig
from regimes.base.errors import ConfigError, TrainingError, require
from regimes.cost.methods import Method
from regimes.cost.nodes import DataParallelJob
from regimes.plotting.groups import tested_by
from regimes.records import load
from regimes.search import rounds
from regimes.search.plans import decide, priced
from regimes.search.plans.clock import Probe
from regimes.search.plans.decide import FEWEST, PlanEvidence
from regimes.search.plans.priced import Price
from regimes.search.plans.probes import configure_probe, in_steps, name_probe
from regimes.search.plans.result import TOO_FAR, Plan
from regimes.search.rounds import BudgetLeft, RecordSearch, SearchBudget, SearchLog, Show
from regimes.search.sweep import Cell

if TYPE_CHECKING:
    from regimes.data.task import Task

START = 0.5  # seconds that a run takes besides its steps
Subject = tuple[RunConfig, "Task | None"]  # as of `read_subject`


@dataclass
class PlanSearch(RecordSearch[Probe]):
    """The search in its folder.

    Attributes:
        training: the one in question.
        short: the short runs; of a smaller model, or the same.
        methods: that are compared; dense first. Once they are priced, the faster ones alone.
        job: where the training will run.
        compute: seconds of one worker's step there; None: as timed here.
        seconds: of the training; None: as long as the configured one takes dense.
        curve: of `Plan`.
        config: of the short runs, in steps.
        prices: of a step of each method that was named, the latest ones.
    """

    kind = "plan"

    out: Path
    question: Mapping[str, Any]
    training: Subject
    short: Subject
    methods: Mapping[str, Method]
    job: DataParallelJob
    compute: float | None
    seconds: float | None
    curve: Mapping[float, float]
    jobs: int = 1
    config: RunConfig = field(init=False)
    prices: Mapping[str, Price] = field(init=False)

    def search(self, budget: SearchBudget, show: Show) -> Plan:
        """Train short runs until the plan is decided or the budget spent.

        Raises:
            ConfigError: a budget too small for any run, or seconds too few for any training.
            RecordError: the folder holds another plan.
            TrainingError: a training could not end, or none has a finite loss.
        """
        self.budget, every = budget, [*self.methods.values()]
        log, start = self.load_log(), time.monotonic()  # of another plan it is refused first
        config, task = self.training
        per_epoch, timed, unrest = priced.price_methods(config, every, self.job, self.compute, task)
        self.config, self.task = in_steps(self.short[0], per_epoch), self.short[1]
        self.devices, self.speed = [self.config.device], self.jobs  # a unit of work is a second
        here = priced.time_short_runs(self.config, every, self.task)
        timed = {name: replace(x, here=here.get(name, x.here)) for name, x in timed.items()}
        self.seconds_before = time.monotonic() - start
        known = [read_prices(each.facts) for each in log.rounds if "prices" in each.facts]
        with rounds.refuse_damage(self.out, 1):
            rounds.expect(all(prices.keys() == timed.keys() for prices in known))
        first = known[0] if known else timed  # they say what is compared, whatever is timed later
        self.prices = priced.renew_prices(known[-1], timed) if known else timed
        trained = in_steps(config, per_epoch)
        if self.seconds is None:
            self.seconds = float(trained.steps or 0) * first[DENSE].seconds
        self.methods = {method.label: method for method in priced.keep_faster(every, first)}
        step = min(first[name].seconds for name in self.methods)
        enough = f"{FEWEST * step:.3g} or more: a step of the fastest method takes {step:.3g} s, "
        enough += f"and a training has {FEWEST} or more"
        require(self.seconds >= FEWEST * step, "seconds", self.seconds, enough)
        log = self.run_rounds(budget, show)
        ended = [probe for probe in log.ended if log.results[probe] is not None]
        if not ended:
            raise TrainingError(
                f"optimizer.lr {self.config.optimizer.lr:g}: no training of the plan ended with a "
                "finite loss: choose a lower learning rate"
            )
        return Plan(
            self.known(log),
            self.methods,
            tuple(method.label for method in every if method.label not in self.methods),
            trained,
            tested_by(load(self.out / name_probe(ended[0]))),
            str(self.job.between),
            self.curve,
            own=task is not None,
            smaller=bool(self.question["probe"]),
            budget=budget,
            more=self.larger(budget, log),
            unrest=unrest,
            out=self.out,
        )

    def known(self, log: SearchLog[Probe], **facts: Any) -> PlanEvidence:
        """What the runs say.

        Args:
            facts: of a round that has no line yet.
        """
        told = {name: value for x in log.rounds for name, value in x.facts.items()} | facts
        losses = {
            probe: math.inf if log.results[probe] is None else float(log.results[probe])
            for probe in log.ended
        }
        prices, first = {m: self.prices[m] for m in self.methods}, int(told.get("first", FEWEST))
        length = int(told.get("length", first if len(prices) == 1 else 0))
        return PlanEvidence(cast("float", self.seconds), prices, first, length, losses)

    def larger(self, budget: SearchBudget, log: SearchLog[Probe]) -> SearchBudget | None:
        """The least budget that trains the whole next round, or runs that are long enough for
        advice; None if there is no next round."""
        known = self.known(log)
        todo = next(filter(None, decide.next_probes(known, self._seeds)), [])
        if not todo:
            return None
        if budget.minutes is None:
            return SearchBudget(None, len(log.results) + len(todo))
        more, enough = sum(map(self.cost, todo)), known.horizon(known.best) / TOO_FAR
        if enough > max(known.lengths(known.best), default=0):
            starts, steps = decide.expect_seconds(known.prices, START)
            more = max(more, starts + enough * steps)
        factor = log.seconds / sum(map(self.cost, log.results))
        return SearchBudget((self.seconds_before + log.seconds + factor * more) / 60 + 0.05, None)

    @property
    def _seeds(self) -> list[int]:
        return [self.config.seed + i for i in range(8)]

    # -- what a search is --------------------------------------------------------------------

    def choose(
        self, log: SearchLog[Probe], left: BudgetLeft
    ) -> tuple[Sequence[Probe], Mapping[str, Any]]:
        prices = {name: [p.seconds, p.bytes, p.here] for name, p in self.prices.items()}
        before = [x.facts["prices"] for x in log.rounds if "prices" in x.facts]
        facts: dict[str, Any] = {} if before[-1:] == [prices] else {"prices": prices}
        if not log.rounds:
            facts["first"] = self._first(left, self.known(log))
        known = self.known(log, **facts)
        todo = decide.next_probes(known, self._seeds)
        if not any(todo) and not known.length and min(known.losses.values()) < math.inf:
            facts["length"] = self._length(log, known)
            todo = decide.next_probes(self.known(log, **facts), self._seeds)
        runs: list[Probe] = []
        for wanted in filter(None, todo):
            costs = itertools.accumulate(map(self.cost, wanted))
            runs = [run for run, units in zip(wanted, costs, strict=True) if units <= left.units]
            runs = runs[: int(min(left.runs, len(runs)))]
            if len(runs) == len(wanted):
                break
        if not runs and not log.rounds:
            raise ConfigError(self._too_few(known.prices))
        return runs, {"probes": [[p.method, p.steps, p.rate, p.seed] for p in runs], **facts}

    def _first(self, left: BudgetLeft, known: PlanEvidence) -> int:
        """The steps of the first runs."""
        if len(known.methods) == 1:
            return FEWEST
        length = max(map(known.horizon, known.methods))
        if self.budget.minutes is not None:
            affordable = decide.choose_length(known.prices, START, left.units)
            if affordable < FEWEST:
                raise ConfigError(self._too_few(known.prices))
            length = min(length, affordable)
        return max(FEWEST, length // decide.QUARTER)

    def _length(self, log: SearchLog[Probe], known: PlanEvidence) -> int:
        """The steps of the other runs. The records say how long the first ones took; the log has
        the start of the processes, too, which comes once."""
        most = max(known.first, *map(known.horizon, known.methods))
        if self.budget.minutes is None:
            return most
        clocks = [load(self.out / name_probe(probe)).clock for probe in log.ended]
        took = sum(x for clock in clocks for parts in clock.values() for x in parts.values())
        slower = took / sum(p.steps * known.prices[p.method].here for p in log.ended)
        left = 60 * self.budget.minutes - self.seconds_before - log.seconds
        affordable = decide.choose_length(known.prices, START, left * self.jobs / max(slower, 1.0))
        return min(max(affordable, known.first), most)

    def _too_few(self, prices: Mapping[str, Price]) -> str:
        starts, steps = decide.expect_seconds(prices, START)
        seconds = self.seconds_before + 1.05 * (starts + FEWEST * steps) / self.jobs
        smaller = "" if self.question["probe"] else "a smaller model (--probe, probe=), "
        return (
            f"minutes = {self.budget.minutes:g}: expected {math.ceil(seconds / 6) / 10:g} or more, "
            f"which short runs of {FEWEST} steps need here and now ({len(prices)} methods, dense "
            f"among them); or {smaller}fewer methods, or a time when less else runs here"
        )

    def name(self, run: Probe) -> str:
        return name_probe(run)

    def cell(self, run: Probe) -> Cell:
        method = self.methods[run.method]
        config = configure_probe(self.config, method, run.steps, run.rate, run.seed)
        return self.out / name_probe(run), config

    def decode(self, names: Sequence[str], facts: Mapping[str, Any]) -> list[Probe]:
        return decode_probes(names, facts)

    def cost(self, run: Probe) -> float:
        """Seconds that a run is expected to take here, by itself."""
        return START + run.steps * self.prices[run.method].here

    def result(self, run: Probe, error: str | None) -> float | None:
        """The loss in the unit of figures, of validation data where there are some; None if the
        training broke."""
        if error:
            return None
        record = load(self.out / name_probe(run))
        shown, end = tested_by(record), cast("dict[str, Any]", record.tested_rows()[-1])
        metric = (end["validation"] if self.config.data.validation_size else end)["metric"]
        return None if metric is None else shown.sign * shown.factor * metric

    def check_result(self, run: Probe, result: Any) -> None:
        if result is not None:
            rounds.as_number(result)

    def describe_run(self, run: Probe, log: SearchLog[Probe]) -> str:
        name, loss = name_probe(run), log.results[run]
        if loss is None:
            return f"{name}: broke"
        shown = tested_by(load(self.out / name))
        return f"{name}: {shown.name} {loss if shown.lower else -loss:.4g}"


# -- the lines of a log ------------------------------------------------------------------------


def decode_probes(names: Sequence[str], facts: Mapping[str, Any]) -> list[Probe]:
    """Reads which short runs a round of a plan made, from the line of the plan's log.

    Args:
        names: the names of these runs in the line.
        facts: the other entries of the line.

    Raises:
        ValueError, TypeError, LookupError: the line is damaged.
    """
    if "probes" not in facts:  # another search's, which is refused by name
        return cast("list[Probe]", names)
    probes = [
        Probe(m, rounds.as_integer(n, 1), rounds.as_number(rate), rounds.as_integer(seed, -(2**63)))
        for m, n, rate, seed in facts["probes"]
    ]
    rounds.expect([*map(name_probe, probes)] == [*names])
    for name in facts.keys() & {"first", "length"}:
        rounds.as_integer(facts[name], 1)
    if "prices" in facts:
        read_prices(facts)
    return probes


def read_prices(facts: Mapping[str, Any]) -> dict[str, Price]:
    """The prices of a round's line; ValueError and its like for damage."""
    prices = {}
    for name, numbers in facts["prices"].items():
        seconds, size, here = map(rounds.as_number, numbers)
        rounds.expect(seconds > 0 and size >= 0 and here >= 0)
        prices[name] = Price(seconds, size, here)
    return prices
