"""The probes of a plan within a budget, each a record."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regimes.config import RunConfig
from regimes.cost.methods import Method
from regimes.errors import ConfigError, RecordError, TrainingError
from regimes.launch.search import (
    Left,
    RecordSearch,
    SearchBudget,
    SearchLog,
    Show,
    as_number,
    as_whole,
    expect,
    read_log,
    refuse_damage,
)
from regimes.launch.sweep import Cell
from regimes.plans.curve import Probe
from regimes.plans.decide import (
    FEWEST,
    FIRST,
    LENGTHS,
    NEXT,
    TRIED,
    Aim,
    PlanEvidence,
    later_probes,
    next_probes,
    rungs_within,
    shortest_span,
)
from regimes.plans.priced import Price
from regimes.plans.probes import configure_probe, name_probe
from regimes.plotting.groups import tested_by
from regimes.plotting.looks import Metric
from regimes.records import load

if TYPE_CHECKING:
    from regimes.data.task import Task

START = 0.5  # seconds that a probe takes besides its steps


@dataclass(frozen=True)
class Asked:
    """What a plan is about; in the log, so that a plan that goes on has the same steps.

    Attributes:
        question: link, methods and aim, in plain types.
        per_epoch: steps of the training's epoch.
        prices: of a step of all methods that were named, by label, as the plan began.
        renewed: the latest ones.
    """

    question: Mapping[str, Any]
    per_epoch: int
    prices: Mapping[str, Price]
    renewed: Mapping[str, Price]

    def plain(self) -> dict[str, Any]:
        """In plain types."""
        return {"per_epoch": self.per_epoch, "prices": plain_prices(self.prices)}


def plain_prices(prices: Mapping[str, Price]) -> dict[str, list[float]]:
    """In plain types."""
    return {name: [p.seconds, p.bytes, p.here] for name, p in prices.items()}


def read_question(out: Path, question: Mapping[str, Any]) -> Asked | None:
    """What the plan in a folder is about; None if there is none yet.

    Raises:
        RecordError: it is about another question.
    """
    rounds = read_log(out, _decode).rounds
    if not rounds:
        return None
    facts = rounds[0].facts
    if "question" not in facts or facts.get("search", "plan") != "plan":
        raise RecordError(f"{out} holds another search: choose another folder")
    with refuse_damage(out, rounds[0].line):
        expect(isinstance(facts["question"], dict))
        expect(min(map(as_number, facts["rungs"])) > 0)
        first = _prices_of(facts)
        per_epoch = as_whole(facts["per_epoch"], 1)
    for key, value in json.loads(json.dumps(question)).items():  # a tuple is a list in the log
        before = facts["question"].get(key)
        if before != value:
            raise RecordError(
                f"{out} holds a plan with {key} {before!r}, not {value!r}: choose another folder"
            )
    latest = first
    for each in rounds:
        with refuse_damage(out, each.line):
            latest = _prices_of(each.facts) if "prices" in each.facts else latest
            expect(latest.keys() == first.keys())
            expect({probe.method for probe in each.runs} <= first.keys())
    return Asked(question, per_epoch, first, latest)


def _prices_of(facts: Mapping[str, Any]) -> dict[str, Price]:
    """The prices of a round's line."""
    prices = {}
    for name, numbers in facts["prices"].items():
        seconds, size, here = map(as_number, numbers)
        expect(seconds > 0 and size >= 0 and here >= 0)
        prices[name] = Price(seconds, size, here)
    return prices


