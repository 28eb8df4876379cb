"""The ``tune`` command: the best values for each cell of a grid, by validation data. No torch.

Each cell (an arm of a comparison) tries every combination of the values with the same seeds. The
best mean of the validation metric over a run's last three units wins. With halving, the first round
trains all combinations for a share of the epochs, and each next round the best 1 / ``halving`` for
``halving`` times as long (successive halving: Jamieson & Talwalkar, 2016). The winner is written as
a configuration per cell, which refuses the seeds that chose it.

A trial's runs are in ``OUT/<cell>/<values>/seed-<seed>``, a round's in ``OUT/round-<n>/...``; the
loop is that of all searches (`search/rounds`): the same command continues after a stop.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote

from regimes.base.config import RunConfig, override, to_toml
from regimes.base.config.toml import read_value
from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.base.console.units import metric_unit
from regimes.base.errors import ConfigError, RecordError, is_integer, require
from regimes.plotting.looks import find_metric
from regimes.presets.families import shorten_training
from regimes.records import check_output, load, write_output
from regimes.search import sweep
from regimes.search.rounds import NOT_FINITE, BudgetLeft, RecordSearch, SearchLog, Show, expect
from regimes.search.sweep import Cell

LAST = 3  # units whose mean counts


@dataclass(frozen=True)
class Trial:
    """Holds one combination of values, and how it scored.

    Attributes:
        label: its settings, "optimizer.lr=0.1 levels.high=2"; "as it is" without any.
        config: the cell with them, for the whole run.
        scores: the validation metric by seed, of its last round; empty if it was not trained or
            a run failed.
        share: of the epochs it was trained for.
        failed: the error of a failed run.
    """

    label: str
    config: RunConfig
    scores: tuple[float, ...] = ()
    share: float = 0.0
    failed: str = ""


@dataclass(frozen=True)
class Tuned:
    """Holds all trials, by cell in the order of the values, and the metric and seeds that chose."""

    metric: str
    trials: dict[str, list[Trial]]
    seeds: tuple[int, ...]

    @property
    def chosen(self) -> dict[str, Trial]:
        """Return the best trial of each cell."""
        return {cell: _rank_trials(trials, self.metric)[0] for cell, trials in self.trials.items()}

    def table(self) -> Table:
        """Make a table with one row per trial; the chosen ones are marked."""
        chosen, (factor, unit) = self.chosen, metric_unit(self.metric)
        rows = []
        for cell, trials in self.trials.items():
            for t in trials:
                scores, result = [factor * score for score in t.scores], t.failed
                if scores:
                    spread = f" ± {stdev(scores):.3g}" if len(scores) > 1 else ""
                    result = f"{fmean(scores):.4g}{spread}"
                mark = "chosen" if t is chosen[cell] else ""
                rows.append((cell, t.label, f"{t.share:.2g}", str(len(scores)), result, mark))
        heads = ("schedule", "values", "of the run", "n", f"validation {self.metric}{unit}", "")
        note = (
            f"mean ± sd over seeds {', '.join(map(str, self.seeds))} of the last {LAST} units; the "
            "result needs other seeds"
        )
        return Table(heads, rows, note, texts=2)

    def write(self, out: Path) -> None:
        """Write ``tune.json`` with every trial, and ``chosen/<cell>.toml``. RecordError if a file
        cannot be written, or, after the files of the other cells, if all trials of a cell
        failed."""
        rows = [
            {"schedule": cell, "values": t.label}
            | {"share": t.share, "scores": t.scores, "failed": t.failed}
            for cell, trials in self.trials.items()
            for t in trials
        ]
        labels = {cell: trial.label for cell, trial in self.chosen.items()}
        summary = {"metric": self.metric, "seeds": self.seeds, "trials": rows, "chosen": labels}
        write_output(out / "tune.json", json.dumps(summary, indent=1) + "\n")
        without = {cell: trial for cell, trial in self.chosen.items() if not trial.scores}
        for cell, trial in self.chosen.items():
            if cell not in without:
                config = replace(trial.config, seed=max(self.seeds) + 1, tuned_on=self.seeds)
                write_output(_chosen_file(out, cell), to_toml(config))
        for cell, trial in without.items():
            raise RecordError(f"every trial of {cell} failed: {trial.failed}")


def _chosen_file(out: Path, cell: str) -> Path:
    return out / "chosen" / f"{cell}.toml"


def _rank_trials(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """The longest trained first, then the best; failed ones last."""
    sign = find_metric(metric).sign if any(trial.scores for trial in trials) else 1
    return sorted(trials, key=lambda t: (not t.scores, -t.share, sign * fmean(t.scores or [0])))


def run_tuning(
    cells: Mapping[str, RunConfig],
    values: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    jobs: int,
    halving: int | None,
    budget: float | None,
) -> None:
    """Run the command ``tune``: print the progress and the table, and write the files.

    Args:
        values: "optimizer.lr=0.1,0.2", one text per field.
    """
    console = stdout.make_console(highlight=False, markup=False)
    fields = read_values(values)
    if not fields:
        raise ConfigError(
            "tune: no values to choose from: give --values, e.g. --values optimizer.lr=0.1,0.2,0.4"
        )
    for path in (out / "tune.json", *(_chosen_file(out, cell) for cell in cells)):
        check_output(path)  # now, not after the training
    tuned = tune(
        cells,
        fields,
        seeds,
        out,
        jobs=jobs,
        halving=halving,
        budget=budget,
        show=lambda line, share: stdout.try_print(line, on=console),
    )
    try:
        tuned.write(out)  # before the table: a pipe that is closed loses no file
    finally:
        stdout.try_print(tuned.table().drawn(), on=console)
    stdout.try_print(f"{out}/chosen: a configuration for each", on=console)


def read_values(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read values by field; a comma within brackets is part of a value.

    >>> read_values(["optimizer.lr=0.1,0.2", "optimizer.decay_epochs=[4,8],[6,9]"])
    {'optimizer.lr': ['0.1', '0.2'], 'optimizer.decay_epochs': ['[4,8]', '[6,9]']}

    Raises:
        ConfigError: a text without "=", two of one field, or one value twice.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        field, _, several = text.partition("=")
        if not several:
            raise ConfigError(f"--values {text!r} needs the form key=value,value")
        if field in values:
            raise ConfigError(f"--values {text!r}: {field} has values already: give all in one")
        values[field] = re.split(r",(?![^\[{]*[\]}])", several)
        read = [repr(read_value(value)) for value in values[field]]  # 0.1 and 0.10 are one
        good = "" not in values[field] and len({*read}) == len(read)
        require(good, f"--values {field}", several, "values, each once")
    return values


def tune(
    cells: Mapping[str, RunConfig],
    values: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    out: Path,
    *,
    jobs: int = 1,
    halving: int | None = None,
    budget: float | None = None,
    show: Show = lambda line, share: None,
) -> Tuned:
    """Try all combinations of values on every cell.

    Args:
        values: by field, e.g. ``{"optimizer.lr": ["0.1", "0.2"]}``. ``optimizer.warmup_from``
            keeps its ratio to ``optimizer.lr`` unless it has values.
        halving: the best 1 / ``halving`` of each round continue; None: one round of whole runs.
        budget: the most epochs of training, all runs together.
        show: called with a line about each run as it ends.

    Raises:
        ConfigError: no validation data, an unknown field, a budget that is too small or no
            number, a halving below 2.
    """
    fits = halving is None or is_integer(halving, 2)
    require(fits, "--halving", halving, "a whole number from 2 up")
    fits = budget is None or (budget > 0 and math.isfinite(budget))
    require(fits, "--budget", budget, "a number of epochs above 0")
    tried = {cell: _trials(config, values) for cell, config in cells.items()}
    rounds = _rounds(math.prod(map(len, values.values())), halving)
    _check(tried, rounds, seeds, budget)
    trials = TrialSearch(out, tried, rounds, tuple(seeds), jobs)
    return trials.follow(trials.run_rounds(None, show))[1]


class TrialSearch(RecordSearch[str]):
    """Trains rounds of trials, each for a longer share of the epochs, of the best of the round
    before.

    A run is its folder's name below the search's. What is known of it is in its record; the log has
    its error if it has failed.

    Attributes:
        tried: all trials by cell, as they are before any run.
        rounds: each round's share of the epochs, and its number of trials per cell.
    """

    kind = "tune"

    def __init__(
        self,
        out: Path,
        tried: Mapping[str, Sequence[Trial]],
        rounds: Sequence[tuple[float, int]],
        seeds: tuple[int, ...],
        jobs: int,
    ) -> None:
        self.out, self.question, self.jobs = out, {}, jobs  # values may be added to a search
        self.tried, self.rounds, self.seeds = tried, rounds, seeds
        self.devices = [trial.config.device for trials in tried.values() for trial in trials]
        self.cells: dict[str, Cell] = {}
        for number, (share, _) in enumerate(rounds):
            for cell, trials in tried.items():
                for trial in trials:
                    config = shorten_training(trial.config, share) if share < 1 else trial.config
                    for run, seed in zip(self._runs(number, cell, trial), seeds, strict=True):
                        self.cells[run] = out / run, replace(config, seed=seed)

    def _runs(self, number: int, cell: str, trial: Trial) -> list[str]:
        place = cell if self.rounds[number][0] == 1 else f"round-{number}/{cell}"
        return [f"{place}/{quote(trial.label, ' =,[]')}/seed-{seed}" for seed in self.seeds]

    def cell(self, run: str) -> Cell:
        return self.cells[run]

    def may_fail(self, run: str, error: str) -> bool:
        return True  # the trial is not chosen

    def check_result(self, run: str, result: Any) -> None:
        expect(result is None or isinstance(result, str))

    def describe_run(self, run: str, log: SearchLog[str]) -> str:
        error = log.results[run]
        return f"{run}: {f'failed: {error}' if error else 'done'}"

    def load_log(self) -> SearchLog[str]:
        """Read what is known, without runs of values that were left out, those whose record is
        gone, and those that failed for a reason that may be gone."""
        log = super().load_log()
        log.rounds = [
            replace(each, runs=tuple(run for run in each.runs if run in self.cells))
            for each in log.rounds
        ]
        log.results = {
            run: error
            for run, error in log.results.items()
            if run in self.cells
            and (NOT_FINITE in error if error else sweep.is_finished(*self.cells[run]))
        }
        return log

    def choose(self, log: SearchLog[str], budget: BudgetLeft) -> tuple[list[str], dict[str, Any]]:
        return self.follow(log)[0], {}

    def follow(self, log: SearchLog[str]) -> tuple[list[str], Tuned]:
        """Return what the first round that is not over has yet to train, and all trials as far as
        they are known."""
        tried, metric = {cell: [*trials] for cell, trials in self.tried.items()}, ""
        for number, (share, count) in enumerate(self.rounds):
            going = tried
            if number:
                best = {cell: _rank_trials(trials, metric) for cell, trials in tried.items()}
                going = {cell: [t for t in ts if t.scores][:count] for cell, ts in best.items()}
            chosen = [(c, t, self._runs(number, c, t)) for c, ts in going.items() for t in ts]
            if missing := [run for *_, runs in chosen for run in runs if run not in log.results]:
                return missing, Tuned(metric, tried, self.seeds)
            for cell, trial, runs in chosen:
                failed = next((error for run in runs if (error := log.results[run])), "")
                scores: tuple[float, ...] = ()
                if not failed:  # else the metric may not be known
                    metric, scores = read_scores([self.out / run for run in runs])
                if not all(map(math.isfinite, scores)):
                    failed, scores = f"the validation {metric} is not finite", ()
                known = replace(trial, scores=scores, share=share, failed=failed)
                tried[cell][tried[cell].index(trial)] = known
        return [], Tuned(metric, tried, self.seeds)


def _trials(config: RunConfig, values: Mapping[str, Sequence[str]]) -> list[Trial]:
    trials = []
    for texts in itertools.product(*values.values()):
        settings = [f"{field}={text}" for field, text in zip(values, texts, strict=True)]
        changed, before = override(config, settings), config.optimizer
        if before.warmup_from and "optimizer.warmup_from" not in values:
            start = before.warmup_from * changed.optimizer.lr / before.lr
            changed = replace(changed, optimizer=replace(changed.optimizer, warmup_from=start))
        trials.append(Trial(" ".join(settings) or "as it is", changed))
    return trials


def _rounds(trials: int, halving: int | None) -> list[tuple[float, int]]:
    """Each round's share of the epochs, and its number of trials per cell."""
    if halving is None:
        return [(1.0, trials)]
    last = math.ceil(math.log(trials, halving) - 1e-9)
    return [
        (float(halving) ** (number - last), math.ceil(trials / halving**number))
        for number in range(last + 1)
    ]


