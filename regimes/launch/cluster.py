"""The cells of a grid as jobs, through submitit: of a cluster or of this machine. No torch here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regimes.config import RunConfig
from regimes.errors import ConfigError
from regimes.launch.processes import GRACE
from regimes.launch.sweep import collected, ends_by_sigterm, run_cell
from regimes.monitor.watch import in_use
from regimes.training import termination


def submit(
    todo: list[tuple[Path, RunConfig]],
    out: Path,
    executor: str,
    options: dict[str, Any],
    progress: Callable[[Path, str | None], None],
) -> list[str]:
    """`sweep.ablate` through submitit: every cell a job of a cluster ("slurm") or of this machine
    ("local"). A preempted job is queued again and goes on from its last checkpoint. SIGTERM and
    Ctrl-C leave a cluster's jobs alone; those of this machine end with their epoch.

    Args:
        options: of ``submitit.AutoExecutor.update_parameters``, e.g. ``slurm_partition``.
    """
    pool, grace = _executor(out, executor, options), termination.grace_seconds()
    jobs = {pool.submit(Cell(), *cell): cell[0] for cell in todo}
    from submitit import helpers

    outcomes = ((jobs[job], _outcome(job)) for job in helpers.as_completed(list(jobs)))
    with ends_by_sigterm():
        try:
            return collected(outcomes, progress)
        except BaseException:
            if executor == "local":
                _end_local(jobs, grace)
            raise


def _executor(out: Path, executor: str, options: dict[str, Any]) -> Any:
    """submitit's, its jobs' files in ``OUT/jobs``; ConfigError if there is none."""
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
    return pool


def _end_local(jobs: Mapping[Any, Path], grace: float) -> None:
    """Let jobs of this machine end with their epoch; what has not within the grace is cancelled.

    submitit lets SIGTERM pass until a cell begins, so one without a run under way is told again.
    """
    deadline, told = time.monotonic() + grace + GRACE, set()
    while (left := [job for job in jobs if not job.done()]) and time.monotonic() < deadline:
        for job in left:
            begun = in_use(jobs[job])
            if job not in told:
                os.kill(int(job.job_id), signal.SIGTERM)  # its process, which passes it on
            if begun:
                told.add(job)
        time.sleep(0.5)
    for job in left:
        job.cancel()


class Cell:
    """``run_cell`` as a job that submitit may stop and queue again."""

    def __call__(self, folder: Path, config: RunConfig) -> str | None:
        termination.remember_sigterm()
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