@dataclass
class Probes(RecordSearch[Probe]):
    """The search in its folder.

    Attributes:
        config: of the training, in steps.
        methods: that are compared; dense first.
        facts: what was asked, and what a step takes.
        task: model and data in place of those that the configuration names.
        smaller: they are of a smaller model than the training.
        before: seconds of the budget that were spent before any probe.
    """

    kind = "plan"

    out: Path
    config: RunConfig
    methods: Mapping[str, Method]
    facts: Asked
    aim: Aim
    task: Task | None = None
    smaller: bool = False
    before: float = 0.0

    def __post_init__(self) -> None:
        self.question, self.devices = self.facts.question, [self.config.device]

    @property
    def prices(self) -> dict[str, Price]:
        """Those of the methods that are compared."""
        return {name: self.facts.prices[name] for name in self.methods}

    @property
    def renewed(self) -> dict[str, Price]:
        """The latest ones."""
        return {name: self.facts.renewed[name] for name in self.methods}

    def search(
        self, budget: SearchBudget, jobs: int, show: Show
    ) -> tuple[PlanEvidence, Metric, SearchBudget | None]:
        """Train probes until the plan is decided or the budget spent.

        Returns:
            What is known, how the metric is written, and the least budget that would train more;
            None if none would.

        Raises:
            ConfigError: a budget too small for any probe.
            RecordError: the folder holds another plan.
            TrainingError: a training could not end.
        """
        self.jobs, self.speed, self.budget = jobs, jobs, budget  # a unit of work is a second
        log = self.run_rounds(budget, show)
        known = self.known(log)
        return known, self._shown(log), self._larger(budget, log, known)

    @property
    def _seeds(self) -> list[int]:
        return [self.config.seed + i for i in range(8)]

    def _larger(
        self, budget: SearchBudget, log: SearchLog[Probe], known: PlanEvidence
    ) -> SearchBudget | None:
        """The least budget that has time for more probes."""
        later = [] if known.decided else later_probes(known, self._seeds)
        if not later:
            return None
        if budget.minutes is None:
            more = math.ceil(min(map(len, later)) / NEXT)
            return SearchBudget(None, len(log.results) + more)
        factor = log.seconds / sum(map(self.cost, log.results))
        cost = min(sum(map(self.cost, probes)) for probes in later)
        return SearchBudget((self.before + log.seconds + factor * cost / NEXT) / 60, None)

    def _config(self, probe: Probe) -> RunConfig:
        method = self.methods[probe.method]
        return configure_probe(self.config, method, probe.steps, probe.rate, probe.seed)

    def name(self, run: Probe) -> str:
        return name_probe(run)

    def cell(self, run: Probe) -> Cell:
        return self.out / name_probe(run), self._config(run)

    def decode(self, names: Sequence[str], facts: Mapping[str, Any]) -> list[Probe]:
        return _decode(names, facts)

    def cost(self, run: Probe) -> float:
        """Seconds that a probe is expected to take here, by itself."""
        return START + run.steps * self.renewed[run.method].here

    def result(self, run: Probe, error: str | None) -> float | None:
        """The loss; None if the training broke."""
        found = None if error else self._measured(name_probe(run))
        return None if found is None else found[0] if found[1].lower else -found[0]

    def check_result(self, run: Probe, result: Any) -> None:
        if result is not None:
            as_number(result)

    def line(self, run: Probe, log: SearchLog[Probe]) -> str:
        found = None if log.results[run] is None else self._measured(name_probe(run))
        said = "broke" if found is None else f"{found[1].name} {found[0]:.4g}"
        return f"{name_probe(run)}: {said}"

    # -- rounds ------------------------------------------------------------------------------

    def known(self, log: SearchLog[Probe]) -> PlanEvidence:
        """What the rounds say."""
        rungs = tuple(float(second) for second in log.rounds[0].facts["rungs"])
        losses = {
            probe: math.inf if log.results[probe] is None else float(log.results[probe])
            for probe in log.ended
        }
        ended = any(math.isfinite(loss) for loss in losses.values())
        if not ended:
            return PlanEvidence(self.aim, self.prices, rungs, losses, renewed=self.renewed)
        shown = self._shown(log)
        low, high = shown.ends
        ends = (low, high) if shown.lower else (-high, -low)
        return PlanEvidence(self.aim, self.prices, rungs, losses, shown.lower, ends, self.renewed)

    def choose(
        self, log: SearchLog[Probe], left: Left
    ) -> tuple[Sequence[Probe], Mapping[str, Any]]:
        if not log.rounds:
            least = 1 if self.aim.loss is None else LENGTHS
            whole = functools.partial(self._whole, left, FIRST)
            if len(self.prices) == 1:  # the shortest training that has an answer
                dense = next(iter(self.prices.values()))
                rungs: tuple[float, ...] = min(FEWEST * dense.seconds, self._span), self._span
            else:
                rungs = rungs_within(self._span, self.prices, whole, least)
            if not rungs:
                raise ConfigError(self._too_few())
            empty = PlanEvidence(self.aim, self.prices, rungs, {})
            facts = {"rungs": [*rungs], **self.facts.plain()}
            return self._chosen(next_probes(empty, self._seeds, lambda probes: True), facts)
        known = self.known(log)
        probes = next_probes(known, self._seeds, functools.partial(self._whole, left, NEXT))
        if not probes and not any(math.isfinite(loss) for loss in known.losses.values()):
            raise TrainingError(
                f"optimizer.lr {self.config.optimizer.lr:g}: no training of the plan ended with a "
                "finite loss: choose a lower learning rate"
            )
        latest = next(each.facts["prices"] for each in log.rounds[::-1] if "prices" in each.facts)
        now = plain_prices(self.facts.renewed)
        chosen = self._affordable(left, probes)
        return self._chosen(chosen, {} if now == latest else {"prices": now})

    def _chosen(
        self, probes: Sequence[Probe], more: Mapping[str, Any]
    ) -> tuple[Sequence[Probe], dict[str, Any]]:
        return probes, {"probes": [[p.method, p.steps, p.rate, p.seed] for p in probes], **more}

    @property
    def _span(self) -> float:
        """Seconds of the training on the link, given by the aim or by the configured steps of
        dense."""
        if self.aim.seconds is not None:
            return self.aim.seconds
        dense = next(iter(self.prices.values()))
        return float(self.config.steps or 0) * dense.seconds

    def _too_few(self) -> str:
        dense = next(iter(self.prices.values()))
        least = math.ceil(shortest_span(self.prices, LENGTHS) / dense.seconds)
        if self.aim.loss is not None and (self.config.steps or 0) < least:
            return (
                f"the training has {self.config.steps} steps: expected {least} or more "
                f"for a plan to a loss, whose short trainings have {LENGTHS} lengths"
            )
        if self.budget.minutes is None:
            fewest = math.ceil(TRIED * len(self.prices) / FIRST)
            return f"runs {self.budget.runs}: expected {fewest} or more"
        steps = {m: FEWEST * self._span_steps(m) for m in self.prices}
        slow = sum(TRIED * (START + n * self.renewed[m].here) for m, n in steps.items())
        needed = math.ceil(10 * slow / FIRST / self.jobs / 60) / 10
        model = "" if self.smaller else ", a smaller model (--probe, probe=)"
        return (
            f"minutes {self.budget.minutes:g}: expected {needed:g} or more for {len(self.prices)} "
            f"methods with this model, dense among them{model}, or fewer methods"
        )

    def _span_steps(self, method: str) -> float:
        """Steps of a method beside one of the slowest."""
        slowest = max(price.seconds for price in self.prices.values())
        return slowest / self.prices[method].seconds

    def _affordable(self, left: Left, probes: Sequence[Probe], share: float = 1.0) -> list[Probe]:
        """As many as a share of what is left of the budget has time for, the first ones."""
        units, kept = share * left.units, list[Probe]()
        for probe in probes:
            units -= self.cost(probe)
            if units < 0 or len(kept) >= share * left.runs:
                break
            kept.append(probe)
        return kept

    def _whole(self, left: Left, share: float, probes: Sequence[Probe]) -> bool:
        """Has a share of what is left time for all of these?"""
        return len(self._affordable(left, probes, share)) == len(probes)

    # -- results -----------------------------------------------------------------------------

    def _measured(self, run: str) -> tuple[float, Metric] | None:
        """The metric in the end, in the unit of figures, of validation data where there are some;
        None: not finite."""
        record = load(self.out / run)
        shown, end = tested_by(record), cast("dict[str, Any]", record.tested_rows()[-1])
        metric = (end["validation"] if self.config.data.validation_size else end)["metric"]
        return None if metric is None else (shown.factor * metric, shown)

    def _shown(self, log: SearchLog[Probe]) -> Metric:
        first = next(probe for probe in log.ended if log.results[probe] is not None)
        return tested_by(load(self.out / name_probe(first)))


def _decode(names: Sequence[str], facts: Mapping[str, Any]) -> list[Probe]:
    """The probes of a round, as its line in the log has them."""
    if "probes" not in facts:  # another search's, which is refused by name
        return cast("list[Probe]", names)
    probes = [
        Probe(m, as_whole(n, 1), as_number(rate), as_whole(seed, -(2**63)))
        for m, n, rate, seed in facts["probes"]
    ]
    expect([*map(name_probe, probes)] == [*names])
    return probes
