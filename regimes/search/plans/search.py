"""The short runs of a plan within a budget, each a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regimes.base.errors import ConfigError, TrainingError
from regimes.cost.methods import Method
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Metric
from regimes.records import load
from regimes.search.plans.clock import Probe
from regimes.search.plans.decide import FEWEST, QUARTER, PlanEvidence, choose_length, next_probes
from regimes.search.plans.priced import Price
from regimes.search.plans.probes import configure_probe, name_probe
from regimes.search.rounds import (
    BudgetLeft,
    RecordSearch,
    SearchBudget,
    SearchLog,
    Show,
    as_number,
    as_whole,
    expect,
)
from regimes.search.sweep import Cell

if TYPE_CHECKING:
    from regimes.base.config import RunConfig
    from regimes.data.task import Task

START = 0.5  # seconds that a run takes besides its steps
Prices = Mapping[str, Price]


@dataclass
class PlanSearch(RecordSearch[Probe]):
    """The search in its folder.

    Attributes:
        config: of the short runs, in steps.
        methods: that are compared; dense first.
        prices: of a step of each method that was named, as the plan began.
        renewed: the latest ones.
        seconds: of the training in question.
        task: model and data in place of those that the configuration names.
        before: seconds of the budget that were spent before any run.
    """

    kind = "plan"

    out: Path
    question: Mapping[str, Any]
    config: RunConfig
    methods: Mapping[str, Method]
    prices: Prices
    renewed: Prices
    seconds: float
    task: Task | None = None
    before: float = 0.0
    jobs: int = 1

    def __post_init__(self) -> None:
        self.devices, self.speed = [self.config.device], self.jobs  # a unit of work is a second

    def search(self, budget: SearchBudget, show: Show) -> SearchLog[Probe]:
        """Train short runs until the plan is decided or the budget spent.

        Raises:
            ConfigError: a budget too small for any run.
            RecordError: the folder holds another plan.
            TrainingError: a training could not end.
        """
        self.budget = budget
        return self.run_rounds(budget, show)

    def known(self, log: SearchLog[Probe]) -> PlanEvidence:
        """What the runs say."""
        losses = {
            probe: math.inf if log.results[probe] is None else float(log.results[probe])
            for probe in log.ended
        }
        prices, now = ({m: of[m] for m in self.methods} for of in (self.prices, self.renewed))
        first = int(log.rounds[0].facts["first"])
        alone = first if len(self.methods) == 1 else 0
        length = next((int(x.facts["length"]) for x in log.rounds if "length" in x.facts), alone)
        return PlanEvidence(self.seconds, prices, first, length, losses, now)

    def larger(self, budget: SearchBudget, log: SearchLog[Probe]) -> SearchBudget | None:
        """The least budget that trains the whole next round; None if there is none."""
        todo = next(filter(None, next_probes(self.known(log), self._seeds)), [])
        if not todo:
            return None
        if budget.minutes is None:
            return SearchBudget(None, len(log.results) + len(todo))
        factor = log.seconds / sum(map(self.cost, log.results))
        more = factor * sum(map(self.cost, todo))
        return SearchBudget((self.before + log.seconds + more) / 60 + 0.05, None)

    def shown(self, log: SearchLog[Probe]) -> Metric:
        """How the metric is written."""
        first = next(probe for probe in log.ended if log.results[probe] is not None)
        return tested_by(load(self.out / name_probe(first)))

    @property
    def _seeds(self) -> list[int]:
        return [self.config.seed + i for i in range(8)]

    # -- what a search is --------------------------------------------------------------------

    def choose(
        self, log: SearchLog[Probe], left: BudgetLeft
    ) -> tuple[Sequence[Probe], Mapping[str, Any]]:
        facts: dict[str, Any] = {}
        if log.rounds:
            latest = next(x.facts["prices"] for x in log.rounds[::-1] if "prices" in x.facts)
            if (now := plain_prices(self.renewed)) != latest:
                facts["prices"] = now
            known = self.known(log)
        else:
            used = {m: self.renewed[m] for m in self.methods}
            known = PlanEvidence(self.seconds, used, self._first(left, used), 0, {})
            facts = {"first": known.first, "prices": plain_prices(self.prices)}
        todo = next_probes(known, self._seeds)
        if not any(todo) and not known.length and len(self.methods) > 1:
            known = replace(known, length=self._length(log, known))
            facts["length"] = known.length
            todo = next_probes(known, self._seeds)
        if not any(todo) and not any(map(math.isfinite, known.losses.values())):
            raise TrainingError(
                f"optimizer.lr {self.config.optimizer.lr:g}: no training of the plan ended with a "
                "finite loss: choose a lower learning rate"
            )
        runs: Sequence[Probe] = ()
        for wanted in filter(None, todo):
            runs = self._affordable(left, wanted)
            if len(runs) == len(wanted):
                break
        plain = [[p.method, p.steps, p.rate, p.seed] for p in runs]
        return runs, {"probes": plain, **facts}

    def _affordable(self, left: BudgetLeft, wanted: Sequence[Probe]) -> list[Probe]:
        """The first ones, for which there is time."""
        units, runs = left.units, list[Probe]()
        for probe in wanted:
            units -= self.cost(probe)
            if units < 0 or len(runs) >= left.runs:
                break
            runs.append(probe)
        return runs

    @property
    def _most(self) -> int:
        """Steps of the longest training in question."""
        fewest = min(self.renewed[m].seconds for m in self.methods)
        return max(FEWEST, round(self.seconds / fewest))

    def _first(self, left: BudgetLeft, prices: Prices) -> int:
        """The steps of the first runs."""
        if len(prices) == 1:
            return FEWEST
        if self.budget.minutes is None:
            return max(FEWEST, self._most // QUARTER)
        length = choose_length(prices, START, left.units)
        if length < FEWEST:
            raise ConfigError(self._too_few(prices))
        return max(FEWEST, min(length, self._most) // QUARTER)

    def _length(self, log: SearchLog[Probe], known: PlanEvidence) -> int:
        """The steps of the other runs. The records say how long the first ones took; the log has
        the start of the processes, too, which comes once."""
        if self.budget.minutes is None:
            return self._most
        clocks = [load(self.out / name_probe(probe)).clock for probe in log.ended]
        took = sum(x for clock in clocks for parts in clock.values() for x in parts.values())
        slower = took / sum(p.steps * known.price(p.method).here for p in log.ended)
        left = 60 * self.budget.minutes - self.before - log.seconds
        affordable = choose_length(known.renewed, START, left * self.jobs / max(slower, 1.0))
        return min(max(affordable, known.first), max(self._most, known.first))

    def _too_few(self, prices: Prices) -> str:
        units = 1.0
        while choose_length(prices, START, units) < FEWEST:
            units *= 1.05
        needed = math.ceil(10 * (self.before + units / self.jobs) / 60) / 10
        model = "" if self.question["probe"] else ", a smaller model (--probe, probe=)"
        return (
            f"minutes {self.budget.minutes:g}: expected {needed:g} or more for {len(prices)} "
            f"methods with this model, dense among them{model}, or fewer methods"
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
        return START + run.steps * self.renewed[run.method].here

    def result(self, run: Probe, error: str | None) -> float | None:
        """The loss; None if the training broke."""
        found = None if error else self._measured(run)
        return None if found is None else found[0] if found[1].lower else -found[0]

    def check_result(self, run: Probe, result: Any) -> None:
        if result is not None:
            as_number(result)

    def line(self, run: Probe, log: SearchLog[Probe]) -> str:
        found = None if log.results[run] is None else self._measured(run)
        said = "broke" if found is None else f"{found[1].name} {found[0]:.4g}"
        return f"{name_probe(run)}: {said}"

    def _measured(self, run: Probe) -> tuple[float, Metric] | None:
        """The metric in the end, in the unit of figures, of validation data where there are some;
        None: not finite."""
        record = load(self.out / name_probe(run))
        shown, end = tested_by(record), cast("dict[str, Any]", record.tested_rows()[-1])
        metric = (end["validation"] if self.config.data.validation_size else end)["metric"]
        return None if metric is None else (shown.factor * metric, shown)


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
        Probe(m, as_whole(n, 1), as_number(rate), as_whole(seed, -(2**63)))
        for m, n, rate, seed in facts["probes"]
    ]
    expect([*map(name_probe, probes)] == [*names])
    if "prices" in facts:
        read_prices(facts)
    return probes


def plain_prices(prices: Prices) -> dict[str, list[float]]:
    """In plain types."""
    return {name: [p.seconds, p.bytes, p.here] for name, p in prices.items()}


def read_prices(facts: Mapping[str, Any]) -> dict[str, Price]:
    """The prices of a round's line; ValueError and its like for damage."""
    prices = {}
    for name, numbers in facts["prices"].items():
        seconds, size, here = map(as_number, numbers)
        expect(seconds > 0 and size >= 0 and here >= 0)
        prices[name] = Price(seconds, size, here)
    return prices
