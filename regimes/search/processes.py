"""One run on several processes of this machine. No torch at import.

P processes find each other through a file (no port is opened) and communicate over the loopback
interface; torchrun starts runs on more than one machine.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from regimes.base.config import RunConfig, to_toml
from regimes.base.errors import RegimesError, TrainingError, require
from regimes.collectives.launcher import LOOPBACK
from regimes.job import termination

GRACE = 10.0  # seconds that the other processes have to end when one has died


def spawn_processes(
    config: RunConfig, out: Path, count: int, *, resume: bool = False, quiet: bool = True
) -> None:
    """Run one configuration on ``count`` local processes.

    Raises:
        ConfigError: no process, workers that are no multiple of the processes, or a
            ``REGIMES_GRACE`` that is no time.
        TrainingError: a process failed or was lost.
    """
    require(count >= 1, "--processes", count, "at least 1")
    multiple = f"a multiple of the number of processes, {count}"
    require(config.workers % count == 0, "workers", config.workers, multiple)
    grace = termination.grace_seconds()
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        toml = Path(scratch, "run.toml")
        toml.write_text(to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "regimes", "run", str(toml), "--out", str(out)]
        command += ["--resume"] * resume + ["--quiet"] * quiet
        logs = [Path(scratch, f"stderr-{rank}") for rank in range(count)]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        group = [_start(command, rank, count, scratch, logs[rank]) for rank in range(count)]
        try:
            failed = _wait(group)
        except BaseException:  # Ctrl-C or SIGTERM: the processes end with their epoch
            for process in group:
                process.terminate()
            _stop(group, grace + GRACE)
            raise
        finally:
            _stop(group, GRACE)
        if failed is not None:
            raise _failure(group, failed, logs)


def _start(command: list[str], rank: int, count: int, scratch: str, log: Path) -> subprocess.Popen:
    threads = max(1, (os.cpu_count() or 1) // count)
    env = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "REGIMES_RENDEZVOUS": Path(scratch, "rendezvous").as_uri(),
    }
    out = None if rank == 0 else subprocess.DEVNULL
    end_with_us = functools.partial(die_with_parent, os.getpid())
    with log.open("w") as stderr:
        return subprocess.Popen(command, env=env, stdout=out, stderr=stderr, preexec_fn=end_with_us)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, even by kill -9, on Linux (PR_SET_PDEATHSIG).

    Args:
        parent: process id. Where it has ended before, this process ends now: the kernel sends the
            signal to those alone that have asked for it before.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _wait(group: list[subprocess.Popen]) -> int | None:
    """Wait until all have succeeded (None) or one has failed (its index)."""
    while True:
        codes = [process.poll() for process in group]
        if any(codes):
            return next(rank for rank, code in enumerate(codes) if code)
        if None not in codes:
            return None
        time.sleep(0.05)


def _stop(group: list[subprocess.Popen], timeout: float) -> None:
    """Wait for all processes; kill those that still run after the timeout, in seconds."""
    deadline = time.monotonic() + timeout
    for process in group:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(group: list[subprocess.Popen], first: int, logs: list[Path]) -> RegimesError:
    """The error to show: a death by signal, else the first message that is a cause."""
    code = group[first].returncode
    if code < 0:
        name = signal.Signals(-code).name
        return TrainingError(
            f"process {first} of {len(group)} was killed by {name}; the others were stopped, the "
            "record is intact: continue with --resume"
        )
    # a library may have written in another encoding
    texts = [text for log in logs if (text := log.read_text(errors="replace").strip())]
    texts = texts or ["no message"]
    # "lost contact" is how the other processes fail once the first is gone.
    cause = next((text for text in texts if "lost contact" not in text), texts[0])
    error = TrainingError(cause.removeprefix("error: "))
    error.exit_code = code
    return error
