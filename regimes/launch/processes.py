"""One run on several processes of this machine. No torch.

P copies of the run meet in a file (nothing listens on a network) and talk over the loopback
interface; torchrun is the way to more than one machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from regimes.config import RunConfig, to_toml
from regimes.errors import RegimesError, TrainingError, require
from regimes.training import termination

GRACE = 10.0  # seconds that the others have to end by themselves when one process has died


def spawn(
    config: RunConfig, out: Path, count: int, *, resume: bool = False, quiet: bool = True
) -> None:
    """Run one configuration on ``count`` local processes.

    Raises:
        ConfigError: none at all, the workers cannot be shared among them, or ``REGIMES_GRACE`` is
            no time.
        TrainingError: a process failed or was lost.
    """
    require(count >= 1, "--processes", count, "at least 1")
    multiple = f"a multiple of the number of processes, {count}"
    require(config.workers % count == 0, "workers", config.workers, multiple)
    grace = termination.grace_seconds()
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
            command, env=env, stdout=stdout, stderr=stderr, preexec_fn=die_with_parent
        )


def die_with_parent() -> None:
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
