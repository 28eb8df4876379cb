"""The cells of a grid as jobs of a cluster or of this machine, through submitit. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.job import termination
from regimes.records.files import in_use
from regimes.search.processes import GRACE
from regimes.search.sweep import Progress, collect_outcomes, ends_by_sigterm, run_cell
from regimes.search.trees import group_waves


def submit_ablation(
    todo: list[tuple[Path, RunConfig]],
    out: Path,
    executor: str,
    options: dict[str, Any],
    progress: Progress,
) -> list[str]:
    """Run the cells of a grid through submitit: every cell is a job of a cluster ("slurm") or of
    this machine ("local"). A preempted job is queued again and resumes from its last checkpoint.
    SIGTERM and Ctrl-C end the jobs of this machine with their epoch, but not a cluster's. Returns
    one message per failed cell.

    Args:
        options: of ``submitit.AutoExecutor.update_parameters``, e.g. ``slurm_partition``.
    """
    pool, grace = _executor(out, executor, options), termination.grace_seconds()
    return [
        failure
        for wave in group_waves(todo)
        for failure in _submit_wave(pool, wave, executor, grace, progress)
    ]


def _submit_wave(
    pool: Any,
    wave: list[tuple[Path, RunConfig]],
    executor: str,
    grace: float,
    progress: Progress,
) -> list[str]:
    """Runs that need no other's end; one message per failed run."""
    jobs = {pool.submit(Cell(), *cell): cell[0] for cell in wave}
    from submitit import helpers

    outcomes = ((jobs[job], _outcome(job)) for job in helpers.as_completed(list(jobs)))
    with ends_by_sigterm():
        try:
            return collect_outcomes(outcomes, progress)
        except BaseException:
            if executor == "local":
                _end_local(jobs, grace)
            raise


def _executor(out: Path, executor: str, options: dict[str, Any]) -> Any:
    """submitit's executor, with its files in ``OUT/jobs``; ConfigError if it cannot be used."""
    try:
        import submitit

        pool = submitit.AutoExecutor(folder=out / "jobs", cluster=executor)
        pool.update_parameters(name="regimes", **options)
        return pool
    except ImportError:
        how = "pip install submitit, or leave it out to run here"
        raise ConfigError(f"--executor needs submitit: {how}") from None
    except (RuntimeError, NameError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"--executor {executor} cannot be used: {why}") from None


def _end_local(jobs: Mapping[Any, Path], grace: float) -> None:
    """Let jobs of this machine end with their epoch; cancel those that run after the grace."""
    deadline, signalled = time.monotonic() + grace + GRACE, set()
    while (running := [job for job in jobs if not job.done()]) and time.monotonic() < deadline:
        for job in running:
            # submitit ignores SIGTERM until a cell begins: repeat it until the run is under way.
            begun = in_use(jobs[job])
            if job not in signalled:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(int(job.job_id), signal.SIGTERM)  # its process, which passes it on
            if begun:
                signalled.add(job)
        time.sleep(0.5)
    for job in running:
        job.cancel()


class Cell:
    """Runs ``run_cell`` as a job that submitit may stop and queue again."""

    def __call__(self, folder: Path, config: RunConfig) -> str | None:
        termination.remember_sigterm()
        return run_cell(folder, config)

    def checkpoint(self, folder: Path, config: RunConfig) -> Any:
        """Return the job to queue after a preemption: the same, because ``run_cell`` resumes."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, folder, config)


def _outcome(job: Any) -> str | None:
    error = job.exception()
    if error is None:
        return job.result()
    return f"job {job.job_id} failed: {str(error).strip().splitlines()[-1]}; see {job.paths.stderr}"
