"""Groups of gloo processes for tests: they meet in a file and talk over the loopback interface.

They are forked from a server that has torch imported (`preload`), which takes a tenth of a second
each. It finds that by the ``PYTHONPATH`` of ``conftest.py``.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(
    work: Callable[..., Any], count: int, *args: Any, timeout: float | None = 60.0
) -> list[Any]:
    """``work(rank, *args)`` on ``count`` processes; their results (tensors and plain types) in the
    order of ranks, None of a process that was killed.

    Args:
        timeout: of torch's default group, in which they have met; None: they are told of each
            other as by torchrun, and it is the work's to meet.

    Raises:
        RuntimeError: with the traceback of the first process that failed.
    """
    import torch

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddp_scripts.preload"])
    with tempfile.TemporaryDirectory() as scratch:
        group = [
            context.Process(target=_child, args=(work, rank, count, scratch, timeout, args))
            for rank in range(count)
        ]
        for process in group:
            process.start()
        for process in group:
            process.join()
        found = [Path(scratch, str(rank)) for rank in range(count)]
        answers = [torch.load(f, weights_only=True) if f.exists() else (True, None) for f in found]
    failures = [result for well, result in answers if not well]
    if failures:
        raise RuntimeError(failures[0])
    return [result for _, result in answers]


def run_in_turn(
    count: int, *calls: tuple[Any, ...], timeout: float | None = 60.0
) -> list[list[Any]]:
    """Several works, one after the other in the same processes; the results of each.

    Args:
        calls: (work, *args) of each.
        timeout: as of `run`.
    """
    answers = run(_in_turn, count, calls, timeout=timeout)
    return [list(results) for results in zip(*answers, strict=True)]


def _in_turn(rank: int, calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    return [work(rank, *args) for work, *args in calls]


def _child(
    work: Callable[..., Any],
    rank: int,
    count: int,
    scratch: str,
    timeout: float | None,
    args: tuple,
) -> None:
    import torch

    warnings.simplefilter("error")
    # jobs that read ``.grad`` take no step; test_thrown_away tests the warning
    warnings.filterwarnings("ignore", "gradients were exchanged and then cleared")
    warnings.filterwarnings("ignore", ".*the earlier spelling goes with", FutureWarning)
    torch.set_num_threads(1)
    place = Path(scratch, "rendezvous").as_uri()
    if timeout is None:
        launch(rank, count, place)
    else:
        _meet(place, rank, count, timeout)
    try:
        answer = True, work(rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    torch.save(answer, Path(scratch, f"{rank}.part"))
    os.replace(Path(scratch, f"{rank}.part"), Path(scratch, str(rank)))


def launch(rank: int, count: int, place: str | Path, **more: str) -> None:
    """Tell this process of the others, as a launcher does; they meet at a URL, or in a file."""
    meet = place.as_uri() if isinstance(place, Path) else place
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ.update(told, REGIMES_RENDEZVOUS=meet, **more)


def _meet(place: str, rank: int, count: int, timeout: float) -> None:
    import torch.distributed as dist

    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # work may leave at once: not before all are in
    dist.init_process_group(
        "gloo", place, datetime.timedelta(seconds=timeout), world_size=count, rank=rank
    )
    del os.environ["TORCH_DIST_INIT_BARRIER"]