def _check(
    tried: Mapping[str, Sequence[Trial]],
    rounds: Sequence[tuple[float, int]],
    seeds: Sequence[int],
    budget: float | None,
) -> None:
    """Raise ConfigError before any run."""
    for cell, trials in tried.items():
        config = trials[0].config
        if config.branch is not None:
            raise ConfigError(
                f"{cell}.branch: expected none in tune: its trials start anew: tune its trunk"
            )
        if not config.data.validation_size:
            raise ConfigError(
                f"{cell} has no validation data, on which tune compares instead of the test set: "
                "set data.validation_size"
            )
        for trial in trials:
            _check_length(cell, trial.config, rounds[0][0], budget)
    if not seeds:
        raise ConfigError("tune needs a seed or more")
    sweep.check_configs(trial.config for trials in tried.values() for trial in trials)
    longest = [sorted((t.config.epochs for t in ts), reverse=True) for ts in tried.values()]
    price = len(seeds) * sum(share * sum(e[:count]) for e in longest for share, count in rounds)
    if budget is not None and price > budget:
        raise ConfigError(
            f"the trials need {price:.0f} epochs of training, the budget is {budget:g}: give fewer "
            "values or seeds, or --halving 3"
        )


def _check_length(cell: str, config: RunConfig, share: float, budget: float | None) -> None:
    """Raise ConfigError if the first round's share of a run is less than an epoch or a step, or if
    a budget, in epochs, cannot count it: a step's part of an epoch is known once data are read."""
    unit = "epochs" if config.steps is None else "steps"
    length = config.epochs if config.steps is None else config.steps
    if share * length < 1:
        raise ConfigError(
            f"{cell}: the first round trains {share:.3g} of its {unit}, less than one of {length}: "
            "give fewer values, a smaller --halving, or its length in steps (--set steps=...)"
        )
    if budget is not None and config.steps is not None:
        raise ConfigError(
            f"{cell}: --budget counts epochs, and its length is in steps: leave --budget out"
        )


def read_scores(folders: Sequence[Path]) -> tuple[str, tuple[float, ...]]:
    """Return the name of the metric, and each run's mean over its last units on validation data;
    nan where it was not finite in one of them."""
    records, scores = [load(folder) for folder in folders], []
    for record in records:
        rows = record.rows[-LAST:]
        measured = [row["validation"]["metric"] for row in rows if "validation" in row]
        mean = float(record.epochs["validation_metric"].tail(LAST).mean())
        scores.append(math.nan if None in measured else mean)  # pandas would leave None out
    return records[0].header["metric"], tuple(scores)
