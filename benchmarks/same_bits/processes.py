"""The processes of a case, forked from a server that has torch and the tree imported.

Each case has processes of its own, so that no case sees what another one has left.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.same_bits.case import Case, Place

PATIENCE = 600.0  # seconds of a stage; a loaded machine is slow
PRELOAD = "benchmarks.same_bits.warm"


class Failed(Exception):
    """A process of a case has ended with an error."""


def train(case: Case, folder: Path, text: Path) -> None:
    """All stages of a case.

    Raises:
        Failed: with the traceback of the first process that failed, or of one that hung.
    """
    folder.mkdir(parents=True)
    for stage, count in enumerate(case.counts):
        places = [Place(folder, text, rank, stage) for rank in range(count)]
        _stage(case, places)


def _stage(case: Case, places: list[Place]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        group = [
            context.Process(target=_child, args=(case, at, len(places), scratch)) for at in places
        ]
        for process in group:
            process.start()
        deadline = time.monotonic() + PATIENCE
        for process in group:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in group if process.is_alive()]
        for process in hung:
            process.kill()
            process.join()
        said = sorted(Path(scratch).glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
        if said:
            raise Failed(said[0].read_text())
        if hung:
            raise Failed(f"{len(hung)} processes were still there after {PATIENCE:g} s")
        if any(process.exitcode for process in group):
            raise Failed(f"exit codes {[process.exitcode for process in group]}")


def _child(case: Case, at: Place, count: int, scratch: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["REGIMES_GRACE"] = str(PATIENCE)
    os.environ["SAME_BITS_MEET"] = Path(scratch, "meet").as_uri()
    if count > 1:  # as a launcher says it
        os.environ.update(
            RANK=str(at.rank),
            LOCAL_RANK=str(at.rank),
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count),
            REGIMES_RENDEZVOUS=Path(scratch, "rendezvous").as_uri(),
        )
    try:
        case.train(at)
    except BaseException:
        Path(scratch, f"part-{at.rank}").write_text(traceback.format_exc())
        os.replace(Path(scratch, f"part-{at.rank}"), Path(scratch, f"error-{at.rank}"))
        os._exit(1)  # without waiting for the others
