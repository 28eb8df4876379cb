"""The probes of a plan within a budget, each a record."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regimes.config import RunConfig, to_dict
from regimes.cost.methods import Method
from regimes.errors import ConfigError, RecordError, TrainingError
from regimes.launch import budgeted, sweep
from regimes.launch.budgeted import Ended, Round, SearchBudget
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
from regimes.records import check_same, load
from regimes.training.quirks import resolve_quirks

if TYPE_CHECKING:
    from regimes.data.task import Task

Show = Callable[[str, float], None]  # a line about a probe, and the share of the budget spent
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
        prices = plain_prices(self.prices)
        return {"question": {**self.question}, "per_epoch": self.per_epoch, "prices": prices}


def plain_prices(prices: Mapping[str, Price]) -> dict[str, list[float]]:
    """In plain types."""
    return {name: [p.seconds, p.bytes, p.here] for name, p in prices.items()}


def read_question(out: Path, question: Mapping[str, Any]) -> Asked | None:
    """What the plan in a folder is about; None if there is none yet.

    Raises:
        RecordError: it is about another question.
    """
    rounds = budgeted.rounds_of(out)
    if not rounds:
        return None
    facts = rounds[0].facts
    if "question" not in facts:
        raise RecordError(f"{out} holds another search: choose another folder")
    with budgeted.refuse_damage(out, rounds[0].line):
        budgeted.expect(isinstance(facts["question"], dict))
        budgeted.expect(min(map(budgeted.as_number, facts["rungs"])) > 0)
        first = _prices_of(facts)
        per_epoch = budgeted.as_whole(facts["per_epoch"], 1)
    for key, value in json.loads(json.dumps(question)).items():  # a tuple is a list in the log
        before = facts["question"].get(key)
        if before != value:
            raise RecordError(
                f"{out} holds a plan with {key} {before!r}, not {value!r}: choose another folder"
            )
    latest = first
    for each in rounds:
        with budgeted.refuse_damage(out, each.line):
            latest = _prices_of(each.facts) if "prices" in each.facts else latest
            budgeted.expect(latest.keys() == first.keys())
            probes = _probes_of(each)
            budgeted.expect({probe.method for probe in probes.values()} <= first.keys())
            budgeted.expect([*map(name_probe, probes.values())] == [*each.runs])
            for result in each.results.values():
                if result is not None:
                    budgeted.as_number(result)
    return Asked(question, per_epoch, first, latest)


def _prices_of(facts: Mapping[str, Any]) -> dict[str, Price]:
    """The prices of a round's line."""
    prices = {}
    for name, numbers in facts["prices"].items():
        seconds, size, here = map(budgeted.as_number, numbers)
        budgeted.expect(seconds > 0 and size >= 0 and here >= 0)
        prices[name] = Price(seconds, size, here)
    return prices


