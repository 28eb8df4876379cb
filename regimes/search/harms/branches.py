"""A search for harm whose runs are the trainer's: trunks and branches, each a record. No torch at
import."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.base.config import BranchConfig, RunConfig
from regimes.base.errors import TrainingError, require
from regimes.plotting.groups import tested_by
from regimes.records import Record, last_metric, load, trunk_reference, unit_name
from regimes.search.harms.evidence import Pulse, PulseRun, units_trained
from regimes.search.harms.kinds import PulseKind, apply_pulse
from regimes.search.harms.ladder import grid_toml, ladders_of
from regimes.search.harms.rates import mean_rates
from regimes.search.harms.result import Harm
from regimes.search.harms.search import Facts, HarmSearch, rules_of
from regimes.search.rounds import RecordSearch, SearchBudget, SearchLog, Show, expect
from regimes.search.sweep import Cell

if TYPE_CHECKING:
    from regimes.data.task import Task


class BranchSearch(RecordSearch[PulseRun], HarmSearch):
    """Searches for harm among trunks of several seeds, which the trainer trains, and their
    branches.

    Attributes:
        trunk: the configuration of the first seed's trunk.
        task: model and data in place of those that the trunk names; None: those.
    """

    def __init__(
        self,
        out: Path,
        trunk: RunConfig,
        kinds: Mapping[str, PulseKind],
        task: Task | None,
        margin: float | None,
        parts: int,
        lost_time: bool,
    ) -> None:
        super().__init__(out, kinds, margin, parts, trunk.seed, lost_time)
        self.task, self.devices, self._records = task, [trunk.device], dict[str, Record]()
        self.trunk = replace(trunk, checkpoint_keep=self._list_checkpoints(trunk), reporters=())

    def _list_checkpoints(self, trunk: RunConfig) -> Any:
        """The checkpoints of a trunk from which a pulse may begin."""
        if trunk.steps is None and trunk.unit_steps is None:
            units = trunk.epochs
        elif trunk.steps is not None and trunk.unit_steps is not None:
            units = -(-trunk.steps // trunk.unit_steps)
        else:  # known once the data are read
            return "all"
        counts = range(2, min(self.parts, units) + 1)
        onsets = {onset for parts in counts for onset in rules_of(units, parts).onsets()}
        return tuple(sorted(onsets - {0}))

    # -- runs --------------------------------------------------------------------------------

    def cell(self, run: PulseRun) -> Cell:
        """Return the folder and the configuration of a run."""
        (pulse, seed), folder = run, self.out / self.name(run)
        config = replace(self.trunk, seed=self.trunk.seed + seed)
        if pulse is None:
            return folder, config
        kind, trunk = self.kind_of(pulse), self.out / self.name(PulseRun(None, seed))
        length = pulse.length if len(pulse.spans) == 1 else None
        branch = BranchConfig(
            of=trunk_reference(trunk, folder), at=pulse.first, length=length, skip=kind.skip or None
        )
        config = apply_pulse(replace(config, checkpoint_keep=None), kind, pulse.spans)
        return folder, replace(config, name=self.label(pulse), branch=branch)

    def record(self, run: PulseRun) -> Record:
        """Return the record of a run that has ended. Each is read once."""
        name = self.name(run)
        if name not in self._records:
            self._records[name] = load(self.out / name)
        return self._records[name]

    def search(self, budget: SearchBudget, jobs: int, show: Show) -> Harm:
        """Train runs, ``jobs`` at a time, until all is resolved or the budget is spent, and return
        what was found."""
        self.jobs = jobs
        return self.conclude(self.run_rounds(budget, show))

    def may_fail(self, run: PulseRun, error: str) -> bool:
        return run.pulse is not None and super().may_fail(run, error)  # a trunk ends

    def cost(self, run: PulseRun) -> float:
        return units_trained(run, len(self.record(PulseRun(None, 0)).rows))

    # -- results -----------------------------------------------------------------------------

    def facts_of(self, log: SearchLog[PulseRun]) -> Facts:
        return facts_of_trunk(self.record(PulseRun(None, 0)))

    def end_of(self, run: PulseRun, log: SearchLog[PulseRun]) -> float:
        return _last_metric(self.record(run))

    def harm_of(self, run: PulseRun, log: SearchLog[PulseRun]) -> float:
        if log.results[run] is not None:
            return math.inf
        trunk = PulseRun(None, run.seed)
        self.end_of(trunk, log)  # raises where it is not finite
        end, shown = last_metric(self.record(run), 1), tested_by(self.record(trunk))
        if not math.isfinite(end):
            return math.inf
        return shown.factor * shown.sign * (end - last_metric(self.record(trunk), 1))

    def describe_run(self, run: PulseRun, log: SearchLog[PulseRun]) -> str:
        name, why = self.name(run), log.results[run]
        if why is not None:
            return f"{name}: broke, {why}"
        shown = tested_by(self.record(run))
        if run.pulse is None:
            return f"{name}: {shown.heading} {_last_metric(self.record(run)):.{shown.digits}f}"
        harm = self.harm_of(run, log)
        if math.isinf(harm):
            return f"{name}: broke, the {shown.name} in the end is not finite"
        return f"{name}: harm {harm:z.{shown.digits + 1}f} {shown.unit}"

    def check_result(self, run: PulseRun, result: Any) -> None:
        expect(result is None or (isinstance(result, str) and run.pulse is not None))

    def conclude(self, log: SearchLog[PulseRun]) -> Harm:
        """Return what the rounds have found, with bytes, rates and ladders."""
        first, evidence = self.record(PulseRun(None, 0)), self.judge(log)
        rates = mean_rates(first)
        # by pulse, the share of the trunk's bytes that is not sent, a mean over seeds
        shares: dict[Pulse, list[float]] = {}
        for (pulse, seed), harm in evidence.harms.items():
            if pulse is not None and not math.isinf(harm):
                pair = self.record(PulseRun(pulse, seed)), self.record(PulseRun(None, seed))
                sent, whole = (float(run.epochs["bytes"].sum()) for run in pair)
                shares.setdefault(pulse, []).append(1 - sent / whole if whole else 0.0)
        answer = replace(
            super().conclude(log),
            unit=unit_name(first.config),
            saved={pulse: statistics.fmean(of_seeds) for pulse, of_seeds in shares.items()},
            rates=[rate / (max(rates) or 1.0) for rate in rates],
        )
        answer = replace(answer, ladders=ladders_of(answer, first))
        seeds = 1 + max(run.seed for run in evidence.harms)
        return replace(answer, grid=grid_toml(answer, self.trunk, seeds) if answer.ladders else "")


def facts_of_trunk(run: Record) -> Facts:
    """Return what a search takes from its first trunk: units, metric, its smallest step."""
    shown, units = tested_by(run), len(run.rows)
    expected = "so many steps that a run has two units or more"
    require(units >= 2, "unit_steps", run.config.get("unit_steps"), expected)
    count = run.header["data"].get("test")
    grain = shown.factor / count if shown.name == "accuracy" and count else 0.0
    return Facts(units, _last_metric(run), grain, shown)


def _last_metric(run: Record) -> float:
    """The metric in the end, in the unit of figures.

    Raises:
        TrainingError: it is not finite.
    """
    metric = last_metric(run, 1)
    if not math.isfinite(metric):
        raise TrainingError(f"{run.folder}: the {tested_by(run).name} in the end is not finite")
    return tested_by(run).factor * metric
