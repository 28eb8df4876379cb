"""A search through trunks and branches of the trainer, each a record. No torch at import."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.config import BranchConfig, RunConfig, to_dict
from regimes.errors import TrainingError, require
from regimes.harms import measured
from regimes.harms.decide import HarmEvidence, Pulse, Run
from regimes.harms.kinds import Kind, apply_pulse
from regimes.harms.ladder import grid_toml, ladders_of
from regimes.harms.rates import mean_rates
from regimes.harms.result import Harm
from regimes.harms.search import Facts, Search, ended_runs, result_of, rules_of
from regimes.launch import budgeted, sweep
from regimes.launch.budgeted import Round, SearchBudget
from regimes.launch.sweep import Cell
from regimes.plotting.groups import tested_by
from regimes.records import Record, check_same, last_metric, load, trunk_reference, unit_name
from regimes.training.quirks import resolve_quirks

if TYPE_CHECKING:
    from regimes.data.task import Task
    from regimes.harms.search import Show


class Records(Search):
    """Trunks of several seeds, and their branches.

    Attributes:
        trunk: the configuration of the first seed's trunk.
        task: model and data in place of those that the trunk names; None: those.
    """

    def __init__(
        self,
        out: Path,
        trunk: RunConfig,
        kinds: Mapping[str, Kind],
        task: Task | None,
        margin: float | None,
        parts: int,
    ) -> None:
        super().__init__(out, kinds, margin, parts, trunk.seed)
        self.task, self._records = task, dict[str, Record]()
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

    def cell(self, run: Run) -> Cell:
        """The folder and the configuration of a run."""
        (pulse, number), folder = run, self.out / self.name(run)
        config = replace(self.trunk, seed=self.trunk.seed + number)
        if pulse is None:
            return folder, config
        kind, trunk = self.kind_of(pulse), self.out / self.name((None, number))
        length = pulse.length if len(pulse.spans) == 1 else None
        branch = BranchConfig(
            of=trunk_reference(trunk, folder), at=pulse.first, length=length, skip=kind.skip or None
        )
        config = apply_pulse(replace(config, checkpoint_keep=None), kind, pulse.spans)
        return folder, replace(config, name=self.label(pulse), branch=branch)

    def record(self, run: Run) -> Record:
        """The record of a run that has ended."""
        name = self.name(run)
        if name not in self._records:
            self._records[name] = load(self.out / name)
        return self._records[name]

    def search(self, budget: SearchBudget, jobs: int, show: Show) -> Harm:
        """Search, and say what was found."""
        require(jobs >= 1, "jobs", jobs, "at least 1")
        done = ended_runs(self.rounds())
        for run in done:
            check_same(self.out / self.name(run), to_dict(resolve_quirks(self.cell(run)[1])))
        if done and self.task is not None:
            self._check_task(self.task)
        with sweep.make_trainer(jobs, [self.trunk.device], self.task) as trainer:
            self._trainer = trainer
            rounds = self.run(budget, jobs, show)
        return self.found(rounds)

    def _check_task(self, task: Task) -> None:
        """Raise RecordError unless model and data are the first trunk's: the trunks of other
        seeds would be of another search."""
        from regimes.training.state import check_same_task  # torch, so late

        first = (None, 0)
        task.build(self.cell(first)[1])  # whose weights the header then has
        check_same_task(
            self.out / self.name(first), self.record(first).header["data"], task.header()
        )

    def train(self, runs: Sequence[Run], ended: Callable[[Run, Any], None]) -> None:
        """Train runs, or find them finished; a result is the error of a pulse that broke.

        Raises:
            TrainingError: a run could not end for another reason than a loss that is not finite.
            RecordError: another process trains it.
        """
        named = {self.name(run): run for run in runs}
        budgeted.train_cells(
            self._trainer,
            {name: self.cell(run) for name, run in named.items()},
            lambda name, error: ended(named[name], error),
            lambda name: named[name][0] is None,  # a trunk
        )

    # -- results -----------------------------------------------------------------------------

    def facts_of(self, rounds: Sequence[Round]) -> Facts:
        return facts_of_trunk(self.record((None, 0)))

    def end_of(self, run: Run, rounds: Sequence[Round]) -> float:
        return _last_metric(self.record(run))

    def harm_of(self, run: Run, rounds: Sequence[Round]) -> float:
        if result_of(self.name(run), rounds) is not None:
            return math.inf
        pair = self.record(run), self.record((None, run[1]))
        found = measured.by_run(measured.by_unit([pair], broken=True))["harm"]
        return float(found.iloc[0])

    def line(self, run: Run, rounds: Sequence[Round]) -> str:
        name, why = self.name(run), result_of(self.name(run), rounds)
        if why is not None:
            return f"{name}: broke, {why}"
        shown = tested_by(self.record(run))
        if run[0] is None:
            return f"{name}: {shown.heading} {_last_metric(self.record(run)):.{shown.digits}f}"
        harm = self.harm_of(run, rounds)
        if math.isinf(harm):
            return f"{name}: broke, the {shown.name} in the end is not finite"
        return f"{name}: harm {harm:.{shown.digits + 1}f} {shown.unit}"

    def check_result(self, run: Run, result: Any) -> None:
        budgeted.expect(result is None or (isinstance(result, str) and run[0] is not None))

    def found(self, rounds: Sequence[Round]) -> Harm:
        """What the rounds have found, with bytes, rates and ladders."""
        first, known = self.record((None, 0)), self.known(rounds)
        rates = mean_rates(first)
        found = replace(
            super().found(rounds),
            unit=unit_name(first.config),
            saved=self._saved(known),
            rates=[rate / (max(rates) or 1.0) for rate in rates],
        )
        found = replace(found, ladders=ladders_of(found, first))
        seeds = 1 + max(number for _, number in known.harms)
        return replace(found, grid=grid_toml(found, self.trunk, seeds) if found.ladders else "")

    def _saved(self, known: HarmEvidence) -> dict[Pulse, float]:
        """By pulse, the share of the trunk's bytes that is not sent, a mean over seeds."""
        shares: dict[Pulse, list[float]] = {}
        for (pulse, number), harm in known.harms.items():
            if pulse is not None and not math.isinf(harm):
                pair = self.record((pulse, number)), self.record((None, number))
                sent, whole = (float(run.epochs["bytes"].sum()) for run in pair)
                shares.setdefault(pulse, []).append(1 - sent / whole if whole else 0.0)
        return {pulse: sum(of_seeds) / len(of_seeds) for pulse, of_seeds in shares.items()}


def facts_of_trunk(run: Record) -> Facts:
    """What a search takes from its first trunk."""
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
