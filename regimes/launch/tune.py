"""The ``tune`` command: the best values for each cell of a grid, by validation data. No torch.

Each cell (an arm of a comparison) tries every combination of the values with the same seeds. The
best mean of the validation metric over a run's last three units wins. With halving, the first round
trains all combinations for a share of the epochs, and each next round the best 1 / ``halving`` for
``halving`` times as long (successive halving: Jamieson & Talwalkar, 2016). The winner is written as
a configuration per cell, which refuses the seeds that chose it.

A trial's runs are in ``OUT/<cell>/<values>/seed-<seed>``, a round's in ``OUT/round-<n>/...``: the
same command continues after a stop.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from rich.markup import escape

from regimes.config import RunConfig, override
from regimes.console import stdout
from regimes.errors import ConfigError, is_whole, require
from regimes.launch import sweep
from regimes.launch.sweep import Cell, Progress
from regimes.launch.trials import Trial, Tuned, chosen_file, ranked, read_scores, write
from regimes.presets.families import shortened
from regimes.records import check_output

Runner = Callable[[list[Cell], int, Progress], object]  # as `sweep.ablate`


def main(
    cells: Mapping[str, RunConfig],
    values: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    jobs: int,
    halving: int | None,
    budget: float | None,
) -> None:
    """The command: print the progress and the table, write the files.

    Args:
        values: "optimizer.lr=0.1,0.2", one text per field.
    """
    console = stdout.console(highlight=False)

    def progress(folder: Path, error: str | None) -> None:
        result = f"failed: {error}" if error else "done"
        stdout.try_print_on(console, escape(f"{folder.relative_to(out)}: {result}"), soft_wrap=True)

    for path in (out / "tune.json", *(chosen_file(out, cell) for cell in cells)):
        check_output(path)  # now, not after the training
    fields = read_values(values)
    tuned = tune(
        cells, fields, seeds, out, jobs=jobs, halving=halving, budget=budget, progress=progress
    )
    write(tuned, out)
    stdout.try_print_on(console, tuned.table().drawn())
    stdout.try_print_on(console, f"{out}/chosen: a configuration for each", markup=False)


def read_values(texts: Sequence[str]) -> dict[str, list[str]]:
    """Values by field; a comma within brackets is part of a value.

    >>> read_values(["optimizer.lr=0.1,0.2", "optimizer.decay_epochs=[4,8],[6,9]"])
    {'optimizer.lr': ['0.1', '0.2'], 'optimizer.decay_epochs': ['[4,8]', '[6,9]']}

    Raises:
        ConfigError: a text without "=".
    """
    values = {}
    for text in texts:
        field, _, several = text.partition("=")
        if not several:
            raise ConfigError(f"--values {text!r} needs the form key=value,value")
        values[field] = re.split(r",(?![^\[{]*[\]}])", several)
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
    progress: Progress = lambda folder, error: None,
    run: Runner | None = None,
) -> Tuned:
    """Try all combinations of values on every cell.

    Args:
        values: by field, e.g. ``{"optimizer.lr": ["0.1", "0.2"]}``. ``optimizer.warmup_from``
            keeps its ratio to ``optimizer.lr`` unless it has values.
        halving: the best 1 / ``halving`` of each round continue; None: one round of whole runs.
        budget: the most epochs of training, all runs together.
        run: runs the cells that are not done; by default `sweep.ablate`.

    Raises:
        ConfigError: no validation data, an unknown field, a budget that is too small or no
            number, a halving below 2.
    """
    good = halving is None or is_whole(halving, 2)
    require(good, "--halving", halving, "a whole number from 2 up")
    good = budget is None or (budget > 0 and math.isfinite(budget))
    require(good, "--budget", budget, "a number of epochs above 0")
    tried = {cell: _trials(config, values) for cell, config in cells.items()}
    shares = _shares(max(map(len, tried.values())), halving)
    _check(cells, seeds, budget, _price(tried, shares, halving, len(seeds)))
    metric = ""
    for number, share in enumerate(shares):
        going = {cell: _survivors(ts, number, halving, metric) for cell, ts in tried.items()}
        place = out if share == 1 else out / f"round-{number}"
        metric, ran = _round(going, seeds, place, jobs, share, progress, run)
        tried = {cell: [ran.get((cell, t.label), t) for t in ts] for cell, ts in tried.items()}
    return Tuned(metric, tried, tuple(seeds))


def _trials(config: RunConfig, values: Mapping[str, Sequence[str]]) -> list[Trial]:
    trials = []
    for texts in itertools.product(*values.values()):
        settings = [f"{field}={text}" for field, text in zip(values, texts, strict=True)]
        made, before = override(config, settings), config.optimizer
        if before.warmup_from and "optimizer.warmup_from" not in values:
            start = before.warmup_from * made.optimizer.lr / before.lr
            made = replace(made, optimizer=replace(made.optimizer, warmup_from=start))
        trials.append(Trial(" ".join(settings) or "as it is", made))
    return trials


def _shares(trials: int, halving: int | None) -> list[float]:
    """The share of the epochs in each round."""
    if halving is None:
        return [1.0]
    rounds = math.ceil(math.log(max(trials, 1), halving) - 1e-9)
    return [float(halving) ** (i - rounds) for i in range(rounds + 1)]


def _left(trials: int, number: int, halving: int | None) -> int:
    """How many trials of a cell are in a round."""
    return max(1, math.ceil(trials / (halving or 1) ** number))


def _survivors(trials: list[Trial], number: int, halving: int | None, metric: str) -> list[Trial]:
    if number == 0:
        return trials
    good = [trial for trial in ranked(trials, metric) if trial.scores]
    return good[: _left(len(trials), number, halving)]


def _price(
    tried: Mapping[str, list[Trial]], shares: Sequence[float], halving: int | None, seeds: int
) -> float:
    """The most epochs of training, all rounds and runs together: the longest trials continue."""
    longest = [sorted((t.config.epochs for t in ts), reverse=True) for ts in tried.values()]
    return seeds * sum(
        share * sum(epochs[: _left(len(epochs), number, halving)])
        for epochs in longest
        for number, share in enumerate(shares)
    )


def _check(
    cells: Mapping[str, RunConfig], seeds: Sequence[int], budget: float | None, price: float
) -> None:
    """Raise ConfigError before any run."""
    for cell, config in cells.items():
        require(config.branch is None, f"{cell}.branch", cell, "no branch: tune its trunk")
        if not config.data.validation_size:
            raise ConfigError(
                f"{cell} has no validation data, which choose in place of the test set: set "
                "data.validation_size"
            )
    if not seeds:
        raise ConfigError("tune needs a seed or more")
    if budget is not None and price > budget:
        raise ConfigError(
            f"the trials need {price:.0f} epochs of training, the budget is {budget:g}: give fewer "
            "values or seeds, or --halving 3"
        )


def _round(
    going: Mapping[str, list[Trial]],
    seeds: Sequence[int],
    place: Path,
    jobs: int,
    share: float,
    progress: Progress,
    run: Runner | None,
) -> tuple[str, dict[tuple[str, str], Trial]]:
    """Train one round: (the metric, the trials with their scores by cell and label)."""
    runs = {
        (cell, trial.label, seed): (
            place / cell / quote(trial.label, " =,[]") / f"seed-{seed}",
            replace(shortened(trial.config, share) if share < 1 else trial.config, seed=seed),
        )
        for cell, trials in going.items()
        for trial in trials
        for seed in seeds
    }
    todo = [cell for cell in runs.values() if not sweep.done(*cell)]
    failures: dict[Path, str] = {}

    def ended(folder: Path, error: str | None) -> None:
        if error:
            failures[folder] = error
        progress(folder, error)

    (run or sweep.ablate)(todo, jobs, ended)
    metric, scored = "", {}
    for cell, trials in going.items():
        for trial in trials:
            folders = [runs[cell, trial.label, seed][0] for seed in seeds]
            failed = next((failures[f] for f in folders if f in failures), "")
            scores: tuple[float, ...] = ()
            if not failed:
                metric, scores = read_scores(folders)
            scored[cell, trial.label] = replace(trial, scores=scores, share=share, failed=failed)
    return metric, scored
