"""Several processes on this machine, and many runs in one go. No torch at import.

``processes`` starts P copies of a run that meet in a file (nothing listens on a network) and talk
over the loopback interface; torchrun is the way to more than one machine. ``ablate`` runs the
cells of a grid, J at a time, skipping finished ones and resuming broken ones.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from regimes import gpus, grace
from regimes.config import RunConfig, to_dict, to_toml
from regimes.errors import ConfigError, RegimesError, TrainingError
from regimes.presets import Grid
from regimes.quirks import resolve
from regimes.records import check_same, complete, read_header, read_lines

GRACE = 10.0  # seconds that the others have to end by themselves when one process has died


def processes(
    config: RunConfig, out: Path, count: int, *, resume: bool = False, quiet: bool = True
) -> None:
    """Run one configuration on ``count`` local processes.

    Raises:
        TrainingError: a process failed; the others were stopped.
    """
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        toml = Path(scratch, "run.toml")
        toml.write_text(to_toml(config))
        command = [sys.executable, "-m", "regimes", "run", str(toml), "--out", str(out)]
        command += [*(["--resume"] if resume else []), *(["--quiet"] if quiet else [])]
        logs = [Path(scratch, f"stderr-{rank}") for rank in range(count)]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        group = [_start(command, rank, count, scratch, logs[rank]) for rank in range(count)]
        try:
            failed = _wait(group)
        except BaseException:  # Ctrl-C or SIGTERM: they end with the epoch, within the grace
            for process in group:
                process.terminate()
            _stop(group, grace.seconds() + GRACE)
            raise
        finally:
            _stop(group, GRACE)
        if failed is not None:
            raise _failure(group, failed, logs)


def _start(command: list[str], rank: int, count: int, scratch: str, log: Path) -> subprocess.Popen:
    threads = max(1, (os.cpu_count() or 1) // count)
    env = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "REGIMES_RENDEZVOUS": Path(scratch, "rendezvous").as_uri(),
    }
    stdout = None if rank == 0 else subprocess.DEVNULL
    with log.open("w") as stderr:
        return subprocess.Popen(
            command, env=env, stdout=stdout, stderr=stderr, preexec_fn=_die_with_parent
        )


def _die_with_parent() -> None:
    """On Linux: be killed when the launcher is, kill -9 included (prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _wait(group: list[subprocess.Popen]) -> int | None:
    """Until all have ended well (None) or one has failed (the first one's index)."""
    while True:
        codes = [process.poll() for process in group]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)


def _stop(group: list[subprocess.Popen], patience: float) -> None:
    deadline = time.monotonic() + patience
    for process in group:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(group: list[subprocess.Popen], first: int, logs: list[Path]) -> RegimesError:
    """The error to show: a death by signal, else the most telling message."""
    code = group[first].returncode
    if code < 0:
        name = signal.Signals(-code).name
        return TrainingError(
            f"process {first} of {len(group)} was killed by {name}; the others were stopped, the "
            "record is intact: continue with --resume"
        )
    texts = [log.read_text().strip() for log in logs]
    telling = [t for t in texts if t and "lost contact" not in t] or [t for t in texts if t]
    message = (telling or ["no message"])[0].removeprefix("error: ")
    error = TrainingError(message)
    error.exit_code = code
    return error


# -- many runs -------------------------------------------------------------------------------


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
    if jobs == 1:
        outcomes = ((folder, run_cell(folder, config)) for folder, config in todo)
        return _collect(outcomes, progress)
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    own: Any = context.SimpleQueue()  # a GPU for each process of the pool
    for gpu in gpus.shared(jobs, [config.device for _, config in todo]):
        own.put(gpu)
    start = functools.partial(_start_worker, threads, own)
    with ProcessPoolExecutor(jobs, context, initializer=start) as pool:
        running = {pool.submit(run_cell, *cell): cell[0] for cell in todo}
        outcomes = ((running[future], future.result()) for future in as_completed(running))
        try:
            return _collect(outcomes, progress)
        except BrokenProcessPool:
            raise TrainingError(
                "a process of the ablation was killed; finished runs are kept: start the same "
                "command again to go on"
            ) from None
        except BaseException:  # Ctrl-C: records survive a kill, so end the workers at once
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _collect(outcomes, progress: Callable[[Path, str | None], None]) -> list[str]:  # type: ignore[no-untyped-def]
    failures = []
    for folder, error in outcomes:
        progress(folder, error)
        if error:
            failures.append(f"{folder}: {error}")
    return failures


def _start_worker(threads: int, own: Any) -> None:
    """In each process of the pool: its GPU, of which it takes one from the queue ``own``, and its
    share of the cores; Ctrl-C is the parent's business, and its death the end."""
    gpus.take(own.get())
    import torch

    _die_with_parent()
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def submit(
    todo: list[tuple[Path, RunConfig]],
    out: Path,
    executor: str,
    options: dict[str, Any],
    progress: Callable[[Path, str | None], None],
) -> list[str]:
    """The same through submitit: every cell a job of a cluster ("slurm") or of this machine
    ("local"). A preempted job is queued again and goes on from its last checkpoint.

    Args:
        options: of ``submitit.AutoExecutor.update_parameters``, e.g. ``slurm_partition``.

    Raises:
        ConfigError: submitit is not installed, or knows no such executor or option.
    """
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "--executor needs submitit: pip install submitit, or leave it out to run here"
        ) from None
    try:
        pool = submitit.AutoExecutor(folder=out / "jobs", cluster=executor)
        pool.update_parameters(name="regimes", **options)
    except (RuntimeError, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--executor {executor} cannot be used: {str(error).splitlines()[0]}"
        ) from None
    jobs = {pool.submit(Cell(), *cell): cell[0] for cell in todo}
    outcomes = ((jobs[job], _outcome(job)) for job in submitit.helpers.as_completed(list(jobs)))
    return _collect(outcomes, progress)


class Cell:
    """``run_cell`` as a job that submitit may stop and queue again."""

    def __call__(self, folder: Path, config: RunConfig) -> str | None:
        return run_cell(folder, config)

    def checkpoint(self, folder: Path, config: RunConfig) -> Any:
        """What to queue after a preemption: the same, since ``run_cell`` resumes."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, folder, config)


def _outcome(job: Any) -> str | None:
    error = job.exception()
    if error is None:
        return job.result()
    return f"job {job.job_id} failed: {str(error).strip().splitlines()[-1]}; see {job.paths.stderr}"


def run_cell(folder: Path, config: RunConfig) -> str | None:
    """One run, started or resumed; returns the error's sentence, if any.

    Raises:
        Terminated: SIGTERM came.
    """
    from regimes.train import run

    try:
        run(config, folder, resume=(folder / "run.json").exists())
    except grace.Terminated:
        raise  # not of this run alone: the whole ablation was asked to end
    except RegimesError as error:
        return str(error)
    return None
