"""Many runs in one go: the cells of a grid. No torch at import.

Finished cells are skipped and broken ones resumed, so that the same command goes on where it was
stopped; J at a time on this machine. ``cluster`` makes each a job of its own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from regimes.collectives.launcher import launched
from regimes.config import RunConfig, to_dict
from regimes.errors import RegimesError, TrainingError, require
from regimes.launch import gpus
from regimes.launch.processes import die_with_parent
from regimes.presets import Grid
from regimes.records import check_same, complete, read_header, read_lines
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
    """Is there a finished run of this configuration in the folder?

    Raises:
        RecordError: there is a run of another configuration.
    """
    if not (folder / "run.json").exists():
        return False
    check_same(folder, to_dict(resolve(config)))
    return complete(read_header(folder), read_lines(folder / "epochs.jsonl"))


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
    termination.seconds()  # is it a time? Now, not when the signal comes
    with ends_by_sigterm():
        if jobs > 1:
            return _ablate_abreast(todo, jobs, progress)
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


def _ablate_abreast(
    todo: list[tuple[Path, RunConfig]], jobs: int, progress: Callable[[Path, str | None], None]
) -> list[str]:
    with _pool(jobs, [config.device for _, config in todo]) as pool:
        running = {pool.submit(run_cell, *cell): cell[0] for cell in todo}
        outcomes = ((running[future], future.result()) for future in as_completed(running))
        try:
            return collected(outcomes, progress)
        except BrokenProcessPool:
            raise TrainingError(
                "a process of the ablation was killed; finished runs are kept: start the same "
                "command again to go on"
            ) from None
        except BaseException:  # Ctrl-C or SIGTERM: the runs under way end with their epoch
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # runs that the pool has handed out already do not begin
            raise


def _pool(jobs: int, devices: list[str]) -> ProcessPoolExecutor:
    """So many processes, each with its GPU and its share of the cores."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    own: Any = context.SimpleQueue()  # a GPU for each process of the pool
    for gpu in gpus.shared(jobs, devices):
        own.put(gpu)
    start = functools.partial(_start_worker, threads, own)
    return ProcessPoolExecutor(jobs, context, initializer=start)


def collected(outcomes, progress: Callable[[Path, str | None], None]) -> list[str]:  # type: ignore[no-untyped-def]
    failures = []
    for folder, error in outcomes:
        progress(folder, error)
        if error:
            failures.append(f"{folder}: {error}")
    return failures


def _start_worker(threads: int, own: Any) -> None:
    """In each process of the pool: its GPU, of which it takes one from the queue ``own``, and its
    share of the cores; Ctrl-C is the parent's business, and its death the end. SIGTERM is for all
    of its runs, also those that it has not begun."""
    termination.note()
    gpus.take(own.get())
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
