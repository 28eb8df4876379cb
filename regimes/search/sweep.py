"""The runs of a grid, J at a time on this machine. No torch at import.

Finished cells are skipped and broken ones resumed, so the same command continues after a stop.
``cluster`` makes each cell a job.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regimes.base.config import RunConfig, to_dict
from regimes.base.errors import ConfigError, FolderInUse, RegimesError, TrainingError, require
from regimes.collectives.launcher import read_launch
from regimes.job import termination
from regimes.presets import Grid
from regimes.records import (
    check_same,
    has_ended,
    is_complete,
    locate_trunk,
    read_events,
    read_header,
    read_rows,
    trunk_of,
)
from regimes.search import gpus, trees
from regimes.search.processes import die_with_parent
from regimes.training.quirks import resolve_quirks

if TYPE_CHECKING:
    from regimes.data.task import Task

Cell = tuple[Path, RunConfig]  # a run's folder and configuration
Outcome = tuple[Path, str | None]  # a run's folder, and its error if it failed


class InUse(str):
    """Stands in place of a run's error: another process writes its record, or its trunk's."""


Progress = Callable[[Path, str | None], None]  # called with each outcome
Train = Callable[[list[Cell], Progress], list[str]]  # trains cells; a message per failed one


def check_configs(configs: Iterable[RunConfig]) -> None:
    """Check each schedule before the first run starts.

    Raises:
        ConfigError: a number out of its bounds, or fields that do not fit together.
    """
    from regimes.training.plug_ins import PlugIns  # torch, so late

    for config in configs:
        PlugIns.from_config(resolve_quirks(config))


def list_cells(grid: Grid, seeds: list[int], out: Path) -> list[Cell]:
    """List the runs of an ablation, seed by seed: ``OUT/<schedule>/seed-<seed>``; see `trees`."""
    return [
        (out / name / f"seed-{seed}", replace(config, seed=seed))
        for seed in seeds
        for name, config in trees.place_branches(grid, out, seed).items()
    ]


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Answer whether there is a finished run of this configuration in the folder, with its last
    checkpoint.

    Raises:
        RecordError: there is a run of another configuration.
    """
    if not (folder / "run.json").exists():
        return False
    check_same(folder, to_dict(resolve_quirks(config)))
    trunk = trunk_of(folder)
    if trunk is not None and not (trunk / "run.json").exists():  # it will be trained again
        return False
    header = read_header(folder)
    return is_complete(header, read_rows(folder, header)) and has_ended(read_events(folder))


def ablate(todo: list[Cell], jobs: int, progress: Progress) -> list[str]:
    """Run the cells, ``jobs`` at a time, each job on one of the visible GPUs, shared if there are
    fewer; returns one message per failed cell."""
    with make_trainer(jobs, [config.device for _, config in todo]) as train:
        return train(todo, progress)