@dataclass(frozen=True)
class Probes:
    """The search in its folder.

    Attributes:
        config: of the training, in steps.
        methods: that are compared; dense first.
        facts: what was asked, and what a step takes.
        task: model and data in place of those that the configuration names.
        smaller: they are of a smaller model than the training.
        before: seconds of the budget that were spent before any probe.
    """

    out: Path
    config: RunConfig
    methods: Mapping[str, Method]
    facts: Asked
    aim: Aim
    task: Task | None = None
    smaller: bool = False
    before: float = 0.0

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
        seeds = [self.config.seed + i for i in range(8)]
        for each in budgeted.rounds_of(self.out):
            for run in each.results:
                check_same(
                    self.out / run, to_dict(resolve_quirks(self._config(_probes_of(each)[run])))
                )
        self._check_task(budgeted.rounds_of(self.out))
        with self._trainer(jobs) as train:
            choose = functools.partial(self._choose, budget, jobs, seeds)
            step = functools.partial(self._train, train, budget, show)
            rounds = budgeted.search_in_rounds(self.out, choose, step)
        known = self.known(rounds)
        return known, self._shown(rounds), self._larger(budget, jobs, rounds, known, seeds)

    def _larger(
        self,
        budget: SearchBudget,
        jobs: int,
        rounds: Sequence[Round],
        known: PlanEvidence,
        seeds: Sequence[int],
    ) -> SearchBudget | None:
        """The least budget that has time for more probes."""
        later = [] if known.decided else later_probes(known, seeds)
        if not later:
            return None
        spent, done, factor = self._spent(jobs, rounds)
        if budget.minutes is None:
            return SearchBudget(None, done + math.ceil(min(map(len, later)) / NEXT))
        cost = min(sum(map(self._seconds, probes)) for probes in later)
        return SearchBudget((spent + factor * cost / NEXT) / 60, None)

    def _check_task(self, rounds: Sequence[Round]) -> None:
        """Raise RecordError unless the probes so far have the same model and data."""
        run = next((run for each in rounds for run in each.results), None)
        if self.task is None or run is None:
            return
        from regimes.training.state import check_same_task  # torch, so late

        probe = next(p for each in rounds for name, p in _probes_of(each).items() if name == run)
        self.task.build(self._config(probe))  # whose weights the header then has
        folder = self.out / run
        check_same_task(folder, load(folder).header["data"], self.task.header())

    def _trainer(self, jobs: int) -> AbstractContextManager[sweep.Train]:
        return sweep.make_trainer(jobs, [self.config.device], self.task)

    def _config(self, probe: Probe) -> RunConfig:
        method = self.methods[probe.method]
        return configure_probe(self.config, method, probe.steps, probe.rate, probe.seed)

    # -- rounds ------------------------------------------------------------------------------

    def known(self, rounds: Sequence[Round]) -> PlanEvidence:
        """What the rounds say."""
        rungs = tuple(float(second) for second in rounds[0].facts["rungs"])
        losses = {
            probe: math.inf if each.results[run] is None else float(each.results[run])
            for each in rounds
            for run, probe in _probes_of(each).items()
            if run in each.results
        }
        ended = any(math.isfinite(loss) for loss in losses.values())
        if not ended:
            return PlanEvidence(self.aim, self.prices, rungs, losses, renewed=self.renewed)
        shown = self._shown(rounds)
        low, high = shown.ends
        ends = (low, high) if shown.lower else (-high, -low)
        return PlanEvidence(self.aim, self.prices, rungs, losses, shown.lower, ends, self.renewed)

    def _choose(
        self, budget: SearchBudget, jobs: int, seeds: Sequence[int], rounds: Sequence[Round]
    ) -> tuple[list[str], dict[str, Any]]:
        left = functools.partial(self._affordable, budget, jobs, rounds)
        if not rounds:
            least = 1 if self.aim.loss is None else LENGTHS
            whole = functools.partial(_whole, left, FIRST)
            if len(self.prices) == 1:  # the shortest training that has an answer
                dense = next(iter(self.prices.values()))
                rungs: tuple[float, ...] = min(FEWEST * dense.seconds, self._span), self._span
            else:
                rungs = rungs_within(self._span, self.prices, whole, least)
            if not rungs:
                raise ConfigError(self._too_few(budget, jobs))
            empty = PlanEvidence(self.aim, self.prices, rungs, {})
            facts = {"rungs": [*rungs], **self.facts.plain()}
            return self._chosen(next_probes(empty, seeds, lambda probes: True), facts)
        known = self.known(rounds)
        probes = next_probes(known, seeds, functools.partial(_whole, left, NEXT))
        if not probes and not any(math.isfinite(loss) for loss in known.losses.values()):
            raise TrainingError(
                f"optimizer.lr {self.config.optimizer.lr:g}: no training of the plan ended with a "
                "finite loss: choose a lower learning rate"
            )
        latest = next(each.facts["prices"] for each in rounds[::-1] if "prices" in each.facts)
        now = plain_prices(self.facts.renewed)
        return self._chosen(left(probes), {} if now == latest else {"prices": now})

    def _chosen(
        self, probes: Sequence[Probe], more: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, Any]]:
        plain = [[p.method, p.steps, p.rate, p.seed] for p in probes]
        return [name_probe(probe) for probe in probes], {"probes": plain, **more}

    @property
    def _span(self) -> float:
        """Seconds of the training on the link, given by the aim or by the configured steps of
        dense."""
        if self.aim.seconds is not None:
            return self.aim.seconds
        dense = next(iter(self.prices.values()))
        return float(self.config.steps or 0) * dense.seconds

    def _too_few(self, budget: SearchBudget, jobs: int) -> str:
        dense = next(iter(self.prices.values()))
        least = math.ceil(shortest_span(self.prices, LENGTHS) / dense.seconds)
        if self.aim.loss is not None and (self.config.steps or 0) < least:
            return (
                f"the training has {self.config.steps} steps: expected {least} or more "
                f"for a plan to a loss, whose short trainings have {LENGTHS} lengths"
            )
        if budget.minutes is None:
            fewest = math.ceil(TRIED * len(self.prices) / FIRST)
            return f"runs {budget.runs}: expected {fewest} or more"
        steps = {m: FEWEST * self._span_steps(m) for m in self.prices}
        slow = sum(TRIED * (START + n * self.renewed[m].here) for m, n in steps.items())
        needed = math.ceil(10 * slow / FIRST / jobs / 60) / 10
        model = "" if self.smaller else ", a smaller model (--probe, probe=)"
        return (
            f"minutes {budget.minutes:g}: expected {needed:g} or more for {len(self.prices)} "
            f"methods with this model, dense among them{model}, or fewer methods"
        )

    def _span_steps(self, method: str) -> float:
        """Steps of a method beside one of the slowest."""
        slowest = max(price.seconds for price in self.prices.values())
        return slowest / self.prices[method].seconds

    def _affordable(
        self,
        budget: SearchBudget,
        jobs: int,
        rounds: Sequence[Round],
        probes: Sequence[Probe],
        share: float = 1.0,
    ) -> list[Probe]:
        """As many as a share of what is left of the budget has time for, the first ones."""
        spent, done, factor = self._spent(jobs, rounds)
        left = math.inf if budget.minutes is None else share * (60 * budget.minutes - spent)
        runs = math.inf if budget.runs is None else share * (budget.runs - done)
        kept: list[Probe] = []
        for probe in probes:
            left -= self._seconds(probe) * factor
            if left < 0 or len(kept) >= runs:
                break
            kept.append(probe)
        return kept

    def _spent(self, jobs: int, rounds: Sequence[Round]) -> tuple[float, int, float]:
        """Seconds so far, ended probes, and seconds beside those that were expected."""
        done = [
            probe
            for each in rounds
            for run, probe in _probes_of(each).items()
            if run in each.results
        ]
        spent = budgeted.sum_seconds(rounds)
        expected = sum(self._seconds(probe) for probe in done)
        return self.before + spent, len(done), spent / expected if done else 1 / jobs

    def _seconds(self, probe: Probe) -> float:
        """That a probe is expected to take here, by itself."""
        return START + probe.steps * self.renewed[probe.method].here

    def _train(
        self, train: sweep.Train, budget: SearchBudget, show: Show, chosen: Round, ended: Ended
    ) -> None:
        """Train the missing probes of a round, or find them finished; a result is the loss, None
        if the training broke."""
        share, probes = (
            budgeted.report_shares(budget, budgeted.rounds_of(self.out)),
            _probes_of(chosen),
        )

        def over(run: str, error: str | None) -> None:
            found = None if error else self._measured(run)
            loss = None if found is None else found[0] if found[1].lower else -found[0]
            ended(run, loss)
            said = "broke" if found is None else f"{found[1].name} {found[0]:.4g}"
            show(f"{run}: {said}", share())

        cells = {run: (self.out / run, self._config(probes[run])) for run in chosen.missing}
        budgeted.train_cells(train, cells, over)

    # -- results -----------------------------------------------------------------------------

    def _measured(self, run: str) -> tuple[float, Metric] | None:
        """The metric in the end, in the unit of figures, of validation data where there are some;
        None: not finite."""
        record = load(self.out / run)
        shown, end = tested_by(record), cast("dict[str, Any]", record.tested_rows()[-1])
        metric = (end["validation"] if self.config.data.validation_size else end)["metric"]
        return None if metric is None else (shown.factor * metric, shown)

    def _shown(self, rounds: Sequence[Round]) -> Metric:
        first = next(
            run for each in rounds for run, loss in each.results.items() if loss is not None
        )
        return tested_by(load(self.out / first))


def _probes_of(each: Round) -> dict[str, Probe]:
    """The probes of a round, by name."""
    probes = (
        Probe(
            m, budgeted.as_whole(n, 1), budgeted.as_number(rate), budgeted.as_whole(seed, -(2**63))
        )
        for m, n, rate, seed in each.facts["probes"]
    )
    return dict(zip(each.runs, probes, strict=True))


def _whole(left: Callable[..., list[Probe]], share: float, probes: Sequence[Probe]) -> bool:
    """Has a share of what is left time for all of these?"""
    return len(left(probes, share)) == len(probes)
