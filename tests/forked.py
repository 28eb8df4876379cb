"""Runs and work on several processes, forked from a server that has torch imported.

`regimes.launch.processes` starts Python anew for each, which takes longer than most trainings of
the tests; `test_train` and `test_hard` try that launcher itself.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.trainers import Training
from regimes.config import RunConfig


def train(config: RunConfig, out: Path, count: int) -> None:
    """Run one configuration on ``count`` processes; continues what the folder has begun."""
    ends = Training([config] * count, out).ends()
    assert [end.code for end in ends] == [0] * count, ends


def launched(work: Callable[..., Any], count: int, scratch: Path, *args: Any) -> list[Any]:
    """``work(rank, *args)`` on processes that are told of each other as torchrun does; the
    results in the order of ranks."""
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    meeting = (scratch / "rendezvous").as_uri()
    group = [
        context.Process(target=_child, args=(work, rank, count, meeting, queue, args))
        for rank in range(count)
    ]
    for process in group:
        process.start()
    found = dict(queue.get(timeout=120) for _ in group)
    for process in group:
        process.join(30)
        assert process.exitcode == 0
    return [found[rank] for rank in range(count)]


def _child(
    work: Callable[..., Any], rank: int, count: int, meeting: str, queue: Any, args: tuple[Any, ...]
) -> None:
    import torch

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank),
                      GLOO_SOCKET_IFNAME="lo", REGIMES_RENDEZVOUS=meeting)  # fmt: skip
    torch.set_num_threads(1)
    queue.put((rank, work(rank, *args)))