@contextmanager
def make_trainer(jobs: int, devices: Sequence[str], task: Task | None = None) -> Iterator[Train]:
    """Make what trains cells as `ablate` does, as often as it is called; its processes stay.

    Args:
        devices: of the configurations.
        task: model and data of all cells, in place of those that they name.

    Raises:
        ConfigError: no such number of jobs here, or a task that cannot be sent to a process.
        Terminated: SIGTERM came.
    """
    require(jobs >= 1, "jobs", jobs, "at least 1")
    alone = "1 where a launcher has started several processes, which share each run"
    require(jobs == 1 or read_launch().count == 1, "--jobs", jobs, alone)
    termination.grace_seconds()  # a wrong value is an error now, not when the signal comes
    with ends_by_sigterm(), ExitStack() as stack:
        if jobs > 1:
            _check_sent(task, jobs)
            # The processes of one pool share a lock. One that is killed while it waits for work
            # never releases it, and the others would block: so each has a pool of its own.
            context = multiprocessing.get_context("spawn")
            threads = max(1, (os.cpu_count() or 1) // jobs)
            starts = [
                functools.partial(_start_worker, threads, gpu, os.getpid())
                for gpu in gpus.share_gpus(jobs, devices)
            ]
            pools = [
                stack.enter_context(ProcessPoolExecutor(1, context, initializer=start))
                for start in starts
            ]
            yield functools.partial(_train_in_parallel, pools, task)
            return
        if read_launch().count > 1:  # all processes run each cell together, in one group for all
            from regimes.collectives.connect import shared_group  # torch, so late

            stack.enter_context(shared_group())

        def train(todo: list[Cell], progress: Progress) -> list[str]:
            waves = [cell for wave in trees.group_waves(todo) for cell in wave]
            return collect_outcomes(
                ((folder, run_cell(folder, c, task)) for folder, c in waves), progress
            )

        yield train


def _check_sent(task: Task | None, jobs: int) -> None:
    """Raise ConfigError if another process cannot have the model and the data."""
    try:
        pickle.dumps(task)
    except Exception as error:  # the user's classes may raise anything
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"jobs = {jobs}: model or data cannot be sent to another process ({why}): expected 1, "
            "or functions and classes of a module that can be imported"
        ) from None


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block at once, except in a run, which ends with its epoch.

    Raises:
        Terminated: SIGTERM came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread
        return
    code = termination.Terminated.exit_code
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    try:
        yield
    except (SystemExit, termination.Terminated) as end:
        if isinstance(end, SystemExit) and end.code != code:
            raise
        raise termination.Terminated(
            "ended by SIGTERM; finished runs are kept, and those under way have saved their last "
            "epoch: start the same command again to go on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _train_in_parallel(
    pools: list[ProcessPoolExecutor], task: Task | None, todo: list[Cell], progress: Progress
) -> list[str]:
    try:
        waves = [_outcomes(wave, pools, task) for wave in trees.group_waves(todo)]
        return collect_outcomes(itertools.chain.from_iterable(waves), progress)
    except BaseException as error:  # Ctrl-C or SIGTERM: the runs end with their epoch
        # those of the pools alone: a caller may have other children
        for process in [each for pool in pools for each in (pool._processes or {}).values()]:
            process.terminate()
        if not isinstance(error, BrokenProcessPool):
            raise
        raise TrainingError(
            "a process of the ablation was killed; finished runs are kept: start the same "
            "command again to go on"
        ) from None


def _outcomes(
    todo: list[Cell], pools: list[ProcessPoolExecutor], task: Task | None
) -> Iterator[Outcome]:
    """The outcome of each run as it ends; a free pool takes the next run.

    Raises:
        BrokenProcessPool: a process was killed during a run; an idle one may be killed.
    """
    queue = iter(todo)
    first = zip(pools, queue, strict=False)  # pools first: the queue loses no cell where they end
    running = {pool.submit(run_cell, *cell, task): (pool, cell[0]) for pool, cell in first}
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            pool, folder = running.pop(future)
            error = future.result()
            for cell in itertools.islice(queue, 1):
                running[pool.submit(run_cell, *cell, task)] = pool, cell[0]
            yield folder, error


def collect_outcomes(outcomes: Iterable[Outcome], progress: Progress) -> list[str]:
    """Report each outcome; returns one message per failed run; one that is in use is none."""
    failures = []
    for folder, error in outcomes:
        progress(folder, error)
        if error and not isinstance(error, InUse):
            failures.append(f"{folder}: {error}")
    return failures


def _start_worker(threads: int, gpu: str | None, parent: int) -> None:
    """Prepare a process of a pool: its GPU and threads. It ignores Ctrl-C, which the parent
    handles, and ends with the parent."""
    die_with_parent(parent)  # before torch, whose import takes seconds in which the parent may end
    termination.remember_sigterm()  # SIGTERM ends all runs of the process, the next ones too
    gpus.hide_other_gpus(gpu)
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_cell(folder: Path, config: RunConfig, task: Task | None = None) -> str | None:
    """Start or resume one run; returns the error's sentence, if any, or `InUse`.

    Args:
        task: as of `make_trainer`.

    Raises:
        Terminated: SIGTERM came.
    """
    from regimes.records.files import in_use
    from regimes.training.loop import run

    if config.branch is not None and in_use(trunk := locate_trunk(folder, config.branch.of)):
        return InUse(f"another process is writing to its trunk, {trunk}")
    try:
        run(config, folder, resume=(folder / "run.json").exists(), reporters=(), task=task)
    except termination.Terminated:
        raise  # ends the ablation, not this run alone
    except FolderInUse as error:
        return InUse(error)
    except RegimesError as error:
        return str(error)
    return None
