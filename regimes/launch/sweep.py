"""Many runs in one go: the cells of a grid. No torch at import.

Finished cells are skipped and broken ones resumed, so that the same command goes on where it was
stopped; J at a time on this machine. ``cluster`` makes each a job of its own.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from regimes.collectives.launcher import launched
from regimes.config import RunConfig, to_dict
from regimes.errors import RegimesError, TrainingError, require
from regimes.launch import gpus
from regimes.launch.processes import die_with_parent
from regimes.presets import Grid
from regimes.records import check_same, complete, ended, read_header, read_lines, read_rows
from regimes.training import termination
from regimes.training.quirks import resolve


def cells(grid: Grid, seeds: list[int], out: Path) -> list[tuple[Path, RunConfig]]:
    """The runs of an ablation, seed by seed: ``OUT/<schedule>/seed-<seed>``."""
    return [
        (out / name / f"seed-{seed}", replace(config, seed=seed))
        for seed in seeds
        for name, config in grid.items()
    ]


def done(folder: Path, config: RunConfig) -> bool:
    """Is there a finished run of this configuration in the folder, with its last checkpoint?

    Raises:
        RecordError: there is a run of another configuration.
    """
    if not (folder / "run.json").exists():
        return False
    check_same(folder, to_dict(resolve(config)))
    header = read_header(folder)
    return complete(header, read_rows(folder, header)) and ended(
        read_lines(folder / "events.jsonl")
    )


def ablate(
    todo: list[tuple[Path, RunConfig]],
    jobs: int,
    progress: Callable[[Path, str | None], None],
) -> list[str]:
    """Run the cells, ``jobs`` at a time; returns one message per failed cell. Each of several
    jobs has one of the visible GPUs to itself, or shares it where there are fewer.

    Args:
        progress: called as each run ends, with its folder and None or the error.
    """
    alone = "1 where a launcher has started several processes, which share each run"
    require(jobs == 1 or launched().count == 1, "--jobs", jobs, alone)
    termination.grace_seconds()  # is it a time? Now, not when the signal comes
    with ends_by_sigterm():
        if jobs > 1:
            return _ablate_in_parallel(todo, jobs, progress)
        outcomes = ((folder, run_cell(folder, config)) for folder, config in todo)
        with _one_group():
            return collected(outcomes, progress)


@contextmanager
def _one_group() -> Iterator[None]:
    """Where a launcher has started several processes, all go through the cells together, and meet
    once."""
    if launched().count == 1:
        yield
        return
    from regimes.collectives.processes import shared_group  # torch, so late

    with shared_group():
        yield


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is inside at once; but in a run, which ends its epoch.

    Raises:
        Terminated: it came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread
        return
    code = termination.Terminated.exit_code
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    try:
        yield
    except SystemExit as end:
        if end.code != code:
            raise
        raise termination.Terminated(
            "ended by SIGTERM; finished runs are kept, and those under way have saved their last "
            "epoch: start the same command again to go on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _ablate_in_parallel(
    todo: list[tuple[Path, RunConfig]], jobs: int, progress: Callable[[Path, str | None], None]
) -> list[str]:
    with ExitStack() as stack:
        places = gpus.shared(jobs, [config.device for _, config in todo])
        pools = [stack.enter_context(_pool(jobs, gpu)) for gpu in places]
        try:
            return collected(_outcomes(todo, pools), progress)
        except BrokenProcessPool:
            _terminate()
            raise TrainingError(
                "a process of the ablation was killed; finished runs are kept: start the same "
                "command again to go on"
            ) from None
        except BaseException:  # Ctrl-C or SIGTERM: the runs under way end with their epoch
            _terminate()
            raise


def _outcomes(
    todo: list[tuple[Path, RunConfig]], pools: list[ProcessPoolExecutor]
) -> Iterator[tuple[Path, str | None]]:
    """Each run's folder and None or its error, as the runs end; a pool that is free takes the next.

    Raises:
        BrokenProcessPool: a process with a run was killed. One that has nothing left to do may be.
    """
    left, running = iter(todo), dict[Future[str | None], tuple[ProcessPoolExecutor, Path]]()

    def begin(pool: ProcessPoolExecutor) -> None:
        for cell in itertools.islice(left, 1):
            running[pool.submit(run_cell, *cell)] = pool, cell[0]

    for pool in pools:
        begin(pool)
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            pool, folder = running.pop(future)
            error = future.result()
            begin(pool)
            yield folder, error


def _terminate() -> None:
    for process in multiprocessing.active_children():
        process.terminate()


def _pool(jobs: int, gpu: str | None) -> ProcessPoolExecutor:
    """One process, with its GPU and its share of the cores of so many.

    A pool for each process: the processes of one pool share a lock, and a process that is killed
    while it waits for work takes the lock with it, so that the others would wait for ever.
    """
    context = multiprocessing.get_context("spawn")
    start = functools.partial(_start_worker, max(1, (os.cpu_count() or 1) // jobs), gpu)
    return ProcessPoolExecutor(1, context, initializer=start)


def collected(outcomes, progress: Callable[[Path, str | None], None]) -> list[str]:  # type: ignore[no-untyped-def]
    failures = []
    for folder, error in outcomes:
        progress(folder, error)
        if error:
            failures.append(f"{folder}: {error}")
    return failures


def _start_worker(threads: int, gpu: str | None) -> None:
    """In each process: its GPU and its share of the cores. Ctrl-C is the parent's business, and its
    death the end. SIGTERM is for all runs of the process, also those that it has not begun."""
    termination.remember_sigterm()
    gpus.take(gpu)
    import torch

    die_with_parent()
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_cell(folder: Path, config: RunConfig) -> str | None:
    """One run, started or resumed; returns the error's sentence, if any.

    Raises:
        Terminated: SIGTERM came.
    """
    from regimes.training.loop import run

    try:
        run(config, folder, resume=(folder / "run.json").exists())
    except termination.Terminated:
        raise  # not of this run alone: the whole ablation was asked to end
    except RegimesError as error:
        return str(error)
    return None
